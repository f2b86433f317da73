"""Sites that make a part of their updates: how they count in a mean, and what one gains that lies about it."""

import pytest
import torch
from federation import NAMES, QuadraticSite, Spoilt, federation_of, last, pair, same_bits

from fedtar_flare.errors import ConfigError
from fedtar_flare.learning.config import TrainingConfig
from fedtar_flare.protocol.tasks import TRAIN
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.reporting.participation import participation
from fedtar_flare.reporting.run import read_run

PLANNED = 12


def working(name, updates, targets, samples=1, planned=PLANNED):
    """A site whose update is as large as the updates that it says it made."""

    def part(order, reply, tensors):
        reply.numbers.update(updates=updates, planned_updates=planned)
        return reply, {n: value * min(1.0, updates / planned) for n, value in tensors.items()}

    return Spoilt(name, part, TRAIN, targets, samples)


def ended(folder, sites, method="fedavg", rounds=2, **settings):
    controller = federation_of(method)(
        folder, {site.name: site for site in sites}, num_rounds=rounds, time_steps=1, **settings
    )
    controller.run()
    return controller, of_kind(read_events(controller.results_folder), Step)


@pytest.mark.parametrize("aggregation", ["mean", "median"])
@pytest.mark.parametrize("made", [(12, 12, 12), (12, 3, 12), (1, 1, 1), (2, 5, 12)])
def test_sites_that_make_parts_of_their_updates_are_averaged_as_fednova_has_it(tmp_path, made, aggregation):
    """``w + tau sum_k p_k d_k / tau_k``: the direction is that of sites that made all, the length the mean work's."""
    targets, samples = [[pair(n)] for n in range(3)], [1, 4, 2]
    sites = [working(f"site-{n}", made[n], targets[n], samples[n]) for n in range(3)]
    settings = {"aggregation": aggregation, "min_sites": 3, "max_share": 1.0}
    controller, _ = ended(tmp_path / "part", sites, rounds=1, **settings)
    full = [QuadraticSite(f"site-{n}", targets[n], samples[n], validation=pair(10)) for n in range(3)]
    whole, _ = ended(tmp_path / "whole", full, rounds=1, **settings)
    start, share = full[0].start(), sum(p / 7 * m / PLANNED for p, m in zip(samples, made, strict=True))
    if made == (PLANNED,) * 3:
        assert same_bits(last(controller), last(whole)), "nobody was slow: to the bit as without training.seconds"
    for name in NAMES:
        step = last(whole).weights[name] - start[name]
        torch.testing.assert_close(last(controller).weights[name], start[name] + share * step)


def test_the_control_variates_of_scaffold_are_means_already_and_are_not_rescaled(tmp_path):
    def with_control(updates):
        def spoil(order, reply, tensors):
            reply.numbers.update({"updates": updates, "planned_updates": PLANNED} if updates else {})
            change = {f"control.{name}": torch.ones_like(value) for name, value in tensors.items()}
            return reply, {n: value * (updates or PLANNED) / PLANNED for n, value in tensors.items()} | change

        return Spoilt("site-a", spoil, TRAIN, [pair(1)])

    part, whole = (ended(tmp_path / str(n), [with_control(n)], "scaffold", rounds=1)[0] for n in (3, None))
    assert last(part).round == 1 and all(value.any() for value in whole.strategy.control.values())
    for name, value in whole.strategy.control.items():
        torch.testing.assert_close(part.strategy.control[name], value)


def test_a_site_gains_nothing_by_a_lie_about_its_updates(tmp_path):
    """More than planned are refused; fewer than made are a longer update, within the same limit; no share moves."""
    honest = [working(f"site-{n}", PLANNED, [pair(n)], samples=2) for n in range(2)]

    def claiming(updates, planned=PLANNED):
        def lie(order, reply, tensors):
            reply.numbers.update(updates=updates, planned_updates=planned)
            return reply, tensors

        return Spoilt("site-9", lie, TRAIN, [pair(9)])

    _, steps = ended(tmp_path / "more", [*honest, claiming(PLANNED + 1)], rounds=1)
    assert "13 of 12 planned updates" in steps[0].refused["site-9"]
    _, steps = ended(tmp_path / "fewer", [*honest, claiming(1, 10**6)], rounds=1)
    assert "times that of the weights" in steps[0].refused["site-9"]
    controller, steps = ended(tmp_path / "ever", [*honest, claiming(1)], rounds=1)
    lengthened = Spoilt("site-9", lambda o, r, x: (r, {n: v * PLANNED for n, v in x.items()}), TRAIN, [pair(9)])
    other, _ = ended(tmp_path / "longer", [*honest, lengthened], rounds=1)
    start = honest[0].start()
    for name in NAMES:  # the same direction, and a shorter step
        moved, without = (last(run).weights[name] - start[name] for run in (controller, other))
        torch.testing.assert_close(moved, without * (2 / 3 + 1 / 3 / PLANNED), rtol=1e-4, atol=1e-6)


def test_the_page_says_how_many_updates_each_site_made(tmp_path):
    sites = [working("site-a", 12, [pair(1)]), working("site-b", 3, [pair(2)])]
    controller, _ = ended(tmp_path, sites)
    page = participation(read_run(controller.results_folder)).content
    assert "site-a 24 of 24, site-b 6 of 24" in page and "3 of 12 updates" in page


@pytest.mark.parametrize("other", [{"local_epochs": 1.0}, {"noise_multiplier": 1.0}])
def test_how_many_updates_fit_never_tells_how_many_visits_or_whom_dp_sgd_drew(other):
    with pytest.raises((ConfigError, ValueError), match="seconds"):
        TrainingConfig(seconds=5.0, **other)
