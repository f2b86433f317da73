"""What a site does with hostile tasks, and its veto, which is read at every task and recorded at the server."""

import pytest
import torch
from command import failing, passing
from flare_context import Recorder, context, read, shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import ParamsType
from tables import cases

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.protocol.messages import HEADER, Reply
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.site.context import Participation, decide, participation, state_of
from fedtar_flare.testing import FunctionFederation, QuadraticSite
from fedtar_flare.testing import random_pair as pair
from fedtar_flare.version import __version__

TASK = {"method": "fedtar", "run_id": "run", "round": 1, "step": 1, "rounds": 2, "time_steps": 2, "after": "0001-00"}


def answer(workspace, header, tensors=None):
    executor = Recorder()
    task = shareable(tensors, ParamsType.FULL, {HEADER: header})
    reply, _ = read(executor.execute("train", task, context(workspace), Signal()))
    return reply, executor.headers


def current(**changes):
    return {**TASK, "plugin": __version__, **changes}


HOSTILE = [("run_id", "x" * 129), ("initial_site", "x" * 1000)]
HOSTILE += [(field, value) for field, values in cases(__file__, "hostile_headers.yaml").items() for value in values]


@pytest.mark.parametrize(("field", "value"), HOSTILE)
def test_a_hostile_header_is_refused_before_anything_is_done(tmp_path, field, value):
    reply, headers = answer(tmp_path, current(**{field: value}))
    assert reply.status == "error" and not headers
    assert not [p for p in tmp_path.rglob("*") if p.name not in ("fedtar_state", "audit", "job-1.jsonl")]


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        *(({"a": torch.full((2,), value)}, "finite") for value in (float("nan"), float("inf"))),
        *(({name: torch.ones(2)}, "name") for name in ("../a", "a/b", "a" * 400, "")),
        *(({"a": torch.ones(2, dtype=dtype)}, "dtype") for dtype in (torch.float64, torch.int64)),
        ({"a": [1.0, 2.0]}, "not a torch tensor"),
        ({"a": torch.zeros(1).expand(300_000_000)}, "limit"),  # no memory is taken before it is refused
    ],
)
def test_hostile_tensors_are_refused_before_they_are_used(tmp_path, tensors, word):
    reply, headers = answer(tmp_path, current(), tensors)
    assert reply.status == "error" and word in reply.reason and not headers
    reply, headers = answer(tmp_path, current(), {"a.lora_A.weight": torch.ones(2)})
    assert reply.status == "ok" and len(headers) == 1


@pytest.mark.parametrize("plugin", ["0.0.9", "1.0.0", "9.9.9", "", None, 5, "x" * 500])
def test_another_minor_version_is_refused_with_both_named(tmp_path, plugin):
    reply, headers = answer(tmp_path, current(plugin=plugin))
    assert reply.status == "error" and not headers
    assert __version__ in reply.reason and len(reply.reason) < 512
    assert plugin not in ("0.0.9", "1.0.0", "9.9.9") or plugin in reply.reason
    reply, headers = answer(tmp_path, TASK)  # which has none
    assert reply.status == "error" and "earlier release" in reply.reason and not headers


def test_a_newer_patch_release_may_add_fields_and_an_error_of_another_version_is_readable(tmp_path):
    newer = ".".join(__version__.split(".")[:2]) + ".99"
    reply, headers = answer(tmp_path, current(plugin=newer, added="later"))
    assert reply.status == "ok" and headers[0].plugin == newer
    meta = Reply("ok", 1, 1, method="fedtar").to_meta()
    meta[HEADER] |= {"plugin": newer, "added": 1}
    assert Reply.from_meta(meta).status == "ok"
    meta = {HEADER: {"status": "error", "round": 0, "step": 0, "reason": "needs 0.0.9", "numbers": {}, "payload": {}}}
    assert Reply.from_meta(meta).reason == "needs 0.0.9"


@pytest.mark.parametrize(
    ("status", "kind", "word"), [(Participation.PAUSED, "abstained", "paused"), (Participation.LEFT, "absent", "left")]
)
def test_a_veto_counts_from_the_running_task_on_and_the_job_goes_on(tmp_path, status, kind, word):
    def watched(task, header, weights):
        if (task, header.round, header.step) == ("train", 1, 2):
            decide(state_of(tmp_path / "kit"), status)  # while this task runs: what it gives is thrown away
        return plain(task, header, weights)

    def vetoing(task, header, weights):
        message = shareable(weights, ParamsType.FULL, header.to_meta())
        return read(executor.execute(task, message, context(tmp_path / "kit", task), Signal()))

    executor = Recorder(watched)
    names = ("site-a", "site-b", "site-c")
    plain, *others = (QuadraticSite(name, [pair(1), pair(2)], validation=pair(9)) for name in names)
    sites = dict(zip(names, (vetoing, *others), strict=True))
    federation = FunctionFederation(tmp_path, sites, num_rounds=3, time_steps=2)
    federation.run()
    events = read_events(federation.results_folder)
    assert not federation.panics and events[-1].status == "completed"
    first, *later = of_kind(events, Step)
    assert sorted(first.sites) == [*names]
    for step in later:
        assert sorted(step.sites) == ["site-b", "site-c"] and word in getattr(step, kind)["site-a"]
    assert [(one.round, one.step) for one in executor.headers] == [(0, 0), (1, 1), (1, 2)], "and nothing after that"


def test_the_commands_write_the_decision(tmp_path):
    (tmp_path / "startup").mkdir()
    assert "startup kit" in failing("site", "pause", "--kit", tmp_path)
    assert participation(tmp_path) is Participation.TAKING_PART
    (tmp_path / "startup" / "fed_client.json").write_text("{}")
    for command, state in zip(("join", "pause", "leave"), Participation, strict=True):
        passing("site", command, cwd=tmp_path)
        assert participation(state_of(tmp_path)) is state
    for text in ("", "[]", '{"status": "maybe"}'):  # no consent
        (state_of(tmp_path) / "participation.json").write_text(text)
        with pytest.raises(FedTARError, match="cannot be read"):
            participation(state_of(tmp_path))
    (known := tmp_path / "home" / "state" / "sites" / "site-1").mkdir(parents=True)
    home = {"FEDTAR_HOME": str(tmp_path / "home")}
    passing("site", "pause", "--simulated", "site-1", **home)
    assert participation(known) is Participation.PAUSED
    for nobody in ("site-l", "../x"):
        assert "(known: site-1)" in failing("site", "pause", "--simulated", nobody, **home)
        assert not (known.parent / nobody).exists()
