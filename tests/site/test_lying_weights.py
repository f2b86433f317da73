"""A server that sends weights and settings by which an update says more than that of many patients together."""

import pytest
from flare_context import write_workflow
from hospital_site import write_manifest_site

from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.protocol.contract import HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import TaskHeader, version
from fedtar_flare.testing import Hospital

ROUNDS = 20


@pytest.fixture
def hospital(tmp_path, home, monkeypatch):
    """A real hospital with a report of each of so many patients; its policy is the default one."""

    def build(reports, policy="{}", method="fedtar", **settings):
        write_manifest_site(tmp_path, home, monkeypatch, reports, policy)
        write_workflow(tmp_path / "app", num_rounds=ROUNDS, time_steps=1)
        settings = {"preset": "tiny", "model": {"slices": 1}, "data": {}} | settings
        return Hospital(tmp_path, fresh=False, simulated=False, method=method, app=tmp_path / "app", **settings)

    return build


def ask(site, task, r, weights=None, **more):
    """A task of round r of a run of one time step."""
    first = {"initial_site": site.name, "after": version(0, 0)} if task == HANDSHAKE else {"after": version(r, 0)}
    header = TaskHeader(site.method, "run", r, min(r, 1), ROUNDS, 1, **(first | more))
    return site.run(task, header, weights)


@pytest.mark.parametrize("method", ["fedtar", "fedavg"])
def test_the_number_of_updates_follows_from_the_count_that_is_told(hospital, monkeypatch, method):
    """Weight decay of a factor without a gradient tells the number of updates to the last one."""
    batches = []
    monkeypatch.setattr(ReportLearner, "local_update", lambda self, batch, *_: batches.append(len(batch)) or 1.0)
    site = hospital(["Clear lungs."] * 40, method=method, training={"local_epochs": 8, "batch_size": 8})
    _, w = ask(site, HANDSHAKE, 0)
    reply, _ = ask(site, TRAIN, 1, w)
    learner, told = site.executor.strategy.learner, int(reply.numbers["samples"])
    exact = len(learner.cohort.samples("train"))
    assert exact % 5, "a count that is a multiple of the minimum cell would show nothing"
    assert told == exact - exact % 5 and len(batches) == told


def test_no_update_is_of_fewer_visits_than_the_minimum_cell(hospital, monkeypatch):
    batches = []
    monkeypatch.setattr(ReportLearner, "local_update", lambda self, batch, *_: batches.append(len(batch)) or 1.0)
    site = hospital(["Clear lungs."] * 40, training={"local_steps": 40, "batch_size": 4})
    ask(site, TRAIN, 1, ask(site, HANDSHAKE, 0)[1])
    visits = len(site.executor.strategy.learner.cohort.samples("train"))
    assert visits % 4 and min(batches[1:]) >= 4 and max(batches) <= 8, "a last batch of 1 to 4 joins the one before"
    assert sum(batches[: visits // 4]) >= visits
