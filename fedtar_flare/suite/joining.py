"""When does joining pay? The gain over the reference (a hospital alone) at the same hospital, with the same seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval, over_seeds
from fedtar_flare.suite.against import COMPARED, paired
from fedtar_flare.suite.figures import COLOURS, FADED, INK, Figure, Line, Panel
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.results import Done, Row

CHARTS = ("cider", "finding_f1_known", "finding_f1_new")
"""Scores with a figure."""


@dataclass(frozen=True)
class Gain:
    """An arm's score less the reference's on one set of hospitals, over patients and as many seeds as both have."""

    arm: str
    label: str
    values: Mapping[str, Any]
    score: str
    gain: Interval
    seeds: int


def gains(results: Sequence[Done], suite: Suite) -> list[Gain]:
    """All arms on all points of the grid and in all cases.

    On a grid they are of the hospitals that are in all its points, so that points differ in nothing else; in a case, of
    the hospital that it is about. What shares nothing was run with the fewest hospitals, for all numbers of them.
    """
    fewest = min(suite.grid.get("hospitals", [len(suite.sites)]))
    common = set(suite.sites[:fewest])
    points = {v.name: v.values for one in results if (v := one.cell.variant).values and "left_out" not in v.values}
    found = []
    for values in points.values():
        arms: dict[str, dict[int, Done]] = {}
        for one in results:
            if _says_of(one, values):
                arms.setdefault(one.cell.name, {})[one.cell.seed] = one
        alone = arms.get(suite.compared_with, {})
        for name, by_seed in arms.items():
            first = next(iter(by_seed.values()))
            sites = {suite.cases[values["case"]]["about"]} if "case" in values else common
            seeds = [seed for seed in by_seed if seed in alone] if name != suite.compared_with else []
            runs = [(_of(by_seed[seed], sites), _of(alone[seed], sites)) for seed in seeds]
            found += [Gain(name, first.result["label"], values, s, gain, len(runs)) for s, gain in _gains(runs)]
    return found


def _says_of(one: Done, values: Mapping[str, Any]) -> bool:
    """Whether a result is of this point: its own, or for what shares nothing one with another number of hospitals."""
    own = one.cell.variant.values
    if one.result["shares"] or "hospitals" not in own:
        return own == values
    return own | {"hospitals": values.get("hospitals")} == values


def _of(one: Done, sites: Iterable[str]) -> list[Row]:
    return [row for row in one.members() if row["site"] in sites]


def _gains(runs: Sequence[tuple[list[Row], list[Row]]]) -> Iterable[tuple[str, Interval]]:
    for score in COMPARED:
        a, b = paired(score, runs)
        if a:
            yield score, over_seeds(a, b)


def joining_figures(found: Sequence[Gain], suite: Suite) -> list[Figure]:
    """Gain against patients per hospital, a line per arm; a panel per number of hospitals and share of own words."""
    return [
        figure for score in CHARTS if (figure := _figure([g for g in found if g.score == score], suite, score)).panels
    ]


def _figure(found: Sequence[Gain], suite: Suite, score: str) -> Figure:
    on_grid = [gain for gain in found if "patients" in gain.values]
    points = sorted({tuple((k, v) for k, v in gain.values.items() if k != "patients") for gain in on_grid})
    arms = list(dict.fromkeys((gain.arm, gain.label) for gain in on_grid))
    panels = []
    for point in points:
        lines = []
        for i, (arm, label) in enumerate(arms):
            here = [g for g in on_grid if g.arm == arm and dict(point).items() <= g.values.items()]
            here.sort(key=lambda g: g.values["patients"])
            low, value, high = (
                [getattr(g.gain, part) * SCORES[score].scale for g in here] for part in ("low", "value", "high")
            )
            colour = COLOURS[i] if i < len(COLOURS) else FADED
            lines.append(Line(label, [g.values["patients"] for g in here], value, colour, low, high))
        places = sorted({x for line in lines for x in line.x})
        lines.append(Line("alone", places, [0.0] * len(places), INK, kind="guide"))
        panels.append(Panel(_title(dict(point)), "patients per hospital", _gain_label(score), lines, log_x=True))
    columns = len(suite.grid.get("own_words", ())) or min(3, len(panels))
    about = (
        "Above the dashed line a hospital does better in the federation than alone. Test patients of the hospitals "
        "that are in every panel; the shade is the 95 % interval over patients and seeds."
    )
    title = f"When does joining pay? Gain in {SCORES[score].label}"
    return Figure(f"joining_{score}", title, about, panels, columns=max(1, columns), share_y=True)


def _gain_label(score: str) -> str:
    return f"gain in {SCORES[score].label}{' × 100' if SCORES[score].scale == 100 else ''}"


def _title(point: Mapping[str, Any]) -> str:
    parts = []
    if "hospitals" in point:
        parts.append(f"{point['hospitals']} hospitals")
    if "own_words" in point:
        parts.append(f"{100 * point['own_words']:.0f} % own words")
    return ", ".join(parts) or "all hospitals"


def case_gains(found: Sequence[Gain], case: str) -> dict[str, dict[str, Gain]]:
    """By arm's label and score."""
    rows: dict[str, dict[str, Gain]] = {}
    for gain in found:
        if gain.values.get("case") == case:
            rows.setdefault(gain.label, {})[gain.score] = gain
    return rows
