"""When does joining pay? The gain over the reference (a hospital alone) at the same hospitals, with the same seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval, over_seeds
from fedtar_flare.reporting.format import score
from fedtar_flare.reporting.plots import SITE_COLOURS, SMALL, Chart, Figure, Guide, Series, sharing_y
from fedtar_flare.suite.against import COMPARED, both, paired
from fedtar_flare.suite.results import Done, at_sites, by_arm
from fedtar_flare.suite.variants import HOSPITALS

CHARTS = ("cider", "finding_f1_known", "finding_f1_new")
"""Scores with a figure."""
PATIENTS = "patients"
"""The option that is the x axis of the figures."""


@dataclass(frozen=True)
class Gain:
    """An arm's score less the reference's on one set of hospitals, over patients and as many seeds as both have."""

    arm: str
    label: str
    scenario: str
    point: Mapping[str, Any]
    score: str
    gain: Interval
    seeds: int


def gains(results: Sequence[Done], reference: str) -> list[Gain]:
    """All arms in all scenarios, at the hospitals that a scenario names, or else at those that are in all its points.

    What shares nothing was run with the fewest hospitals, for all numbers of them.
    """
    several = [v for one in results if (v := one.experiment.variant).scenario and not v.left_out]
    found = []
    for variant in {(v.scenario, v.name): v for v in several}.values():
        here = [one for one in results if _says_of(one, variant.scenario, variant.point)]
        arms = {name: runs[0].result["label"] for name, runs in by_arm(here).items() if name != reference}
        for name, label in arms.items():
            pairs = both(here, name, reference)
            runs = [(at_sites(a, variant.compared), at_sites(b, variant.compared)) for a, b in pairs]
            for compared in COMPARED:
                a, b = paired(compared, runs)
                if a:
                    gain = Gain(name, label, variant.scenario, variant.point, compared, over_seeds(a, b), len(runs))
                    found.append(gain)
    return found


def _says_of(one: Done, scenario: str, point: Mapping[str, Any]) -> bool:
    """Whether a result is of this point: its own, or for what shares nothing one with another number of hospitals."""
    own = one.experiment.variant
    if one.result["shares"] or HOSPITALS not in own.point:
        return (own.scenario, own.point) == (scenario, point)
    return (own.scenario, own.point | {HOSPITALS: point.get(HOSPITALS)}) == (scenario, point)


def joining_figures(found: Sequence[Gain], reference: str) -> list[Figure]:
    """Gain against patients per hospital, a line per arm; a chart for each combination of what else differs."""
    made = [_figure([g for g in found if g.score == name and PATIENTS in g.point], name, reference) for name in CHARTS]
    return [figure for figure in made if figure.charts]


def _figure(found: Sequence[Gain], name: str, reference: str) -> Figure:
    points = sorted({tuple((k, v) for k, v in gain.point.items() if k != PATIENTS) for gain in found})
    arms = list(dict.fromkeys((gain.arm, gain.label) for gain in found))
    scale, label = SCORES[name].scale, SCORES[name].label
    charts = []
    for point in points:
        lines = []
        for i, (arm, of_arm) in enumerate(arms):
            here = [g for g in found if g.arm == arm and dict(point).items() <= g.point.items()]
            here.sort(key=lambda g: g.point[PATIENTS])
            values = [(g.point[PATIENTS], *(scale * part for part in g.gain), g) for g in here]
            lines.append(
                Series(
                    of_arm,
                    [(x, y, f"{of_arm}, {x} patients: {score(name, g.gain.value)}") for x, y, _, _, g in values],
                    "site" if i < SITE_COLOURS else "faded",
                    i,
                    [(x, low, high) for x, _, low, high, _ in values],
                )
            )
        unit, guides = f"gain{' × 100' if scale == 100 else ''}", [Guide(0.0, "reference")]
        axes = ("patients per hospital", unit)
        charts.append(Chart(_title(dict(point)), lines, (), *axes, guides=guides, log=True, size=SMALL))
    about = (
        f"Above the dashed line an arm is better than '{reference}'. Test patients of the hospitals that are in every "
        "chart; the band is the 95 % interval over patients and seeds."
    )
    return Figure(f"joining_{name}", f"Gain in {label} over {reference}", about, sharing_y(charts))


def _title(point: Mapping[str, Any]) -> str:
    words = {HOSPITALS: "{} hospital(s)", "own_words": "{:.0%} own words"}
    return ", ".join(words.get(key, f"{key} {{}}").format(value) for key, value in point.items()) or "all hospitals"
