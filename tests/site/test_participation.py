"""A site's veto: read at every task, recorded at the server, and the job goes on without it."""

import pytest
from command import failing, passing
from flare_context import context, read, shareable, task_header
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import ParamsType

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.protocol.messages import ERROR, LEFT
from fedtar_flare.record.events import Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.context import Participation, decide, participation, state_of
from fedtar_flare.testing import FunctionFederation, QuadraticSite
from fedtar_flare.testing import random_pair as pair


class Behind(SiteExecutor):
    """The real executor in front of a plain function."""

    def __init__(self, site, kit):
        super().__init__("fedtar")
        self.site, self.kit, self.done = site, kit, []

    def _in_processes(self, task, header, weights, *site):
        self.done.append((task, header.round, header.step))
        return self.site(task, header, weights)

    def __call__(self, task, header, weights):
        message = shareable(weights, ParamsType.FULL, header.to_meta())
        return read(self.execute(task, message, context(self.kit, task), Signal()))


def site(letter):
    return QuadraticSite(f"site-{letter}", [pair(1), pair(2)], validation=pair(9))


def federation_of(folder, sites, rounds=1):
    named = {f"site-{letter}": one for letter, one in sites.items()}
    federation = FunctionFederation(folder, named, num_rounds=rounds, time_steps=2)
    federation.run()
    return federation, read_events(folder / "fedtar")


@pytest.mark.parametrize(
    ("status", "kind", "word"), [(Participation.PAUSED, "abstained", "paused"), (Participation.LEFT, "absent", "left")]
)
def test_a_veto_counts_from_the_running_task_on_and_the_job_goes_on(tmp_path, status, kind, word):
    def watched(task, header, weights):
        if (task, header.round, header.step) == ("train", 1, 2):
            decide(state_of(tmp_path / "kit"), status)  # while this task runs: what it gives is thrown away
        return plain(task, header, weights)

    plain, vetoing = site("a"), Behind(watched, tmp_path / "kit")
    federation, events = federation_of(tmp_path, {"a": vetoing, "b": site("b"), "c": site("c")}, rounds=3)
    assert not federation.panics and events[-1].status == "completed"
    first, *later = of_kind(events, Step)
    assert sorted(first.sites) == ["site-a", "site-b", "site-c"]
    for step in later:
        assert sorted(step.sites) == ["site-b", "site-c"] and word in getattr(step, kind)["site-a"]
    assert vetoing.done[-1] == ("train", 1, 2)


def test_after_leaving_a_task_is_answered_with_that_and_nothing_else(tmp_path):
    decide(state_of(tmp_path), Participation.LEFT)
    left = Behind(site("a"), tmp_path)
    for task in ("handshake", "train"):
        reply, tensors = left(task, task_header(), {})
        assert (reply.status, reply.reason, set(reply.numbers), reply.payload) == (ERROR, LEFT, {"seconds"}, {})
        assert not tensors and not left.done


def test_a_site_that_joins_again_is_asked_again_in_the_same_run(tmp_path):
    kit, places = tmp_path / "kit", {(1, 1): Participation.PAUSED, (2, 1): Participation.TAKING_PART}

    def deciding(task, header, weights):
        if task == "train" and (place := (header.round, header.step)) in places:
            decide(state_of(kit), places[place])
        return plain(task, header, weights)

    plain = site("a")
    _, events = federation_of(tmp_path, {"a": deciding, "z": Behind(site("z"), kit)}, rounds=2)
    assert ["site-z" in step.sites for step in of_kind(events, Step)] == [False, False, True, True]


def test_sites_that_are_paused_at_the_handshake(tmp_path):
    """One is left out of the run and the start comes from another; all of them end the job with the reason."""
    decide(state_of(tmp_path / "kit"), Participation.PAUSED)
    paused = {"a": Behind(site("a"), tmp_path / "kit")}
    federation, events = federation_of(tmp_path / "one", {**paused, "b": site("b")})
    [start] = of_kind(events, Start)
    assert not federation.panics and start.sites == ["site-b"]
    federation, _ = federation_of(tmp_path / "all", paused)
    assert "site-a: paused by the site" in federation.panics[0]


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
