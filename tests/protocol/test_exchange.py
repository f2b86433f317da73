import pytest
import torch

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.protocol.exchange import ExchangeSchema, check_update_size, euclidean_norm
from fedtar_flare.runtime.membership import disagreement_table

STATE = {"b": torch.ones(2, 3), "a": torch.zeros(4)}


def test_schema_is_sorted_counts_and_round_trips():
    schema = ExchangeSchema.of(STATE, "bfloat16")
    assert [name for name, _ in schema.shapes] == ["a", "b"] and schema.parameters == 10
    sent = schema.to_dict()
    assert ExchangeSchema.from_dict(sent | {"shapes": dict(reversed(sent["shapes"].items()))}) == schema
    with pytest.raises(ExchangeError, match="more than 200000000 values"):
        ExchangeSchema.from_dict(sent | {"shapes": {"a": [2**31] * 8}})  # 0 values, counted in 64 bits
    assert schema != ExchangeSchema.of(STATE)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"c": torch.ones(1)}, "'c'"),
        ({"a": None}, "'a'"),
        ({"a": torch.zeros(5)}, "'a'"),
        ({"b": torch.ones(2, 3, dtype=torch.float16)}, "'b'"),
        ({"b": torch.full((2, 3), float("nan"))}, "'b'"),
        ({"b": torch.ones(2, 3).to_sparse()}, "'b'"),
    ],
)
def test_check_names_the_tensor_at_fault(change, word):
    schema = ExchangeSchema.of(STATE)
    schema.check(STATE)
    with pytest.raises(ExchangeError, match=word):
        schema.check({**STATE, **change})
    with pytest.raises(ExchangeError, match="missing"):
        schema.check({"a": STATE["a"]})


def test_too_large_an_update_is_refused():
    weights = {"a": torch.full((4,), 2.0)}
    check_update_size({"a": torch.full((4,), 19.9)}, weights, 10.0)
    with pytest.raises(ExchangeError, match="norm is 10"):
        check_update_size({"a": torch.full((4,), 20.1)}, weights, 10.0)


def test_norm_agrees_with_the_concatenated_vector():
    state = {"x": torch.randn(5, 7), "y": torch.randn(11)}
    flat = torch.cat([v.flatten() for v in state.values()])
    assert euclidean_norm(state) == pytest.approx(float(flat.double().norm()), rel=1e-12)


def test_disagreement_table_shows_only_what_differs():
    table = disagreement_table({"site-a": {"x": 1, "y": 2}, "site-b": {"x": 1, "y": 3}, "site-c": {"x": 1}})
    assert "site-a" in table and "(missing)" in table
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["y"]
