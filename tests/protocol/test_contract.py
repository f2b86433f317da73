"""The contract: whatever is not declared is refused, at a site and at the server alike."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up import CONTRACT as MADE_UP
from made_up import ROWS
from tables import cases, leaves

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.protocol.contract import NUMBER_KINDS, Field, Group, Task
from fedtar_flare.protocol.exchange import ExchangeSchema, check_tensors
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, OK, Reply, check_field, check_reply
from fedtar_flare.registry import contract_of

A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"
SCHEMA = ExchangeSchema({A: (2, 3), B: (3, 2)})

GOOD = {
    "number": [0.5, -1, 10**9],
    "count": [0, 3, 3.0],
    "numbers": [None, [], [0.1, -2.0], (1,)],
    "tree": [{}, {"steps": {"1": {"n": 3, "f1": None}}, "all": [1, 2]}],
    "word": ["0123abc-0", "x"],
    "words": [{}, {"fedtar_flare": "0.1.0"}],
    "schema": [SCHEMA.to_dict()],
    "settings": [{}, {"name": "a text", "deep": {"list": [1, None, True, "x"]}}],
}
TEXT = "Anna Muster"
LONG = {str(i): "x" * 500 for i in range(600)}  # 300,000 characters
BAD = {
    "number": [TEXT, True, None, float("nan"), float("inf"), 10**400, 2**60, [1.0], torch.ones(1)],
    "count": [-1, 1.5, TEXT, True, float("nan")],
    "numbers": [TEXT, [TEXT], [0.0] * 101, [float("nan")], [[1.0]], 1.0, {"1": 1.0}],
    "tree": [TEXT, [1], {TEXT: 1}, {"a": TEXT}, {"a": [TEXT]}, {"a": {"b": {TEXT: 1}}}, {1: 2}, {"a": True}],
    "word": [TEXT, "", "x" * 65, "a\n", 3, None],
    "words": [TEXT, {TEXT: "x"}, {"x": TEXT}, {"x": 1}, {f"k{i}": "v" for i in range(101)}],
    "schema": [
        TEXT,
        {},
        {**SCHEMA.to_dict(), "note": TEXT},
        *({name: [1]} for name in (TEXT, "patient/x", 3)),
        *({A: [size]} for size in (TEXT, 10**400, 1.5)),
    ],
    "settings": [TEXT, LONG, {"a": "x" * 600}, {"a": float("inf")}, {"a": torch.ones(1)}, {b"a": 1}, {"a": b"x"}],
}
DEEP = {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}
BAD["tree"] += [DEEP, {f"k{i}": i for i in range(200)}]
BAD["settings"] += [DEEP, {("a", "b"): 1}]


@pytest.mark.parametrize("kind", GOOD)
def test_a_value_of_its_kind_passes_and_any_other_is_refused_and_never_repeated(kind):
    for value in GOOD[kind]:
        check_field(Field("f", kind, "about", length=1000), value)
    for value in BAD[kind]:
        with pytest.raises(ExchangeError) as caught:
            check_field(Field("f", kind, "about", length=100 if kind in ("numbers", "words") else 1000), value)
        assert "Anna" not in str(caught.value), value


@pytest.mark.parametrize(
    ("kind", "value"),
    [("number", -1), ("number", 11), ("numbers", [5, 11]), ("tree", {"a": [-1]}), ("tree", {"a": 11})],
)
def test_bounds_hold_for_every_number(kind, value):
    with pytest.raises(ExchangeError, match="within 0 to 10"):
        check_field(Field("f", kind, "about", least=0, most=10), value)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=8,
)


@given(kind=st.sampled_from(sorted(GOOD)), value=junk)
def test_a_check_either_passes_or_refuses(kind, value):
    """No value makes a check fail in another way, and what passes is short JSON without free text."""
    field = Field("f", kind, "about", length=100)
    try:
        check_field(field, value)
    except ExchangeError:
        return
    assert len(json.dumps(value, allow_nan=False)) < 25_000
    if kind not in ("settings", "schema", "word", "words"):
        assert not any(isinstance(leaf, str) for leaf in leaves(value).values())


names = st.text() | st.sampled_from(["samples", "seconds", "scores", "t_numbers", "schema", "validation_loss"])


@given(
    task=st.sampled_from(["handshake", "train", "close_round", "other", ""]),
    numbers=st.dictionaries(names, junk, max_size=3),
    payload=st.dictionaries(names, junk, max_size=3),
    status=st.sampled_from([OK, ABSTAIN, ERROR]),
)
def test_a_header_that_passes_holds_declared_fields_only(task, numbers, payload, status):
    contract = contract_of("fedtar")
    try:
        check_reply(contract, task, Reply(status, 1, 1, "", numbers, payload, "fedtar"))
    except ExchangeError:
        return
    declared = {field.name: field for field in contract.task(task).fields}
    assert all(declared[name].kind in NUMBER_KINDS for name in numbers)
    assert all(declared[name].kind not in NUMBER_KINDS for name in payload)
    assert status != ERROR or not payload


def learn(**changes):
    return Reply(**{"status": OK, "round": 1, "step": 1, "numbers": {"n": 2}, "method": "madeup", **changes})


def test_an_honest_reply_of_every_kind_passes():
    """Required fields are required of good answers only."""
    payload = {"slopes": [0.5, 1.0], "grades": {"a": 1}, "mode": "x", "parts": {"a": "b"}, "options": {"a": "b"}}
    whole = learn(numbers={"n": 2, "loss": 0.5, "seconds": 1.0}, payload=payload)
    for reply in (learn(status=ABSTAIN, numbers={}), Reply(ERROR, 1, 1, "no disk", {"seconds": 0.1}), whole):
        check_reply(MADE_UP, "learn", reply)
    with pytest.raises(ExchangeError, match="task 'other' is not one of method 'madeup'"):
        check_reply(MADE_UP, "other", learn())


REPLIES = cases(__file__, "replies.yaml") | {"reason": [{"reason": "x" * 600}]}


@pytest.mark.parametrize("word", REPLIES)
def test_a_reply_that_is_not_described_is_refused(word):
    for changes in REPLIES[word]:
        with pytest.raises(ExchangeError, match=word):
            check_reply(MADE_UP, "learn", learn(**changes))


DOWN = {A: (2, 3), B: (3, 2), "bank.features": (9, 3), "module.a": (5, 2, 2)}


def tensors(changes=()):
    given = {A: torch.ones(2, 3), B: torch.ones(3, 2), "bank.features": torch.ones(4, 3), "module.a": torch.ones(2, 2)}
    return {name: value for name, value in (given | dict(changes)).items() if value is not None}


TENSORS = {  # in the place of the honest ones, by what the refusal says
    "": [{}, *({"bank.features": rows} for rows in (torch.ones(0, 3), torch.ones(1, 3), None)),
         {"module.a": torch.ones(5, 2, 2)}, {"module.a": None}],  # the shape of the pool
    "at most 4 rows of 3": [{"bank.features": torch.ones(*shape)} for shape in ((5, 3), (4, 2), (3,))],
    "not dense": [{"bank.features": torch.ones(2, 3).to_sparse()}],
    "dtype": [{"bank.features": torch.ones(2, 3, dtype=torch.int64)}],
    "finite": [{"bank.features": torch.tensor([[1.0, float("nan"), 0.0]])}],
    "not a torch tensor": [{"bank.features": [[1.0, 2.0, 3.0]]}],
    "agreed": [{"module.a": torch.ones(5, 2)}, {"module.a": torch.ones(2)}],
    "module.b": [{"module.b": torch.ones(2, 2)}],
    "lora_A": [{A: None}, {A: torch.ones(3, 3)}],
    "is not allowed": [{"other": torch.ones(1)}],
    "bank.features": [{"xbank.features": torch.ones(1, 3)}, {"bank.features.more": torch.ones(1, 3)}],
    "name": [{"patient/bank.features": torch.ones(1, 3)}],
}  # fmt: skip


@pytest.mark.parametrize("word", TENSORS)
def test_what_the_groups_declare_passes_and_any_other_tensor_is_refused(word):
    for changes in TENSORS[word]:
        with pytest.raises(ExchangeError, match=word) if word else nullcontext():
            check_tensors(MADE_UP, "learn", tensors(changes), DOWN, sends="difference")


def test_rows_that_are_allowed_by_another_name_too_are_rows_still():
    wide = MADE_UP.allowing(["*"])
    assert wide.group_of(wide.task("learn"), "bank.features") == ROWS
    with pytest.raises(ExchangeError, match="rows"):
        check_tensors(wide, "learn", tensors({"bank.features": torch.ones(9, 3)}), DOWN, sends="difference")
    with pytest.raises(ExchangeError, match="dictionary"):
        check_tensors(wide, "learn", [torch.ones(1)], DOWN, sends="difference")


def test_what_contradicts_itself_cannot_be_built():
    unsent = {"up": ("nothing",), "sends": "difference"}
    wrong = [
        Task("a", "", (), **more) for more in (unsent, {"up": ("rows",)}, {"sends": "difference"}, {"follows": ("b",)})
    ]
    wrong.append(Task("a", "", (Field("x", "number", ""), Field("x", "count", ""))))
    doubled = [{"groups": (*MADE_UP.groups, ROWS)}, {"tasks": (*MADE_UP.tasks, MADE_UP.tasks[0])}]
    for change in (*doubled, *({"tasks": (task,)} for task in wrong)):
        with pytest.raises(ConfigError, match="madeup"):
            replace(MADE_UP, **change)
    for bad in ({"kind": "tree", "noisy": True}, {"kind": "number", "noisy": True, "public": True}):
        with pytest.raises(ConfigError, match="noise"):
            Field("x", about="", **bad)
    with pytest.raises(ConfigError, match="max_rows"):
        Group("rows", "collected", ("x",), "")


def test_a_schema_is_sorted_and_comes_back_from_the_wire():
    schema = ExchangeSchema.of({"b": torch.ones(2, 3), "a": torch.zeros(4)})
    assert [*schema.shapes] == ["a", "b"] and schema.parameters == 10
    with pytest.raises(ExchangeError, match="'b' of the agreed exchange is missing"):
        schema.check({"a": torch.zeros(4)})
    sent = schema.to_dict()
    assert ExchangeSchema.from_dict(dict(reversed(sent.items()))) == schema
    with pytest.raises(ExchangeError, match="more than 200000000 values"):
        ExchangeSchema.from_dict({"a": [2**31] * 8})  # 0 values, counted in 64 bits
