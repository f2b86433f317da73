"""Sites that make a part of their updates: how they count in a mean, and what one gains that lies about it."""

import pytest
import torch
from federation import Spoilt, slowed

from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.reporting.page import participation
from fedtar_flare.reporting.run import read_run
from fedtar_flare.testing import FunctionFederation, QuadraticSite, same_bits
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing import random_pair as pair
from fedtar_flare.testing.federation import NAMES

PLANNED = 12


def working(name, updates, targets, samples=1, planned=PLANNED, times=None):
    """A site that says how many of its updates it made; what it sends is ``times`` all of them, by default as said."""
    times = updates / planned if times is None else times

    def part(order, reply, tensors):
        reply.numbers.update(updates=updates, planned_updates=planned)
        return reply, {name: times * value for name, value in tensors.items()}

    return Spoilt(name, part, TRAIN, targets, samples)


def ended(folder, sites, method="fedavg", num_rounds=1, **settings):
    settings |= {"num_rounds": num_rounds, "time_steps": 1}
    controller = FunctionFederation(folder, {site.name: site for site in sites}, method, **settings)
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
    settings = {"num_rounds": 3, "time_steps": 1, "wait_seconds": 0.01, "max_share": 1.0}
    controller = FunctionFederation(folder, {site.name: site for site in sites}, "fedavg", **settings)
    slowed(controller, "slow", until)
    controller.run()
    return controller, of_kind(read_events(controller.results_folder), Step), sites


def test_a_late_answer_enters_a_later_round_at_less_weight_and_holds_nobody(tmp_path):
    controller, steps, sites = three_rounds(tmp_path, (TRAIN, 3))
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
    _, steps, _ = three_rounds(tmp_path / "once", (CLOSE_ROUND, 1))
    assert [step.sites["slow"].late for step in steps[1:]] == [0, 0] and "slow" in steps[0].absent, "counted once"
