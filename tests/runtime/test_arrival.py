"""When sites answer: parts of their updates, answers that come late, and visits that arrive period by period."""

import dataclasses
import json

import pytest
import torch
from federation import Spoilt, federation, pair, run, slowed
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import TaskHeader, ok, version
from fedtar_flare.record.events import Evaluation, Joined, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.reporting.page import participation
from fedtar_flare.reporting.run import read_run
from fedtar_flare.testing import FunctionFederation, Hospital, QuadraticSite, same_bits
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing.federation import NAMES

PLANNED = 12


def working(name, updates, targets, samples=1, planned=PLANNED, times=None):
    """A site that says how many of its updates it made; what it sends is ``times`` all of them, by default as said."""
    times = updates / planned if times is None else times

    def part(order, reply, tensors):
        reply.numbers.update(updates=updates, planned_updates=planned)
        return reply, {name: times * value for name, value in tensors.items()}

    return Spoilt(name, part, TRAIN, targets, samples)


def ended(folder, sites, method="fedavg", num_rounds=1, slow=None, **settings):
    settings = {"time_steps": 1, "num_rounds": num_rounds} | settings
    controller = FunctionFederation(folder, {site.name: site for site in sites}, method, **settings)
    if slow:
        slowed(controller, "slow", slow)
    controller.run()
    return controller, of_kind(read_events(controller.results_folder), Step)


@pytest.mark.parametrize("aggregation", ["mean", "median"])
@pytest.mark.parametrize("made", [(12, 12, 12), (12, 3, 12), (1, 1, 1), (2, 5, 12)])
def test_sites_that_make_parts_of_their_updates_are_averaged_as_fednova_has_it(tmp_path, made, aggregation):
    """``w + tau sum_k p_k d_k / tau_k``: the direction is that of sites that made all, the length the mean work's."""
    targets, samples = [[pair(n)] for n in range(3)], [1, 4, 2]
    sites = [working(f"site-{n}", made[n], targets[n], samples[n]) for n in range(3)]
    settings = {"aggregation": aggregation, "min_sites": 3, "max_share": 1.0}
    controller, _ = ended(tmp_path / "part", sites, **settings)
    full = [QuadraticSite(f"site-{n}", targets[n], samples[n], validation=pair(10)) for n in range(3)]
    whole, _ = ended(tmp_path / "whole", full, **settings)
    start, share = full[0].start(), sum(p / 7 * m / PLANNED for p, m in zip(samples, made, strict=True))
    if made == (PLANNED,) * 3:
        assert same_bits(last(controller), last(whole)), "nobody was slow: to the bit as without training.seconds"
    for name in NAMES:
        step = last(whole).weights[name] - start[name]
        torch.testing.assert_close(last(controller).weights[name], start[name] + share * step)


def test_the_control_variates_of_scaffold_are_means_already_and_are_not_rescaled(tmp_path):
    def ones(order, reply, tensors):
        return reply, tensors | {f"control.{name}": torch.ones_like(value) for name, value in tensors.items()}

    def with_control(updates):
        site = working("site-a", updates, [pair(1)])
        return Spoilt("site-a", lambda *answer: ones(answer[0], *site.spoil(*answer)), TRAIN, [pair(1)])

    runs = [ended(tmp_path / str(n), [with_control(n)], "scaffold")[0] for n in (3, PLANNED)]
    part, whole = (run.strategy.control for run in runs)
    assert part and all(torch.equal(value, whole[name]) and value.any() for name, value in part.items())


def test_a_site_gains_nothing_by_a_lie_about_its_updates(tmp_path):
    """More than planned are refused; fewer than made are a longer update, within the same limit; no share moves."""
    honest = [working(f"site-{n}", PLANNED, [pair(n)], samples=2) for n in range(2)]

    def lying(updates, planned=PLANNED, times=1.0):
        site = working("site-9", updates, [pair(9)], 2, planned, times)
        return ended(tmp_path / f"{updates}-{planned}-{times}", [*honest, site])

    assert "13 of 12 planned updates" in lying(PLANNED + 1)[1][0].refused["site-9"]
    assert "times that of the weights" in lying(1, 10**6)[1][0].refused["site-9"]
    start, few, longer = honest[0].start(), last(lying(1)[0]), last(lying(PLANNED, times=PLANNED)[0])
    for name in NAMES:  # the same direction as of an update that it made longer itself, and a shorter step
        moved, without = few.weights[name] - start[name], longer.weights[name] - start[name]
        torch.testing.assert_close(moved, without * (2 / 3 + 1 / 3 / PLANNED), rtol=1e-4, atol=1e-6)


def three_rounds(folder, until):
    sites = [QuadraticSite(name, [pair(n)], samples=n + 1) for n, name in enumerate(("a", "b", "slow"))]
    return *ended(folder, sites, num_rounds=3, slow={(1, 1): until}, wait_seconds=0.01, max_share=1.0), sites


def test_a_late_answer_enters_a_later_round_at_less_weight_and_holds_nobody(tmp_path):
    controller, steps, sites = three_rounds(tmp_path, (TRAIN, 3, 1))
    assert [sorted(step.sites) for step in steps] == [["a", "b"], ["a", "b"], ["a", "b", "slow"]]
    assert [step.sites[name].late for step in steps[2:] for name in sorted(step.sites)] == [0, 0, 2]
    assert all("still at work" in step.absent["slow"] for step in steps[:2]) and not steps[2].absent
    asked = [(task, r) for task, site, r, _ in controller.sent if site == "slow"]
    assert asked == [(HANDSHAKE, 0), (TRAIN, 1), (CLOSE_ROUND, 3)], "it is asked for nothing while it works"
    start = w = torch.stack([*sites[0].start().values()])
    a, b, slow = (torch.stack(site.targets[0]) for site in sites)
    for late in (0, 0, 1 / 3):  # what it answered to the start, at 1 / (1 + 2)
        w = w + 0.5 * ((a - w) + 2 * (b - w) + 3 * late * (slow - start)) / (6 if late else 3)
    torch.testing.assert_close(torch.stack([last(controller).weights[name] for name in NAMES]), w)
    assert "of 2 rounds before: it counts 1 / 3" in participation(read_run(controller.results_folder)).content
    _, steps, _ = three_rounds(tmp_path / "once", (CLOSE_ROUND, 1, 1))
    assert [step.sites["slow"].late for step in steps[1:]] == [0, 0] and "slow" in steps[0].absent, "counted once"


def test_a_site_that_is_late_twice_loses_neither_answer_and_a_refusal_keeps_its_reason(tmp_path):
    def huge(order, reply, tensors):
        return reply, {name: 1e9 * value for name, value in tensors.items()} if order.round == 3 else tensors

    sites = [QuadraticSite("a", [pair(0)] * 3), Spoilt("slow", huge, TRAIN, [pair(1)] * 3)]
    late = {(1, 1): (TRAIN, 1, 2), (1, 3): (TRAIN, 2, 1), (2, 3): (TRAIN, 3, 1)}  # asked for nothing where it comes in
    _, steps = ended(tmp_path, sites, num_rounds=3, time_steps=3, slow=late, wait_seconds=0.01)
    assert [step.sites["slow"].late for step in steps if "slow" in step.sites] == [1, 0, 1]
    assert "times that of the weights" in steps[-1].refused["slow"]


def test_a_silent_site_whose_task_was_cancelled_is_not_said_to_be_at_work(tmp_path):
    class Silent(QuadraticSite):
        def __call__(self, task, header, weights):
            return None if header.round else super().__call__(task, header, weights)

    sites, limits = [QuadraticSite("a", [pair(0)]), Silent("b", [pair(1)])], {"wait_seconds": 9, "step_time_limit": 1}
    _, steps = ended(tmp_path, sites, num_rounds=2, **limits)
    assert [step.absent["b"] for step in steps] == ["no answer within 1 s", "still silent; not waited for again"]


T = 4
FEW = {"synthetic_patients": 4}
SCORES = {"steps": {"2": {"n": 5, "bleu_4": 0.5}}, "all": {"n": 5, "bleu_4": 0.5}, "findings": {}, "references": {}}


class ScoringSite(QuadraticSite):
    """Sends scores whenever it is asked for them."""

    def __call__(self, task, order, weights):
        reply, tensors = super().__call__(task, order, weights)
        if task == HANDSHAKE:
            reply.payload["modality"] = "radiograph" if self.name == "site-c" else "ct"
        return (ok(order, reply.numbers, {**reply.payload, "scores": SCORES}) if order.evaluate else reply), tensors


def sites(*names):
    made = {name: [pair(10 * i + t) for t in range(T + 1)] for i, name in enumerate(names)}
    return {name: ScoringSite(name, goals[:T], validation=goals[T]) for name, goals in made.items()}


@settings(max_examples=5)
@given(form=st.sampled_from(("softmax", "sigmoid")), n=st.integers(1, 2))
def test_theorem_1_holds_over_periods_with_psi_carried_on(tmp_path_factory, form, n):
    """The last weights are a mean of the first ones and of all that sites aimed at, though T grows on the way."""
    there, folder = sites("site-a", "site-b"), tmp_path_factory.mktemp("run")
    given_ = {"time_steps": T, "alpha_form": form, "rounds_per_period": n}
    controller = federation(folder / "whole", there, num_rounds=3 * n, **given_)
    events = run(controller)
    walked = [(one.round, one.step) for one in events["residual"]]
    assert walked == [(r, t) for r in range(1, 3 * n + 1) for t in range(1, -(-r // n) + 1)]
    aims = [dict(zip(NAMES, goal, strict=True)) for one in there.values() for goal in one.targets]
    goals = [start := there["site-a"].start(), *aims]
    betas = torch.zeros(len(goals), dtype=torch.float64)
    betas[0] = 1
    for one in events["residual"]:
        moved = 0.5 * one.alpha  # the sites' own rate is 0.5
        betas *= 1 - moved
        betas[[one.step, T + one.step]] += moved / 2
    assert betas.min() >= 0 and float(betas.sum()) == pytest.approx(1, abs=1e-12)
    assert not betas[[T, 2 * T]].any(), "the last period is scored alone"
    for name in start:
        expected = sum(b * goal[name].double() for b, goal in zip(betas, goals, strict=True))
        torch.testing.assert_close(last(controller).weights[name].double(), expected, rtol=0, atol=1e-5)
    run(first := federation(folder / "two periods", sites(*there), num_rounds=2 * n, **given_))
    kept = str(first.results_folder / "checkpoint")
    run(then := federation(folder / "the third", sites(*there), num_rounds=3 * n, resume_from=kept, **given_))
    assert same_bits(last(controller), last(then)), "the next period may be a job of its own"


def test_scores_come_at_the_end_of_periods_and_from_a_late_site_before_it_learns(tmp_path):
    there = sites("site-a", "site-b", "site-c")
    given_ = {"time_steps": T, "num_rounds": 6, "rounds_per_period": 2, "joins": {"site-c": 5}}
    controller = FunctionFederation(tmp_path / "a", there, "fedavg", **given_)
    controller.run()
    events = read_events(controller.results_folder)
    scored = [(e.round, len(e.sites)) for e in of_kind(events, Evaluation)]
    assert scored == [(0, 2), (2, 2), (4, 2), (4, 1), (6, 3)], "the late one's, before it learns, by itself"
    info = json.loads((controller.results_folder / "adapter" / "fedtar.json").read_text())
    assert info["modality"] == ["ct", "radiograph"], "what the adapter has learnt from so far"
    assert "best by validation" not in (controller.results_folder / "report.html").read_text()
    assert [len(of_kind(events, kind)) for kind in (Joined, Step)] == [1, 2 * (1 + 2 + 3)]
    assert read_run(controller.results_folder).ahead == {2: dict.fromkeys(("site-a", "site-b"), SCORES["steps"]["2"])}
    shown = read_run(controller.results_folder).shown
    assert controller.results.best == shown.round == 6, "rounds that were validated on other visits are not compared"


@pytest.mark.parametrize("method", ["fedtar", "local"])
def test_what_lies_in_the_future_changes_nothing_but_the_scores_of_it(site_files, tmp_path, monkeypatch, method):
    found = []
    for number, report in enumerate((None, "Both lungs are clear.")):
        one = Hospital(tmp_path, fresh=False, method=method, model={"max_length": 8, "num_beams": 1}, data=FEW)
        strategy = one.executor.strategy
        read = strategy.patients

        def patients(*args, read=read, report=report):
            cohort = read(*args)
            for i, s in enumerate(cohort._samples):
                if report and s.time_step == 3:
                    cohort._samples[i] = dataclasses.replace(s, visit=dataclasses.replace(s.visit, report=report))
            return cohort

        monkeypatch.setattr(strategy, "patients", patients)

        def ask(task, r, t, w, one=one, number=number, **more):
            start = {"initial_site": one.name} if task == HANDSHAKE else {}
            header = TaskHeader(method, f"run-{number}", r, t, 2, 3, **more, **start, rounds_per_period=1)
            reply, tensors = one.run(task, header, w)
            assert reply.status == "ok", reply.reason
            return reply, tensors

        hello, w = ask(HANDSHAKE, 0, 0, None, after=version(0, 0), evaluate=True)
        told = [hello.payload["scores"]]
        shares = method != "local"
        for r in (1, 2):
            for t in range(1, r + 1):
                reply, update = ask(TRAIN, r, t, w if shares else None, after=version(r, t - 1))
                told.append(reply.numbers["train_loss"])
                w = {name: w[name] + 0.5 * update[name] for name in w} if shares else w
            closed, _ = ask(CLOSE_ROUND, r, 3, w if shares else None, after=version(r, 3), evaluate=True)
            told += [closed.numbers["validation_loss"], closed.payload.get("t_numbers"), closed.payload["scores"]]
        found.append((w, told))
    (w, told), (other, others) = found
    assert all(torch.equal(w[name], other[name]) for name in w)
    assert told[:-1] == others[:-1] and told[-1] != others[-1]
    scored = [one["steps"] for one in told if isinstance(one, dict)]
    assert [[t for t, cell in one.items() if cell["n"]] for one in scored] == [["1"], ["2"], ["3"]]


def test_a_job_that_adds_a_period_scores_its_visits_before_it_learns_and_only_once(site_files, tmp_path):
    def ask(task, steps, r, t, w=None, rounds=1, **more):
        data = FEW | {"alignment": "period", "periods": ["2019-04-01", "2019-07-01"][: steps - 1]}
        data |= {"replay_share": float(steps < 3)}
        model, temporal = {"max_length": 8, "num_beams": 1}, {"replay": "seen"}
        one = Hospital(tmp_path, method="fedtar", model=model, data=data, temporal=temporal)
        return one.run(task, TaskHeader("fedtar", "run", r, t, rounds, steps, **more), w)

    _, w = ask(HANDSHAKE, 2, 0, 0, after=version(0, 0), initial_site="site-1")
    for t in (1, 2):
        assert ask(TRAIN, 2, 1, t, w, after=version(1, t - 1))[0].status == "ok"
        w = {name: value + 0.001 * t for name, value in w.items()}
    assert ask(CLOSE_ROUND, 2, 1, 2, w, after=version(1, 2), evaluate=True)[0].payload["scores"]
    again = {"after": version(1, 3), "evaluate": True, "member": True, "rounds": 2}
    hello, _ = ask(HANDSHAKE, 3, 0, 0, w, **again)
    assert hello.status == "ok", hello.reason
    assert [t for t, cell in hello.payload["scores"]["steps"].items() if cell["n"]] == ["3"]
    assert "period 3 is the first one" in (tmp_path / "state/run/site-1/periods.html").read_text().lower()
    assert ask(HANDSHAKE, 3, 0, 0, w, **again)[0].payload["scores"] == hello.payload["scores"], "resumed after a kill"
    other = {name: value + 1 for name, value in w.items()}
    assert "scores" not in ask(HANDSHAKE, 3, 0, 0, other, **again)[0].payload
    reply, _ = ask(TRAIN, 3, 2, 1, w, after=version(2, 0), rounds=2)
    assert reply.status == "ok", reply.reason
    assert reply.numbers["samples"] == hello.payload["counts"]["train"][2] < sum(hello.payload["counts"]["train"])
    assert ask(TRAIN, 2, 2, 1, w, after=version(2, 0), rounds=2)[0].status == "error", "no way back"
