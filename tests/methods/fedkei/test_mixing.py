"""Weights, layouts and mixtures."""

import pytest
import torch

from fedtar_flare.errors import ExchangeError
from fedtar_flare.methods.fedkei.mixing import Layout, initial_beta, mix, origin_of, outer_step

MODULE = {
    "base_model.model.encoder.a.lora_A.weight": torch.arange(6.0).view(2, 3),
    "base_model.model.encoder.a.lora_B.weight": torch.arange(8.0).view(4, 2),
    "head.bias": torch.tensor([1.0, 2.0]),
    "head.weight": torch.arange(10.0).view(2, 5),
}


def test_a_module_comes_back_from_its_vectors():
    layout = Layout.of(MODULE)
    vectors = layout.vectors(MODULE)
    assert {kind: len(v) for kind, v in vectors.items()} == {"adapter": 14, "head": 12}
    back = layout.tensors(vectors)
    assert list(back) == sorted(MODULE) and all(torch.equal(back[name], value) for name, value in MODULE.items())


def test_stacked_modules_come_back_from_their_columns_also_with_different_numbers_by_kind():
    layout = Layout.of(MODULE)
    stacked = {n: torch.stack([v, v + 1, v + 2][: 2 if n.startswith("head") else 3]) for n, v in MODULE.items()}
    columns = layout.columns(stacked)
    assert columns["adapter"].shape == (14, 3) and columns["head"].shape == (12, 2)
    assert all(torch.equal(value, stacked[name]) for name, value in layout.stacked(columns).items())


@pytest.mark.parametrize(
    "change, said",
    [
        ({"head.bias": None}, "missing"),
        ({"other": torch.zeros(1, 1)}, "unknown"),
        ({"head.bias": torch.zeros(3, 2)}, "head.weight"),
        ({"head.bias": torch.zeros(2)}, "head.bias"),
        ({"head.bias": torch.zeros(0, 2)}, "head.bias"),
        ({"head.bias": torch.zeros(())}, "head.bias"),
    ],
)
def test_centres_that_do_not_fit_are_refused_by_name(change, said):
    stacked = {name: value[None] for name, value in MODULE.items()} | change
    with pytest.raises(ExchangeError, match=said):
        Layout.of(MODULE).columns({name: value for name, value in stacked.items() if value is not None})


def test_initial_weights_are_means_of_clusters():
    beta = initial_beta([0, 1, 0, 1, 1])
    matrix = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    centres = mix(matrix, beta)
    assert torch.equal(centres[:, 0], matrix[:, [0, 2]].double().mean(1).float())
    torch.testing.assert_close(centres[:, 1], matrix[:, [1, 3, 4]].mean(1))


def test_one_centre_of_fixed_weight_is_the_mean():
    matrix = torch.randn(1000, 7, generator=torch.Generator().manual_seed(1))
    centre = mix(matrix, initial_beta([0] * 7))
    torch.testing.assert_close(centre[:, 0], matrix.double().mean(1).float(), rtol=1.2e-7, atol=0)
    assert torch.equal(centre @ torch.ones(1), centre[:, 0])


def test_the_outer_step_stays_within_its_limit_and_in_its_support():
    beta0 = initial_beta([0, 0, 1])
    g = torch.Generator().manual_seed(2)
    matrix, gradient = torch.randn(9, 3, generator=g), 50 * torch.randn(9, 2, generator=g)
    beta, distance = outer_step(beta0, matrix, gradient, 1.0, limit=0.5)
    assert (distance > 0.5).all() and not beta[beta0 == 0].any()
    torch.testing.assert_close((beta - beta0).norm(dim=0), torch.full((2,), 0.5, dtype=torch.float64))
    free, free_distance = outer_step(beta0, matrix, gradient, 1.0, limit=1e9)
    assert torch.equal(free_distance, distance) and torch.allclose(
        torch.nn.functional.cosine_similarity(free - beta0, beta - beta0, dim=0), torch.ones(2, dtype=torch.float64)
    )
    still, none = outer_step(beta0, matrix, gradient, 0.0)
    assert torch.equal(still, beta0) and not none.any()


def test_factors_of_ia3_are_always_mixed_around_the_start():
    start = {"base_model.model.a.ia3_l": torch.ones(3, 1), "head.bias": torch.full((2,), 5.0)}
    assert torch.equal(origin_of(start)["base_model.model.a.ia3_l"], torch.ones(3, 1))
    assert not origin_of(start)["head.bias"].any()
