"""FedTAR's run against an independent reference, and from a death at any moment on; the checkpoints."""

import errno
import os
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from federation import Spoilt, T, federation, pair, run, sites

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import StateError
from fedtar_flare.methods.fedtar.config import AlphaConfig
from fedtar_flare.methods.fedtar.controller import TemporalResidualServer
from fedtar_flare.methods.fedtar.policy import ALPHA_FLOOR, AlphaPolicy, OuterOptimizer
from fedtar_flare.protocol.contract import CLOSE_ROUND
from fedtar_flare.record.log import read_events
from fedtar_flare.runtime.aggregation import SpilledUpdates
from fedtar_flare.runtime.checkpoint import Checkpoint, CheckpointFolder, load
from fedtar_flare.runtime.results import Results
from fedtar_flare.testing import QuadraticSite, same_bits
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing.federation import NAMES

GIVEN = [0.2, 0.9, 0.5]


def reference(local, num_rounds, weighting, alpha_form, eta, retained=None):
    """FedTAR written down once more, by autograd through Eq. 7 with the step means held fixed.

    ``retained``: through the sites' training, too, which keeps this share of its start.
    """
    learnt = "softmax" if alpha_form == "given" else alpha_form
    policy = AlphaPolicy(T, AlphaConfig(alpha_form=learnt, initial_alpha=0.7), seed=0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=eta)
    w = [v.double() for v in next(iter(local.values())).start().values()]
    for _ in range(num_rounds):
        fixed = {"uniform": [1 / T] * T, "given": GIVEN}
        alphas = torch.tensor(fixed[alpha_form], dtype=torch.float64) if alpha_form in fixed else policy.alphas()
        start, means = w, []
        current = [v.clone() for v in w]
        for t in range(T):
            have = [s for s in local.values() if s.targets[t] is not None]
            if not have or alphas[t] < ALPHA_FLOOR:
                means.append(None)
                continue
            sizes = [s.samples ** {"samples": 1, "uniform": 0, "inverse": -1}[weighting] for s in have]
            mean = []
            for i, v in enumerate(current):
                learnt = [v - s.lr * (v - s.targets[t][i].double()) for s in have]
                mean.append(sum(size / sum(sizes) * one for size, one in zip(sizes, learnt, strict=True)))
            means.append(mean)
            current = [v + float(alphas[t]) * (m - v) for v, m in zip(current, mean, strict=True)]
        through = [v.clone() for v in start]
        for t in range(T):
            if means[t] is not None:
                if retained:
                    means[t] = [m + retained * (v - v.detach()) for v, m in zip(through, means[t], strict=True)]
                through = [v + alphas[t] * (m - v) for v, m in zip(through, means[t], strict=True)]
        judges = [s for s in local.values() if s.validation is not None]
        reports = sum(s.samples for s in judges)
        loss = sum(
            s.samples / reports * 0.5 * (v - s.validation[i].double()).square().sum()
            for s in judges
            for i, v in enumerate(through)
        )
        if alphas.requires_grad:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        w = current
    return w, (policy.alphas() if alphas.requires_grad else alphas).detach()


FORMS = ("softmax", "sigmoid", "uniform", "given")
WEIGHTINGS = ("samples", "uniform", "inverse")
CASES = [(form, by, (i + k) % 2 == 0) for i, form in enumerate(FORMS) for k, by in enumerate(WEIGHTINGS)]


@pytest.mark.parametrize(("alpha_form", "weighting", "skip"), CASES)
def test_a_run_equals_an_independent_reference(tmp_path, alpha_form, weighting, skip):
    local = sites()
    if skip:
        local["site-a"].targets[1] = None  # nobody has a visit at step 2
    given = {"alphas": GIVEN} if alpha_form == "given" else {}
    controller = federation(tmp_path, local, alpha_form=alpha_form, weighting=weighting, **given)
    events = run(controller)
    w, alphas = reference(local, 3, weighting, alpha_form, 0.1)
    for name, expected in zip(NAMES, w, strict=True):
        torch.testing.assert_close(last(controller).weights[name].double(), expected, rtol=1e-5, atol=1e-6)
    learnt = controller.strategy.policy.alphas().detach().double()
    torch.testing.assert_close(learnt, alphas.double(), rtol=1e-5, atol=1e-6)
    assert [e.skipped for e in events["step"]] == ([False, True, False] if skip else [False] * 3) * 3
    assert events["end"][0].status == "completed" and not controller.panics
    for step, residual in zip(events["step"], events["residual"], strict=True):  # Theorem 2
        expected = residual.alpha * (step.update_norm or 0) if residual.alpha >= ALPHA_FLOOR else 0
        assert residual.residual_norm == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert {*step.sites, *step.abstained, *step.absent, *step.refused} == {*local}, "each is accounted for"


CORRECTED = {"eta": 0.01, "hypergradient": "corrected"}


@pytest.mark.parametrize("alpha_form", ["softmax", "sigmoid"])
def test_a_corrected_run_follows_the_whole_gradient_once_the_starts_have_moved(tmp_path, alpha_form):
    controller = federation(tmp_path, alpha_form=alpha_form, **CORRECTED)
    events = run(controller)
    learnt = controller.strategy.policy.alphas().detach()
    torch.testing.assert_close(learnt, reference(sites(), 3, "samples", alpha_form, 0.01, 0.5)[1], rtol=1e-5, atol=1e-6)
    assert (learnt - reference(sites(), 3, "samples", alpha_form, 0.01, 0.0)[1]).abs().max() > 1e-4
    assert [e.retained for e in events["outer"]] == [[pytest.approx(0.5, abs=1e-5)] * T] * 3
    resumed = federation(tmp_path / "again", alpha_form=alpha_form, num_rounds=1, **CORRECTED)
    run(resumed)
    kept = str(resumed.results_folder / "checkpoint")
    run(resumed := federation(tmp_path / "on", alpha_form=alpha_form, resume_from=kept, **CORRECTED))
    assert same_bits(last(resumed), last(controller))


def noting(local, told):
    """The sites, each of which notes its tasks and their headers."""

    def noted(site):
        return lambda task, header, weights: told.append((task, header)) or site(task, header, weights)

    return {name: noted(site) for name, site in local.items()}


def test_every_site_is_told_with_which_weight_its_step_enters(tmp_path):
    given = {"num_rounds": 1, "alpha_form": "given", "alphas": [0.25, 1.0, ALPHA_FLOOR / 2]}
    events = run(federation(tmp_path, noting(sites(), told := []), **given))
    assert [e.residual_norm > 0 for e in events["residual"]] == [True, True, False], "hardly any leaves the weights"
    assert {(h.step, h.alpha) for task, h in told if task == "train"} == {(1, 0.25), (2, 1.0), (3, 0.0)}
    assert {h.alpha for task, h in told if task != "train"} == {1.0}


def three(bad):
    """Three hospitals whose visits teach what their validation asks for; ``bad``: those at step 2 do not."""
    goals, far = {n: pair(20 + n) for n in (1, 2, 3)}, tuple(8 * v for v in pair(30))
    taught = {n: [goals[n], far if bad else goals[n], goals[n]] for n in goals}
    names = {n: f"site-{n}" for n in goals}
    return {name: QuadraticSite(name, taught[n], 3, validation=goals[n]) for n, name in names.items()}


TESTED = {"alpha_form": "sigmoid", "temporal": {"replay": "tested"}}


@pytest.mark.parametrize("bad", [True, False])
def test_a_step_that_makes_every_hospital_worse_is_dropped_and_else_all_visits_join(tmp_path, bad):
    controller = federation(tmp_path, noting(three(bad), told := []), **TESTED)
    events = run(controller)
    trained = {(h.round, h.step, h.replay, h.alpha > 0) for task, h in told if task == "train"}
    assert trained == {(r, t, r > 1 and not bad, r == 1 or t != 2 or not bad) for r in (1, 2, 3) for t in (1, 2, 3)}
    assert [alarm.text.partition(" and ")[0] for alarm in events["alarm"]] == [
        "time step 2 made drafts worse at the hospitals"
    ] * bad
    assert all((outer.alpha_after[1] == 0) is bad for outer in events["outer"])
    run(first := federation(tmp_path / "first", three(bad), **TESTED | {"num_rounds": 1}))
    on = federation(tmp_path / "on", three(bad), resume_from=str(first.results_folder / "checkpoint"), **TESTED)
    run(on)
    assert same_bits(last(on), last(controller))


@pytest.mark.parametrize("unseen", [[], ["site-3"]])
def test_two_hospitals_are_too_few_to_test_steps(tmp_path, unseen):
    two = dict(list(three(True).items())[: 2 + len(unseen)])
    end = run(federation(tmp_path, two, unseen=unseen, **TESTED))["end"][0]
    assert end.status == "failed" and "it takes 3 of them" in end.reason


def test_steps_that_too_few_hospitals_could_test_are_not_mixed_and_an_alarm_says_so(tmp_path):
    local = three(True)
    local["site-1"].validation = None
    controller = federation(tmp_path, local, **TESTED)
    alarms = [alarm.text for alarm in run(controller)["alarm"]]
    assert alarms == ["fewer than 3 hospitals sent T numbers: time steps are not tested yet"]
    assert not controller.strategy.replays


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The last checkpoint of a run without interruption."""
    controller = federation(tmp_path_factory.mktemp("whole"))
    run(controller)
    return last(controller)


class Killed(BaseException):
    """The server's process dies here."""


def dying(monkeypatch, where, name, at, after=False):
    """Make the ``at``-th call of ``where.name`` end the process, before or after its work."""
    original, calls = getattr(where, name), []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) != at:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(where, name, call)


DEATHS = {
    "before an aggregation": (SpilledUpdates, "mean", 5, False),
    "after an aggregation": (SpilledUpdates, "mean", 5, True),
    "between steps": (Results, "step", 4, True),
    "before the outer step": (TemporalResidualServer, "_outer_step", 2, False),
    "during the outer step": (OuterOptimizer, "step", 2, True),
    "before a checkpoint": (CheckpointFolder, "save", 2, False),
    "while a checkpoint is written": (safetensors.torch, "save_file", 2, True),
    "after a checkpoint": (CheckpointFolder, "save", 2, True),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_run_whose_server_dies_anywhere_is_resumed_to_the_same_end(tmp_path, death, whole):
    first = federation(tmp_path / "first")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        dying(patch, *DEATHS[death])
        run(first)
    second = federation(tmp_path / "second", resume_from=str(first.results_folder / "checkpoint"))
    run(second)
    assert read_events(second.results_folder)[0].run_id == read_events(first.results_folder)[0].run_id
    assert last(second).round == whole.round and same_bits(last(second), whole)


def test_a_damaged_best_checkpoint_costs_no_run(tmp_path):
    def worse(header, reply, tensors):
        return replace(reply, numbers=reply.numbers | {"validation_loss": float(header.round)}), tensors

    local = {"site-a": Spoilt("site-a", worse, CLOSE_ROUND, [pair(1)] * T)}
    run(first := federation(tmp_path / "first", local))
    best = first.results_folder / "checkpoint" / "best.safetensors"
    assert first.results.best == load(best).round == 1
    best.write_bytes(b"half")
    run(second := federation(tmp_path / "second", local, num_rounds=5, resume_from=str(best.parent)))
    assert (
        not second.panics and second.results.best == load(second.results_folder / "checkpoint" / best.name).round == 4
    )


@pytest.mark.parametrize(("where", "name"), [(safetensors.torch, "save_file"), (SpilledUpdates, "add")])
def test_a_full_disk_stops_the_run_with_the_reason_and_keeps_the_last_checkpoint(tmp_path, monkeypatch, where, name):
    controller, original, calls = federation(tmp_path, num_rounds=3), getattr(where, name), []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) > (2 if name == "save_file" else 9):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    monkeypatch.setattr(where, name, full)
    end = run(controller)["end"][0]
    assert end.status == "failed" and "No space left" in end.reason and "resume" in end.reason
    assert "No space left" in controller.panics[0]
    folder = controller.results_folder / "checkpoint"
    assert CheckpointFolder(folder).last()[0].round < 3
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")], "nothing half-written stays"


def checkpoint(r):
    method = {"t": torch.tensor(r, dtype=torch.float64)}
    return Checkpoint(r, {"a": torch.full((3,), float(r))}, method, {"run_id": "x"})


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    for r in range(1, 5):
        folder.save(checkpoint(r), best=r == 2)
    assert {p.stem for p in tmp_path.iterdir()} == {"best", "round-0003", "round-0004"}
    last, problems = folder.last()
    assert last.round == 4 and last.info == {"run_id": "x"} and not problems
    assert last.method["t"].dtype == torch.float64 and last.weights["a"].tolist() == [4.0] * 3
    assert load(tmp_path / "best.safetensors").round == 2
    for file in tmp_path.glob("round-*"):
        file.write_bytes(b"half")
    for place, words in ((tmp_path, "round-0003"), (tmp_path / "nothing", "no whole checkpoint")):
        with pytest.raises(FedTARError, match=words):
            CheckpointFolder(place).last()


def test_that_with_which_a_job_began_stays_so_that_its_rounds_can_be_made_again(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2, oldest=1)
    for r in range(3, 9):
        folder.save(checkpoint(r))
    assert [*folder.rounds()] == [3, 7, 8]
    assert [folder.last(before=r)[0].round for r in (0, 9, 8, 7, 4)] == [8, 8, 7, 3, 3]
    with pytest.raises(FedTARError, match="no whole checkpoint"):
        folder.last(before=3)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:-5], "damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the checksum is wrong"),
        (lambda data: data.replace(b'format\\": 2', b'format\\": 9'), "format 9; this version reads format 2"),
    ],
)
def test_a_file_that_cannot_be_used_costs_one_round_only_and_says_why(tmp_path, spoil, words):
    folder, newest = CheckpointFolder(tmp_path, keep=3), tmp_path / "round-0002.safetensors"
    folder.save(checkpoint(1))
    folder.save(checkpoint(2))
    newest.write_bytes(spoil(newest.read_bytes()))
    last, problems = folder.last()
    assert last.round == 1 and len(problems) == 1
    with pytest.raises(StateError, match=words):
        load(newest)
