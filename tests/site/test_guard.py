"""The guard: what the contract declares leaves, all else becomes an error; and what a policy file allows."""

import json
from types import SimpleNamespace

import pytest
import torch
from flare_context import A, B, Recorder, context, read, shareable, task_header
from flare_context import message as plain_message
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.core import plugins
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, HEADER, OK, Reply, TaskHeader, version
from fedtar_flare.provision.kit import site_policy
from fedtar_flare.registry import default_names, own_names
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.context import guard_is_only_filter
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.policy import GUARD, PRIVACY_FILTER, allowed_methods

HELLO = {"settings": "same", "counts": {"train": [1]}}


def good():
    return {A: torch.ones(2, 3), B: torch.ones(3, 2)}


def message(tensors=None, kind=ParamsType.DIFF, numbers=None, **more):
    """A reply to ``train`` unless its fields say otherwise."""
    return plain_message(tensors, kind, numbers={"samples": 3} if numbers is None else numbers, **more)


def hello(tensors=None, schema=None, **payload):
    """A reply to ``handshake`` with initial weights."""
    schema = {"schema": ExchangeSchema.of(schema or tensors).to_dict()} if schema or tensors else {}
    return plain_message(tensors, ParamsType.FULL, payload={**HELLO, **schema, **payload})


def asked(task, sent=None, **more):
    return context("/nowhere", task, sent=sent, **more)


def outcome(shareable, ctx, methods=("fedtar", "madeup"), **guard):
    return read(OutboundGuard(methods, **guard).process(shareable, ctx))


def refused(shareable, ctx, **guard):
    """The reason of the error that goes in the place of what may not leave, and carries nothing else."""
    reply, left = outcome(shareable, ctx, **guard)
    assert reply.status == ERROR and not left and not reply.numbers and not reply.payload
    assert "free text" not in reply.reason and "Anna" not in reply.reason
    return reply.reason


def test_the_agreed_update_passes_unchanged_in_float32_alone_and_another_tensor_is_refused_and_named():
    reply, params = outcome(message(good(), numbers={"samples": 3, "train_loss": 0.5}), asked("train", good()))
    assert reply.status == OK and all(torch.equal(params[name], value) for name, value in good().items())
    refused(message({name: value.bfloat16() for name, value in good().items()}), asked("train", good()))
    assert "12 values" in refused(message(good()), asked("train", good()), max_values=5)
    (unknown := asked("train")).set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)
    for sent in (message(good()), message()):
        assert "what the server sent down is not known" in refused(sent, unknown)
    more = message({**good(), "y.lora_A.weight": torch.ones(1)})  # which are others, ``test_contract`` says
    assert "y.lora_A.weight" in refused(more, asked("train", good()))
    reply, _ = outcome(more, asked("train", good()))
    assert (reply.method, reply.round, reply.step) == ("fedtar", 1, 1)


def answer(numbers=None, **more):
    """A reply to ``close_round``."""
    return plain_message(numbers={"validation_loss": 0.5, "reports": 3} if numbers is None else numbers, **more)


def smuggled(change, sent=None):
    change(sent := sent or answer())
    return sent


@pytest.mark.parametrize(
    "sent",
    [
        answer(payload={"patients": ["x"]}),
        answer(meta={"note": "free text"}),
        answer(meta={"initial_metrics": {"note": "free text"}}),
        answer(method="other"),
        shareable(None, None, {}),
        FLModelUtils.to_shareable(FLModel(metrics={"accuracy": "a name"}, meta=Reply(OK, 1, 1).to_meta())),
        FLModelUtils.to_shareable(FLModel(metrics={"accuracy": 1.0}, meta=answer()["DXO"]["meta"])),
        FLModelUtils.to_shareable(FLModel(metrics={"accuracy": 1.0})),
        *(smuggled(lambda sent, name=name: sent["DXO"].update({name: "free text"})) for name in ("note", "kind")),
        smuggled(lambda sent: sent["DXO"]["meta"][HEADER].update(note="free text")),
        *(smuggled(lambda sent, n=n: sent.set_header(n, "free text")) for n in ("current_round", "note")),
        smuggled(lambda sent: sent.update(note="free text")),
        make_reply(ReturnCode.OK),
    ],
)
def test_headers_hold_declared_fields_only(sent):
    assert outcome(answer(), asked("close_round"))[0].status == OK
    refused(sent, asked("close_round"))


INITIAL = task_header(round=0, step=0, initial_site="site-1")


def test_initial_weights_leave_in_the_handshake_alone_and_from_the_site_that_was_asked():
    assert outcome(hello(good()), asked("handshake", header=INITIAL))[0].status == OK
    for header in (task_header(), task_header(initial_site="site-2")):
        assert "not asked of this site" in refused(hello(good()), asked("handshake", header=header))
    for task in ("train", "close_round"):
        sent = message(good(), ParamsType.FULL, {"samples": 3} if task == "train" else {})
        refused(sent, asked(task, good(), header=INITIAL))
    refused(message(good()), asked("another_task", good()))
    difference = plain_message(good(), payload={**HELLO, "schema": ExchangeSchema.of(good()).to_dict()})
    assert "only full weights" in refused(difference, asked("handshake", header=INITIAL))
    without = plain_message(good(), ParamsType.FULL, payload=HELLO)
    other, fewer = hello(good(), schema={A: good()[A]}), hello({A: good()[A]}, schema=good())
    for sent in (other, fewer, hello(good(), dtype=1), without):  # not those of the schema
        refused(sent, asked("handshake", header=INITIAL))


@pytest.mark.parametrize(
    "private",
    ["patient/projection.weight", "patient.projection.weight", "projection.weight.x", "projectionXweight"],
)
def test_a_parameter_that_may_travel_takes_no_private_one_with_it(private):
    """The exchange matches whole names, and so does the guard: ``search`` let the private projection out."""
    ctx, extra = asked("handshake", header=INITIAL), {"extra_names": [r"projection.weight"]}
    open_ = {**good(), "projection.weight": torch.ones(2)}
    assert outcome(hello(open_), ctx, **extra)[0].status == OK
    refused(hello(open_), ctx)
    sent = {**open_, private: torch.ones(2)}
    for leaving in (hello(sent), hello(sent, open_), hello(None, sent)):  # not even its name, in a schema
        refused(leaving, ctx, **extra)


def rows(count=2):
    return {**good(), "bank.features": torch.ones(count, 3)}


def test_the_reply_is_of_the_method_that_was_asked(madeup):
    sent = plain_message(rows(), numbers={"n": 2}, method="madeup")
    own, other = (asked("learn", good(), header=task_header(method=name)) for name in ("madeup", "fedtar"))
    reply, left = outcome(sent, own)
    assert reply.status == OK and left["bank.features"].shape == (2, 3)
    assert "the task of 'fedtar'" in refused(sent, other)
    assert "method 'madeup' is not among" in refused(sent, own, methods=["fedtar"])
    assert "at most 4 rows of 3" in refused(plain_message(rows(5), numbers={"n": 2}, method="madeup"), own)


def through_a_site(tmp_path, method, task, *policies):
    """A task as FLARE runs it: guards on what comes, the executor, FLARE forgets the task, guards on what leaves.

    ``policies`` are the lists of methods of the site's guard and of the job's, in FLARE's order; None: no list at all.
    """
    executor, header = Recorder(), task_header(method=method)
    ctx = context(tmp_path, task, header=header)
    message = shareable(good(), ParamsType.FULL, header.to_meta())
    guards = [OutboundGuard() if methods is None else OutboundGuard(methods) for methods in policies]
    for guard in guards:
        guard.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_DATA_CHAIN)
        message = guard.process(message, ctx)
    message = executor.execute(task, message, ctx, Signal())
    ctx.set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)
    for guard in guards:
        guard.set_prop(FilterContextKey.CHAIN_TYPE, None)
        message = guard.process(message, ctx)
    return *read(message), executor.headers


def test_a_method_that_the_site_lists_is_done(tmp_path, madeup):
    for policies in ([["fedtar"]], [["madeup", "fedtar"], ["fedtar"]], [["not-installed", "fedtar"]]):
        reply, left, done = through_a_site(tmp_path, "fedtar", "train", *policies)
        assert reply.status == OK and sorted(left) == sorted(good()) and len(done) == 1


UNLISTED = {  # (method, task, its word) of which the guards of the site and of the job list other methods
    ("fedtar", "train", "(none)"): [[None], [[]], [[], ["fedtar"]], [["fedtar"], []]],
    ("madeup", "learn", "(none)"): [[None, ["madeup"]]],
    ("madeup", "learn", "(fedtar"): [[["fedtar", "fedavg"], ["madeup"]], [["fedtar"], ["fedtar", "madeup"]]],
    ("scaffold", "train", "means of gradients"): [[[*default_names()]]],
    ("not-installed", "train", "not installed here"): [[["not-installed"], ["not-installed"]]],
    ("madeup", "train", "task 'train'"): [[["madeup"]]],
}


@pytest.mark.parametrize(("method", "task", "words"), UNLISTED)
def test_a_method_that_the_site_does_not_list_is_refused_before_anything_is_done(tmp_path, madeup, method, task, words):
    """Though it is installed, and though the guard of the job names it."""
    for policies in UNLISTED[method, task, words]:
        reply, left, done = through_a_site(tmp_path, method, task, *policies)
        assert reply.status == ERROR and method in reply.reason and words in reply.reason and not left and not done
        assert "guard" in reply.reason and reply.method == method
        assert "not among" not in reply.reason or "local/privacy.json" in reply.reason


def test_reasons_of_errors_and_abstentions_pass():
    for status, method in ((ERROR, "fedtar"), (ERROR, ""), (ERROR, "other"), (ABSTAIN, "fedtar")):
        sent = plain_message(status=status, reason="no disk", numbers={"seconds": 0.1}, method=method)
        reply, _ = outcome(sent, asked("train"))
        assert (reply.status, reply.reason) == (status, "no disk")
    for more in ({"numbers": {"samples": 1}}, {"payload": {"note": "x"}}, {"tensors": good()}):
        sent = plain_message(status=ERROR, reason="no disk", **more)
        assert "more than its reason" in refused(sent, asked("train"))


def test_an_error_reply_of_flare_passes_with_nothing_but_its_code():
    carrying = message(good())
    carrying.set_return_code("patient 17")
    carrying.set_header("note", "patient 17")
    for reply in (make_reply(ReturnCode.EXECUTION_EXCEPTION), carrying):
        left = OutboundGuard(["fedtar"]).process(reply, asked("train", good()))
        assert left.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
        assert "patient" not in str(left) and "DXO" not in left


def write(tmp_path, content):
    (tmp_path / "local").mkdir(exist_ok=True)
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "local" / "privacy.json").write_bytes(raw)


def policy(*filters):
    return site_policy(["fedtar"], filters=[{"path": path, "args": {}} for path in filters])


NOISE = "hospital.filters.Noise"  # has not "Privacy" in its name
UNCLEAR = [{"scopes": [{"task_result_filters": filters}]} for filters in ([{"name": "OutboundGuard"}], [GUARD])]
UNCLEAR += [{"scopes": [{"task_result_filters": {"path": GUARD}}]}, {"scopes": [GUARD]}, {"scopes": ""}]
UNCLEAR += [{"task_result_filters": []}, [], b"{", b"", b"\xff"]
FILTERED = [policy(path) for path in (PRIVACY_FILTER, "nvflare.app_common.filters.SVTPrivacy", NOISE)]
FILTERED += [{"scopes": [policy()["scopes"][0], policy(NOISE)["scopes"][0]]}]


@pytest.mark.parametrize("content", [*FILTERED, *UNCLEAR])
def test_a_filter_that_may_be_for_privacy_is_seen_beside_the_guard(tmp_path, content):
    assert guard_is_only_filter(tmp_path)  # no policy of its own, as in the simulator
    write(tmp_path, policy())
    assert guard_is_only_filter(tmp_path)  # the guard stands alone
    write(tmp_path, content)
    assert not guard_is_only_filter(tmp_path)


def _scope(results, tasks):
    """A scope whose guards list these methods, of a letter each; None: no list at all."""
    kinds = {"task_result_filters": results, "task_data_filters": tasks}
    lists = {kind: [{} if one is None else {"methods": [*one]} for one in guards] for kind, guards in kinds.items()}
    return {kind: [{"path": GUARD, "args": methods} for methods in guards] for kind, guards in lists.items()}


SCOPES = [
    ([_scope(["ab"], ["bc"])], ["b"]),  # both ways must let it pass
    ([_scope(["a"], ["a"]), _scope(["b"], ["b"])], ["a", "b"]),  # a job names its scope
    *(([_scope(*both)], []) for both in ((["a", "b"], ["a"]), (["a"], []), ([None], ["a"]), ([""], [""]))),
    ([], []), (["no scope"], []),
]  # fmt: skip


@pytest.mark.parametrize(("scopes", "allowed"), SCOPES)
def test_the_allowed_methods_are_those_that_both_guards_list(scopes, allowed):
    assert allowed_methods({"scopes": scopes}) == allowed


def test_a_method_that_the_site_does_not_allow_is_not_even_imported(tmp_path, monkeypatch, madeup):
    """FLARE builds a job's executor before any filter of the site runs."""
    assert "fedtar" in own_names() and madeup.method not in own_names()
    assert allowed_methods(site_policy(own_names())) == list(own_names())
    assert set(own_names()) - set(default_names()) == {"scaffold"}, "what has a caution is allowed where it is named"
    loaded = []
    point = SimpleNamespace(name="unlisted", value="evil:METHOD", dist=None, load=lambda: loaded.append(1))
    monkeypatch.setitem(plugins.announced("method"), "unlisted", point)
    executor, header = SiteExecutor("unlisted"), TaskHeader("unlisted", "run", 0, 0, 1, 1, version(0, 0))
    ctx = context(tmp_path, "handshake", header=header)
    task = ctx.get_prop(FLContextKey.TASK_DATA)
    guard = OutboundGuard(["fedtar"])
    guard.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_DATA_CHAIN)
    guard.process(task, ctx)
    reply, _ = read(executor.execute("handshake", task, ctx, Signal()))
    assert reply.status == "error" and "unlisted" in reply.reason and not loaded
    with pytest.raises(ConfigError, match="unlisted"):
        _ = executor.strategy
    assert loaded
