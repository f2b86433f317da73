"""A server that sends weights and settings by which an update says more than that of many patients together."""

import pytest
import torch
from flare_context import write_workflow
from hospital_site import write_manifest_site

from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import TaskHeader, version
from fedtar_flare.site.state import MOST_REPEATS
from fedtar_flare.testing import Hospital

ROUNDS = 20


@pytest.fixture
def hospital(tmp_path, home, monkeypatch):
    """A real hospital with a report of each of so many patients; its policy is the default one."""

    def build(reports, policy="{}", method="fedtar", **settings):
        write_manifest_site(tmp_path, home, monkeypatch, reports, policy)
        write_workflow(tmp_path / "app", num_rounds=ROUNDS, time_steps=1)
        settings = {"preset": "tiny", "model": {"slices": 1}, "data": {}, "training": {"local_steps": 4}} | settings
        return Hospital(tmp_path, fresh=False, simulated=False, method=method, app=tmp_path / "app", **settings)

    return build


def ask(site, task, r, weights=None, **more):
    """A task of round r of a run of one time step."""
    first = {"initial_site": site.name, "after": version(0, 0)} if task == HANDSHAKE else {}
    first = first or {"after": version(r, int(task == CLOSE_ROUND))}
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


def test_tiny_factors_leave_no_gradient_of_the_sizes_that_it_had(hospital):
    """A = 0 and a tiny B in one layer: AdamW's epsilon passed the gradient on as it was."""
    site = hospital(["Clear lungs.", "Nodule left.", "Large heart."] * 14)
    _, w = ask(site, HANDSHAKE, 0)
    a, b = (next(n for n in w if n.endswith(f"h.0.attn.c_attn.lora_{side}.weight")) for side in "AB")
    reply, update = ask(site, TRAIN, 1, w | {a: torch.zeros_like(w[a]), b: torch.full_like(w[b], 1e-12)})
    rate = site.executor.strategy.settings.training.lr
    assert reply.status == "ok" and update[a].abs().median() > rate, "of the optimiser's steps, not of the gradient"


@pytest.mark.parametrize("task", [HANDSHAKE, TRAIN, CLOSE_ROUND])
def test_an_adapter_that_outweighs_the_model_is_refused_before_anything_is_done_with_it(hospital, task):
    site = hospital(["Clear lungs."] * 42)
    _, w = ask(site, HANDSHAKE, 0)
    loud = {name: value + 100 for name, value in w.items()}
    more = {"initial_site": ""} if task == HANDSHAKE else {}
    if task == CLOSE_ROUND:
        ask(site, TRAIN, 1, w)
    reply, update = ask(site, task, int(task != HANDSHAKE), loud, **more)
    assert (reply.status, update) == ("error", None) and "max_adapter_norm" in reply.reason
    assert ask(site, task, int(task != HANDSHAKE), w, **more)[0].status != "error"


def test_the_same_question_is_answered_a_few_times_and_never_from_an_earlier_state(hospital):
    site = hospital(["Clear lungs."] * 42, policy="{max_answers: 10}")
    _, w = ask(site, HANDSHAKE, 0)
    for after in (version(0, 0), version(1, 0), version(2, 1)):
        assert "state version" in ask(site, TRAIN, 2, w, after=after)[0].reason
    answers = [ask(site, TRAIN, 1, w)[0] for _ in range(MOST_REPEATS + 1)]
    assert [reply.status for reply in answers] == ["ok"] * MOST_REPEATS + ["error"]
    further = [ask(site, TRAIN, r, w)[0] for r in (2, 3, 4)]
    assert [reply.status for reply in further] == ["ok", "ok", "error"], "ten of all rounds and jobs, refused ones too"
    assert "max_answers" in further[-1].reason


def test_no_update_is_of_fewer_visits_than_the_minimum_cell(hospital, monkeypatch):
    batches = []
    monkeypatch.setattr(ReportLearner, "local_update", lambda self, batch, *_: batches.append(len(batch)) or 1.0)
    site = hospital(["Clear lungs."] * 40, training={"local_steps": 40, "batch_size": 4})
    ask(site, TRAIN, 1, ask(site, HANDSHAKE, 0)[1])
    visits = len(site.executor.strategy.learner.cohort.samples("train"))
    assert visits % 4 and min(batches[1:]) >= 4 and max(batches) <= 8, "a last batch of 1 to 4 joins the one before"
    assert sum(batches[: visits // 4]) >= visits
