"""A site's veto: read at every task, recorded at the server, and the job goes on without it."""

import pytest
from command import fedtar_here
from federation import LocalFederation, QuadraticSite, pair
from flare_context import context
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.errors import FedTARError
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.record.events import Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.participation import FILE, Participation, decide, participation
from fedtar_flare.site.place import state_of


class Behind(SiteExecutor):
    """The real executor in front of a plain function."""

    def __init__(self, site, kit):
        super().__init__("fedtar")
        self.site, self.kit, self.done = site, kit, []

    def carry_out(self, task, header, weights, *place):
        self.done.append((task, header.round, header.step))
        return self.site(task, header, weights)

    def __call__(self, task, header, weights):
        meta = header.to_meta()
        model = FLModel(params=weights, params_type=ParamsType.FULL, meta=meta) if weights else None
        shareable = FLModelUtils.to_shareable(model or FLModel(metrics={}, meta=meta))
        answer = self.execute(task, shareable, context(self.kit, task), Signal())
        result = FLModelUtils.from_shareable(answer)
        return Reply.from_meta(result.meta), result.params


def run(tmp_path, during, rounds=3):
    """Three sites; ``during(header, folder)`` is called at each of site-a's tasks, before it is done."""
    kit = tmp_path / "kit"
    plain = QuadraticSite("site-a", [pair(1), pair(2)], validation=pair(9))

    def watched(task, header, weights):
        during(task, header, kit / "fedtar_state")
        return plain(task, header, weights)

    site = Behind(watched, kit)
    others = {f"site-{x}": QuadraticSite(f"site-{x}", [pair(3), pair(4)], validation=pair(9)) for x in "bc"}
    federation = LocalFederation(tmp_path / "server", {"site-a": site, **others}, num_rounds=rounds, time_steps=2)
    federation.run()
    assert not federation.panics
    events = read_events(tmp_path / "server" / "fedtar")
    assert events[-1].status == "completed"
    return site, of_kind(events, Step)


@pytest.mark.parametrize(
    ("status", "kind", "word"), [(Participation.PAUSED, "abstained", "paused"), (Participation.LEFT, "absent", "left")]
)
def test_a_veto_counts_from_the_running_task_on_and_the_job_goes_on(tmp_path, status, kind, word):
    def during(task, header, folder):
        if (task, header.round, header.step) == ("train", 1, 2):
            decide(folder, status)  # while this task runs: what it gives is thrown away

    site, steps = run(tmp_path, during)
    assert sorted(steps[0].sites) == ["site-a", "site-b", "site-c"]
    for step in steps[1:]:
        assert sorted(step.sites) == ["site-b", "site-c"] and word in getattr(step, kind)["site-a"]
    assert site.done[-1] == ("train", 1, 2)


def test_a_site_that_joins_again_is_asked_again_in_the_same_run(tmp_path):
    kit = tmp_path / "kit"

    class Joining(QuadraticSite):
        def __call__(self, task, header, weights):
            if (task, header.round, header.step) == ("train", 2, 1):
                decide(kit / "fedtar_state", Participation.TAKING_PART)
            return super().__call__(task, header, weights)

    def pause(task, header, weights):
        if task == "train" and header.round == 1:
            decide(kit / "fedtar_state", Participation.PAUSED)
        return plain(task, header, weights)

    plain = QuadraticSite("site-z", [pair(1), pair(2)], validation=pair(9))
    sites = {"site-a": Joining("site-a", [pair(3), pair(4)], validation=pair(9)), "site-z": Behind(pause, kit)}
    federation = LocalFederation(tmp_path / "server", sites, num_rounds=2, time_steps=2)
    federation.run()
    steps = of_kind(read_events(tmp_path / "server" / "fedtar"), Step)
    assert ["site-z" in step.sites for step in steps] == [False, False, True, True]


def test_sites_that_are_paused_at_the_handshake(tmp_path):
    """One is left out of the run and the start comes from another; all of them end the job with the reason."""
    kit = tmp_path / "kit"
    decide(kit / "fedtar_state", Participation.PAUSED)
    paused = {"site-a": Behind(QuadraticSite("site-a", [pair(1)] * 2), kit)}
    plain = {"site-b": QuadraticSite("site-b", [pair(3), pair(4)], validation=pair(9))}
    federation = LocalFederation(tmp_path / "one", {**paused, **plain}, num_rounds=1, time_steps=2)
    federation.run()
    assert not federation.panics
    (start,) = of_kind(read_events(tmp_path / "one" / "fedtar"), Start)
    assert start.sites == ["site-b"]
    federation = LocalFederation(tmp_path / "all", paused, num_rounds=1, time_steps=2)
    federation.run()
    assert "site-a: paused by the site" in federation.panics[0]


def test_an_unreadable_decision_is_no_consent(tmp_path):
    assert participation(tmp_path) is Participation.TAKING_PART
    for text in ("", "[]", '{"status": "maybe"}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(FedTARError, match="cannot be read"):
            participation(tmp_path)


def test_the_commands_write_the_decision(tmp_path):
    (tmp_path / "startup").mkdir()
    code, _, err = fedtar_here("site", "pause", "--kit", tmp_path)
    assert code == 1 and "startup kit" in err
    (tmp_path / "startup" / "fed_client.json").write_text("{}")
    for command, state in (
        ("pause", Participation.PAUSED),
        ("leave", Participation.LEFT),
        ("join", Participation.TAKING_PART),
    ):
        code, _, err = fedtar_here("site", command, cwd=tmp_path)
        assert code == 0, err
        assert participation(state_of(tmp_path)) is state
    fedtar_here("site", "pause", "--simulated", "site-1", FEDTAR_HOME=str(tmp_path / "home"))
    assert participation(tmp_path / "home" / "state" / "sites" / "site-1") is Participation.PAUSED
    assert fedtar_here("site", "pause", "--simulated", "../x", FEDTAR_HOME=str(tmp_path / "home"))[0] == 1
