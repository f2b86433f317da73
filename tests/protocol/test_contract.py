"""The contract: whatever is not declared is refused, at a site and at the server alike."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up import CONTRACT as MADE_UP
from made_up import ROWS

from fedtar_flare import registry
from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import matches
from fedtar_flare.protocol.contract import LORA_NAMES, Contract, Group, Task
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.fields import NUMBER_KINDS, Field
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, OK, Reply
from fedtar_flare.registry import contract_of

A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"
SCHEMA = ExchangeSchema(((A, (2, 3)), (B, (3, 2))))

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
        {"shapes": {}},
        {**SCHEMA.to_dict(), "note": TEXT},
        {"shapes": {TEXT: [1]}, "dtype_up": "float32"},
        {"shapes": {"patient/x": [1]}, "dtype_up": "float32"},
        {"shapes": {A: [TEXT]}, "dtype_up": "float32"},
        {"shapes": {A: [10**400]}, "dtype_up": "float32"},
        {"shapes": {A: [1.5]}, "dtype_up": "float32"},
        {"shapes": {A: [2]}, "dtype_up": TEXT},
        {"shapes": {A: [2], 3: [2]}, "dtype_up": "float32"},
    ],
    "settings": [TEXT, LONG, {"a": "x" * 600}, {"a": float("inf")}, {"a": torch.ones(1)}, {b"a": 1}, {"a": b"x"}],
}
BAD["tree"] += [{"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}, {f"k{i}": i for i in range(200)}]
BAD["settings"] += [{"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}, {("a", "b"): 1}]


@pytest.mark.parametrize("kind", GOOD)
def test_a_value_of_its_kind_passes(kind):
    for value in GOOD[kind]:
        Field("f", kind, "about", length=1000).check(value)


@pytest.mark.parametrize("kind", BAD)
def test_any_other_value_is_refused_and_never_repeated(kind):
    for value in BAD[kind]:
        with pytest.raises(ExchangeError) as caught:
            Field("f", kind, "about", length=100 if kind in ("numbers", "words") else 1000).check(value)
        assert "Anna" not in str(caught.value), value


def test_bounds_hold_for_every_number():
    for kind, values in (("number", [-1, 11]), ("numbers", [[5, 11]]), ("tree", [{"a": [-1]}, {"a": 11}])):
        for value in values:
            with pytest.raises(ExchangeError, match="within 0 to 10"):
                Field("f", kind, "about", least=0, most=10).check(value)


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
        field.check(value)
    except ExchangeError:
        return
    assert len(json.dumps(value, allow_nan=False)) < 25_000
    if kind not in ("settings", "schema", "word", "words"):
        assert not any(isinstance(leaf, str) for leaf in leaves(value))


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


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
        contract.check_reply(task, Reply(status, 1, 1, "", numbers, payload, "fedtar"))
    except ExchangeError:
        return
    declared = {field.name: field for field in contract.task(task).fields}
    assert all(declared[name].kind in NUMBER_KINDS for name in numbers)
    assert all(declared[name].kind not in NUMBER_KINDS for name in payload)
    assert status != ERROR or not payload


def learn(**changes):
    return Reply(**{"status": OK, "round": 1, "step": 1, "numbers": {"n": 2}, "method": "madeup", **changes})


def test_an_honest_reply_of_every_kind_passes():
    payload = {"slopes": [0.5, 1.0], "grades": {"a": 1}, "mode": "x", "parts": {"a": "b"}, "options": {"a": "b"}}
    MADE_UP.check_reply("learn", learn(numbers={"n": 2, "loss": 0.5, "seconds": 1.0}, payload=payload))


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (learn(numbers={}), "lacks the field 'n'"),
        (learn(numbers={"n": 2, "other": 1.0}), "unknown field 'other'"),
        (learn(numbers={"n": 2, "mode": 1.0}), "unknown field 'mode'"),
        (learn(payload={"n": 2}), "unknown field 'n'"),
        (learn(numbers={"n": 1000}), "within 1 to 100"),
        (learn(method="fedtar"), "of method 'fedtar'"),
        (learn(method=""), "of method ''"),
        (learn(reason="x" * 600), "reason"),
        (learn(plugin="0.1.0 of Anna"), "plugin"),
        (learn(plugin=17), "plugin"),
        (Reply(ERROR, 1, 1, "no", {"n": 1}), "more than its reason"),
        (Reply(ERROR, 1, 1, "no", {}, {"mode": "x"}), "more than its reason"),
        (Reply(ERROR, 1, 1, "no", {"seconds": -1.0}), "seconds"),
    ],
)
def test_a_reply_that_is_not_described_is_refused(reply, word):
    with pytest.raises(ExchangeError, match=word):
        MADE_UP.check_reply("learn", reply)


def test_fields_that_are_required_are_required_of_good_answers_alone():
    MADE_UP.check_reply("learn", learn(status=ABSTAIN, numbers={}))
    MADE_UP.check_reply("learn", Reply(ERROR, 1, 1, "no disk", {"seconds": 0.1}))
    with pytest.raises(ExchangeError, match="task 'other' is not one of method 'madeup'"):
        MADE_UP.check_reply("other", learn())


DOWN = {A: (2, 3), B: (3, 2), "bank.features": (9, 3), "module.a": (5, 2, 2)}


def tensors(**changes):
    given = {A: torch.ones(2, 3), B: torch.ones(3, 2), "bank.features": torch.ones(4, 3), "module.a": torch.ones(2, 2)}
    given |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in given.items() if value is not None}


def check(sent, sends="difference", task="learn", agreed=DOWN, contract=MADE_UP):
    contract.check_tensors(task, sent, agreed, sends=sends)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bank__features": torch.ones(0, 3)},
        {"bank__features": torch.ones(1, 3, dtype=torch.bfloat16)},
        {"bank__features": None},
        {"module__a": torch.ones(5, 2, 2)},
        {"module__a": None},
    ],
    ids=["all", "no row", "bfloat16", "no rows", "the pool's shape", "no module"],
)
def test_what_the_groups_declare_passes(changes):
    check(tensors(**changes))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"bank__features": torch.ones(5, 3)}, "at most 4 rows of 3"),
        ({"bank__features": torch.ones(4, 2)}, "at most 4 rows of 3"),
        ({"bank__features": torch.ones(3)}, "at most 4 rows of 3"),
        ({"bank__features": torch.ones(2, 3, dtype=torch.int64)}, "dtype"),
        ({"bank__features": torch.tensor([[1.0, float("nan"), 0.0]])}, "finite"),
        ({"bank__features": [[1.0, 2.0, 3.0]]}, "not a torch tensor"),
        ({"module__a": torch.ones(5, 2)}, "agreed"),
        ({"module__a": torch.ones(2)}, "agreed"),
        ({"module__b": torch.ones(2, 2)}, "module.b"),
        ({A: None}, "lora_A"),
        ({A: torch.ones(3, 3)}, "lora_A"),
        ({"other": torch.ones(1)}, "'other' is not allowed"),
        ({"xbank.features": torch.ones(1, 3)}, "xbank.features"),
        ({"bank.features.more": torch.ones(1, 3)}, "bank.features.more"),
        ({"patient/bank.features": torch.ones(1, 3)}, "name"),
    ],
)
def test_any_other_tensor_is_refused(changes, word):
    with pytest.raises(ExchangeError, match=word):
        check(tensors(**changes))


def test_the_message_is_of_the_kind_that_the_task_sends():
    initial = {A: torch.ones(2, 3), B: torch.ones(3, 2)}
    check(initial, "initial", "hello", dict(SCHEMA.shapes))
    for sends, task, word in (
        ("difference", "hello", "only full weights"),
        ("initial", "learn", "only a difference"),
        ("difference", "rest", "no tensors"),
        ("initial", "rest", "no tensors"),
    ):
        with pytest.raises(ExchangeError, match=word):
            check(initial, sends, task, dict(SCHEMA.shapes))
    for agreed in ({}, {**dict(SCHEMA.shapes), A: (3, 3)}, {**dict(SCHEMA.shapes), A.replace("x", "y"): (1,)}):
        with pytest.raises(ExchangeError):
            check(initial, "initial", "hello", agreed)
    with pytest.raises(ExchangeError, match="dictionary"):
        check([torch.ones(1)])


def test_a_parameter_travels_whole_where_it_is_allowed_by_its_whole_name():
    name = "projection.weight"
    sent, agreed = {**tensors(), name: torch.ones(2)}, {**DOWN, name: (2,)}
    with pytest.raises(ExchangeError, match=name):
        check(sent, agreed=agreed)
    check(sent, agreed=agreed, contract=MADE_UP.allowing(["projection.weight"]))
    for other in ("xprojection.weight", "projection.weight.more", "projectionXweight"):
        sent = {**tensors(), other: torch.ones(2)}
        with pytest.raises(ExchangeError, match=other):
            check(sent, agreed={**DOWN, other: (2,)}, contract=MADE_UP.allowing(["projection.weight"]))


def test_a_site_that_allows_any_name_still_bounds_the_rows():
    wide = MADE_UP.allowing(["*"])
    assert wide.group_of(wide.task("learn"), "bank.features") == ROWS
    with pytest.raises(ExchangeError, match="rows"):
        check(tensors(bank__features=torch.ones(9, 3)), contract=wide)


@given(st.text())
def test_no_foreign_name_is_an_adapter_s(name):
    assert not matches(name, (LORA_NAMES,)) or name.startswith("base_model.model.")


@pytest.mark.parametrize(
    "change",
    [
        {"groups": (*MADE_UP.groups, ROWS)},
        {"tasks": (*MADE_UP.tasks, MADE_UP.tasks[0])},
        {"tasks": (Task("a", "", (), up=("nothing",), sends="difference"),)},
        {"tasks": (Task("a", "", (), up=("rows",)),)},
        {"tasks": (Task("a", "", (), sends="difference"),)},
        {"tasks": (Task("a", "", (), follows=("b",)),)},
        {"tasks": (Task("a", "", (Field("x", "number", ""), Field("x", "count", ""))),)},
    ],
)
def test_a_contract_that_contradicts_itself_cannot_be_built(change):
    with pytest.raises(ConfigError, match="madeup"):
        replace(MADE_UP, **change)


def test_fields_and_groups_that_contradict_themselves_cannot_be_built():
    for bad in ({"kind": "tree", "noisy": True}, {"kind": "number", "noisy": True, "public": True}):
        with pytest.raises(ConfigError, match="noise"):
            Field("x", about="", **bad)
    with pytest.raises(ConfigError, match="max_rows"):
        Group("rows", "collected", ("x",), "")


@pytest.mark.parametrize("method", registry.names())
def test_every_installed_contract_can_be_read_by_all(method):
    contract = contract_of(method)
    assert isinstance(contract, Contract) and contract.method == method and contract.title and contract.stays
    for task in contract.tasks:
        assert task.about and all(field.about for field in task.fields)
        assert {"privacy", "seconds"} <= {field.name for field in task.fields}, "every task can be answered everywhere"
    assert any(task.at == "start" for task in contract.tasks)
