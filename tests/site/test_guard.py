import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.errors import ConfigError
from fedtar_flare.protocol.messages import ERROR, OK, Reply
from fedtar_flare.site.guard import OutboundGuard

A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"


def good():
    return {A: torch.ones(2, 3), B: torch.ones(3, 2)}


def context(task, sent=None):
    ctx = FLContext()
    ctx.set_prop(FLContextKey.TASK_NAME, task, private=True, sticky=False)
    if sent is not None:
        data = FLModelUtils.to_shareable(FLModel(params=sent, params_type=ParamsType.FULL))
        ctx.set_prop(FLContextKey.TASK_DATA, data, private=True, sticky=False)
    return ctx


def message(params=None, kind=ParamsType.DIFF, meta=None, **reply):
    meta = {**Reply(OK, 1, 2, **reply).to_meta(), **(meta or {})}
    model = FLModel(params=params, params_type=kind, meta=meta) if params else FLModel(metrics={}, meta=meta)
    return FLModelUtils.to_shareable(model)


def outcome(shareable, ctx, **guard):
    result = FLModelUtils.from_shareable(OutboundGuard(**guard).process(shareable, ctx))
    return Reply.from_meta(result.meta), result.params


def test_the_agreed_update_passes_unchanged():
    sent = message(good(), numbers={"samples": 3, "train_loss": 0.5})
    reply, params = outcome(sent, context("train", good()))
    assert reply.status == OK and all(torch.equal(params[n], v) for n, v in good().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_wire_formats_pass(dtype):
    reply, _ = outcome(message({n: v.to(dtype) for n, v in good().items()}), context("train", good()))
    assert reply.status == OK


def nan(value, position=0):
    value = value.clone()
    value.view(-1)[position] = float("nan")
    return value


REFUSED = {
    "a tensor that was not sent down": ({**good(), "y.lora_A.weight": torch.ones(1)}, "y.lora_A.weight"),
    "a hypernetwork": ({**good(), "hypernetworks.x.weight": torch.ones(1)}, "hypernetworks.x.weight"),
    "a missing tensor": ({A: torch.ones(2, 3)}, B),
    "not a number": ({**good(), A: nan(torch.ones(2, 3), 4)}, A),
    "infinity": ({**good(), B: torch.full((3, 2), float("inf"))}, B),
    "a wrong shape": ({**good(), A: torch.ones(3, 2)}, A),
    "a wrong format": ({**good(), A: torch.ones(2, 3, dtype=torch.float64)}, A),
    "integers": ({**good(), A: torch.ones(2, 3, dtype=torch.int64)}, A),
    "no tensor at all": ({**good(), A: [1.0, 2.0]}, A),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_named_and_nothing_else_leaves(case):
    params, name = REFUSED[case]
    reply, left = outcome(message(params, numbers={"samples": 3}), context("train", good()))
    assert reply.status == ERROR and name in reply.reason
    assert not left and not reply.numbers and not reply.payload
    assert (reply.round, reply.step) == (1, 2)


@pytest.mark.parametrize(
    "shareable",
    [
        message(payload={"patients": ["x"]}),
        message(payload={"scores": {"1": {"text": "a" * 600}}}),
        message(payload={"scores": {"1": torch.ones(2)}}),
        message(payload={"scores": {"1": float("nan")}}),
        message(numbers={"loss": float("inf")}),
        message(numbers={"loss": "text"}),
        message(reason="x" * 600),
        message(meta={"note": "free text"}),
        FLModelUtils.to_shareable(FLModel(metrics={"accuracy": "a name"}, meta=Reply(OK, 1, 1).to_meta())),
        FLModelUtils.to_shareable(FLModel(metrics={"accuracy": 1.0})),
    ],
)
def test_headers_hold_numbers_and_known_fields_only(shareable):
    reply, _ = outcome(shareable, context("close_round"))
    assert reply.status == ERROR


def test_full_weights_leave_in_the_handshake_only():
    assert outcome(message(good(), ParamsType.FULL), context("handshake"))[0].status == OK
    assert outcome(message(good(), ParamsType.FULL), context("train", good()))[0].status == ERROR
    assert outcome(message(good(), ParamsType.FULL), context("close_round"))[0].status == ERROR
    assert outcome(message(good()), context("another_task", good()))[0].status == ERROR


def test_the_size_of_a_message_is_limited():
    reply, _ = outcome(message(good()), context("train", good()), max_values=5)
    assert reply.status == ERROR and "12 values" in reply.reason


def test_error_replies_of_flare_pass():
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    left = OutboundGuard().process(reply, context("train"))
    assert left.get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def test_an_error_reply_carries_nothing_but_its_code():
    reply = message(good())
    reply.set_return_code("patient 17")
    reply.set_header("note", "patient 17")
    left = OutboundGuard().process(reply, context("train", good()))
    assert left.get_return_code() == ReturnCode.EXECUTION_EXCEPTION and "patient" not in str(left) and "DXO" not in left


def test_what_stands_beside_the_content_is_refused():
    for smuggle in (lambda m: m.update(patients=["x"]), lambda m: m.set_header("note", "patient 17")):
        sent = message(good())
        smuggle(sent)
        reply, params = outcome(sent, context("train", good()))
        assert reply.status == ERROR and not params and "patient 17" not in reply.reason
    reply, _ = outcome(make_reply(ReturnCode.OK), context("train", good()))
    assert reply.status == ERROR


@pytest.mark.parametrize(
    "payload",
    [
        {"scores": {"Anna Muster": {"n": 1}}},
        {"scores": {"steps": {"1": {"note": "Anna"}}}},
        {"counts": {"train": ["Anna"]}},
        {"counts": [1, 2]},
        {"t_numbers": ["Anna"]},
        {"t_numbers": [0.0] * 101},
        {"min_cell": "Anna"},
        {"settings": "Anna Muster"},
        {"versions": {"fedtar_flare": "Anna Muster"}},
        {"skipped_studies": {"no-image": "Anna"}},
        {"schema": {"shapes": {}}},
        {"privacy": {"unit": "Anna"}},
        {"model": "Anna"},
        {"model": {str(i): "x" * 500 for i in range(1000)}},
    ],
)
def test_every_field_has_its_own_form(payload):
    reply, _ = outcome(message(payload=payload), context("close_round"))
    assert reply.status == ERROR and "Anna" not in reply.reason


def test_what_the_tasks_really_send_passes():
    payload = {
        "scores": {"steps": {"1": {"n": 3, "bleu_4": 0.1, "finding_f1": None}}, "all": {"n": 3}},
        "counts": {"train": [1, 2], "validation": [0, 1], "test": [1, 1]},
        "t_numbers": [0.1, -2.0],
        "skipped_studies": {"no-image": 2},
        "privacy": {"epsilon": 1.5, "delta": 1e-5, "max_epsilon": 10.0, "releases": 3},
        "versions": {"fedtar_flare": "0.1.0"},
        "settings": "0123456789abcdef-0",
        "min_cell": 5,
    }
    assert outcome(message(payload=payload), context("close_round"))[0].status == OK


def test_bad_settings_fail_when_built():
    for bad in ({"allowed_names": []}, {"allowed_names": "lora"}, {"allowed_names": ["("]}, {"max_values": 0}):
        with pytest.raises(ConfigError):
            OutboundGuard(**bad)
