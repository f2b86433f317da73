"""When does joining pay? Gains over the reference (a hospital alone) at the same hospitals, with the same seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval, over_seeds
from fedtar_flare.reporting.format import score
from fedtar_flare.reporting.plots import SITE_COLOURS, SMALL, Chart, Figure, Guide, Series, sharing_y
from fedtar_flare.suite.compare import COMPARED, paired_runs, paired_sums
from fedtar_flare.suite.results import Result, at_sites, by_arm
from fedtar_flare.suite.variants import HOSPITALS

CHARTS = ("cider", "finding_f1_known", "finding_f1_new")
"""Scores with a figure."""
PATIENTS = "patients"
"""The cohort option on the x axis of the figures."""


@dataclass(frozen=True)
class Gain:
    """An arm's score minus the reference's on one set of hospitals, over patients and the ``seeds`` that both have."""

    arm: str
    label: str
    scenario: str
    point: Mapping[str, Any]
    score: str
    gain: Interval
    seeds: int


def gains(results: Sequence[Result], reference: str) -> list[Gain]:
    """All arms in all scenarios, at the hospitals that a scenario names, or else at those that all its points have.

    An arm that shares nothing was run with the fewest hospitals, for all numbers of them.
    """
    scenarios = [variant for result in results if (variant := result.experiment.variant).scenario]
    out = []
    for variant in {(v.scenario, v.name): v for v in scenarios}.values():
        here = [result for result in results if _belongs(result, variant.scenario, variant.point)]
        for name, (first, *_) in by_arm(here).items():
            if name == reference:
                continue
            pairs = paired_runs(here, name, reference)
            runs = [(at_sites(a, variant.compared), at_sites(b, variant.compared)) for a, b in pairs]
            for compared in COMPARED:
                a, b = paired_sums(compared, runs)
                if a:
                    interval = over_seeds(a, b)
                    out.append(Gain(name, first.label, variant.scenario, variant.point, compared, interval, len(runs)))
    return out


def _belongs(result: Result, scenario: str, point: Mapping[str, Any]) -> bool:
    """Whether a result is of this point: its own, or of an arm that shares nothing, any number of hospitals."""
    own = result.experiment.variant
    if result.content["shares"] or HOSPITALS not in own.point:
        return (own.scenario, own.point) == (scenario, point)
    return (own.scenario, own.point | {HOSPITALS: point.get(HOSPITALS)}) == (scenario, point)


def joining_figures(gains: Sequence[Gain], reference: str) -> list[Figure]:
    """Gain against patients per hospital, a line per arm; a chart for each combination of what else differs."""
    figures = [
        _figure([g for g in gains if g.score == name and PATIENTS in g.point], name, reference) for name in CHARTS
    ]
    return [figure for figure in figures if figure.charts]


def _figure(gains: Sequence[Gain], name: str, reference: str) -> Figure:
    points = sorted({tuple((k, v) for k, v in gain.point.items() if k != PATIENTS) for gain in gains})
    arms = list(dict.fromkeys((gain.arm, gain.label) for gain in gains))
    scale, charts = SCORES[name].scale, []
    for point in points:
        lines = []
        for i, (arm, label) in enumerate(arms):
            here = [g for g in gains if g.arm == arm and dict(point).items() <= g.point.items()]
            here.sort(key=lambda g: g.point[PATIENTS])
            marks, band = [], []
            for g in here:
                x, (y, low, high) = g.point[PATIENTS], (scale * part for part in g.gain)
                marks.append((x, y, f"{label}, {x} patients: {score(name, g.gain.value)}"))
                band.append((x, low, high))
            lines.append(Series(label, marks, "site" if i < SITE_COLOURS else "faded", i, band))
        axes = ("patients per hospital", f"gain{' × 100' if scale == 100 else ''}")
        guides = [Guide(0.0, "reference")]
        charts.append(Chart(point_title(dict(point)), lines, (), *axes, guides=guides, log=True, size=SMALL))
    about = (
        f"Above the dashed line an arm is better than '{reference}'. Test patients of the hospitals that are in every "
        "chart; the band is the 95 % interval over patients and seeds."
    )
    return Figure(f"joining_{name}", f"Gain in {SCORES[name].label} over {reference}", about, sharing_y(charts))


def point_title(point: Mapping[str, Any]) -> str:
    """A point for people: ``4 hospital(s), 24 patients, 100% own words``."""
    words = {HOSPITALS: "{} hospital(s)", PATIENTS: "{} patients", "own_words": "{:.0%} own words"}
    return ", ".join(words.get(key, f"{key} {{}}").format(value) for key, value in point.items()) or "all hospitals"
