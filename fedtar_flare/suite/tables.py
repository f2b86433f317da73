"""Tables of the comparison: rows are methods, columns are scores, each with its 95 % interval."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from markupsafe import Markup

from fedtar_flare.metrics.registry import EFFICACY, SCORES
from fedtar_flare.metrics.significance import Interval
from fedtar_flare.reporting.format import NOTHING, heading, number, score, shown
from fedtar_flare.suite.against import COMPARED, SUMS, Difference, value
from fedtar_flare.suite.joining import PATIENTS, Gain
from fedtar_flare.suite.results import Done, Row, at_sites, by_arm, grouped
from fedtar_flare.suite.variants import HOSPITALS

WARM_START = "warm start"
COLUMNS = [n for n in SUMS if n not in EFFICACY or ("uncertain_positive" not in n and "_micro_" not in n)]
"""Scores of the tables of arms; all others are in those of every metric."""
MOST_ROWS = 15
"""A longer table is folded."""


@dataclass(frozen=True)
class Table:
    """As the template shows it; cells are text or markup."""

    title: str
    about: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """All rows by family, where :attr:`rows` has only the best of each."""

    def fold(self, families: Mapping[str, str]) -> "Table":
        """A long table with the first row of each family (label to title); rows of no family stay, too."""
        if len(self.rows) <= MOST_ROWS:
            return self
        groups = grouped(self.rows, lambda row: families.get(row[0], row[0]))
        return replace(self, rows=[group[0] for group in groups.values()], folded=groups)


def head(names: Iterable[str]) -> list[str]:
    """Column heads of a table of scores, with direction and unit."""
    return ["method", *map(heading, names)]


def scores(
    title: str,
    about: str,
    results: Sequence[Done],
    rows_of: Callable[[Done, str], list[Row]],
    against: Sequence[Difference] = (),
) -> Table:
    """The warm start and then each arm, over all hospitals' patients together.

    ``rows_of`` gives the reports of a run, ``start`` or ``end``; an arm that has none is left out. Where a difference
    in ``against`` has p below 0.05, a star stands at the score.
    """
    stars = {(one.arm, one.score): "∗" for one in against if one.p < 0.05}
    lines: list[tuple[str, str, dict[str, Interval | None]]] = []
    for arm, runs in by_arm(results).items():
        ends = [rows_of(one, "end") for one in runs]
        if any(ends):
            if not lines:
                lines.append(("", WARM_START, _values([rows_of(one, "start") for one in runs])))
            lines.append((arm, runs[0].result["label"], _values(ends)))
    columns = [name for name in COLUMNS if any(values.get(name) for *_, values in lines)]
    rows = [
        [label, *(score_cell(name, values.get(name), stars.get((arm, name), "")) for name in columns)]
        for arm, label, values in lines
    ]
    return Table(title, about, head(columns), rows)


def left_out(results: Sequence[Done], sites: Sequence[str], reference: str) -> Table:
    """What the shared adapter gives a hospital that was left out, and what the reference gives it as a member."""
    lines: list[list[str]] = []
    turns = [one for one in results if one.experiment.variant.left_out]
    for runs in by_arm(turns).values():
        for when in ("start", "end") if not lines else ("end",):
            of_seeds = [
                [row for one in several for row in at_sites(one.outside(when), one.experiment.variant.left_out)]
                for several in grouped(runs, lambda one: one.experiment.seed).values()
            ]
            lines.append([WARM_START if when == "start" else runs[0].result["label"], *_left_out(of_seeds, sites)])
    members = [one for one in results if not one.experiment.variant.scenario and one.experiment.name == reference]
    if lines and members:
        alone = [one.members() for one in members]
        lines.append([f"{members[0].result['label']}, as a member", *_left_out(alone, sites)])
    about = (
        "Each hospital in turn stayed outside; the shared adapter alone was scored there, on test patients of all "
        "hospitals together in the first columns."
    )
    heads = ["method", *(SCORES[name].label for name in COMPARED), *(f"CIDEr at {site}" for site in sites)]
    return Table("Leave one hospital out", about, heads, lines)


def scenarios(found: Sequence[Gain], alone: str) -> Table:
    """Gains in the scenarios without lists."""
    about = (
        "At the hospitals that a scenario names, or at all, with 95 % intervals over patients and seeds. A hospital "
    )
    about += "that joins late begins late alone, too, so that both make the same number of updates."
    heads = ["scenario", "seeds", *(SCORES[n].label for n in COMPARED)]
    rows = [[f"{several[0].scenario}: {several[0].label}", *_gains(several)] for several in _points(found, lists=False)]
    return Table(f"Gain over '{alone}'", about, heads, rows)


def grid(found: Sequence[Gain]) -> Table:
    """Gains in the scenarios with lists, at every point: the numbers of the figures."""
    several = _points(found, lists=True)
    keys = list(dict.fromkeys(key for gains in several for key in gains[0].point))
    rows = [[gains[0].label, *(str(gains[0].point.get(k, NOTHING)) for k in keys), *_gains(gains)] for gains in several]
    names = {PATIENTS: "patients per hospital", HOSPITALS: "hospitals", "own_words": "own words"}
    heads = ["method", *(names.get(k, k) for k in keys), "seeds", *(f"gain in {SCORES[n].label}" for n in COMPARED)]
    return Table("Gains in numbers", "", heads, rows)


def differences(against: Sequence[Difference], labels: Mapping[str, str], reference: str) -> Table:
    """Each arm less the reference."""
    by_score: dict[str, dict[str, Difference]] = {}
    for one in against:
        by_score.setdefault(one.arm, {})[one.score] = one
    rows = [
        [labels[arm], *(score_cell(n, of[n].difference, p=of[n].p) if n in of else NOTHING for n in COMPARED)]
        for arm, of in by_score.items()
    ]
    about = (
        "On the same test patients of the hospitals that took part, all hospitals together: mean over seeds, 95 % "
        "interval over patients and seeds (5,000 replicates), and p of a permutation of the two methods' results "
        "patient by patient, corrected after Holm for the number of methods. A p is about these hospitals; with one "
        "seed it says nothing of another training."
    )
    return Table(
        f"Difference to {labels[reference]}", about, ["method", *(f"{SCORES[n].label}, points" for n in COMPARED)], rows
    )


def every_metric(found: Sequence[Difference], labels: Mapping[str, str], reference: str, units: str) -> Table:
    """One arm less another in every score (FedTAR, Table 5)."""
    rows = [
        [
            heading(one.score),
            *(number(shown(one.score, part), 2) for part in one.difference),
            number(one.p),
            *(f"{share:.0%}" for share in (one.win_rate, one.replicates_won)),
            "yes" if one.p < 0.05 else "no",
        ]
        for one in found
    ]
    heads = ["metric", "difference", "95 % from", "to", "p (Holm)", f"{units} won", "replicates won", "significant"]
    return Table(f"{labels[found[0].arm]} against {labels[reference]}", "", heads, rows)


def _points(found: Sequence[Gain], lists: bool) -> list[list[Gain]]:
    """Gains of one scenario, point and arm together."""
    some = [gain for gain in found if bool(gain.point) is lists]
    return [*grouped(some, lambda gain: (gain.scenario, *gain.point.items(), gain.label)).values()]


def _gains(several: Sequence[Gain]) -> list[str]:
    """Number of seeds, and the gain in each score."""
    by_score = {gain.score: gain.gain for gain in several}
    return [str(max(gain.seeds for gain in several)), *(score_cell(n, by_score.get(n)) for n in COMPARED)]


def _values(runs: Sequence[list[Row]]) -> dict[str, Interval | None]:
    return {name: value(name, runs) for name in COLUMNS}


def _left_out(runs: Sequence[list[Row]], sites: Sequence[str]) -> list[str]:
    pooled = [score_cell(name, value(name, runs)) for name in COMPARED]
    by_site = [[at_sites(rows, [site]) for rows in runs] for site in sites]
    return [*pooled, *(score_cell("cider", value("cider", rows)) for rows in by_site)]


def with_interval(
    interval: Interval | None, shown: Callable[[float], str], star: str = "", p: float | None = None
) -> str:
    """A value as ``shown`` writes it, and below it its interval, with p where there is one."""
    if interval is None or not math.isfinite(interval.value):
        return NOTHING
    tested = "" if p is None else f", p {number(p)}"
    return Markup("{}{}<small>{} to {}{}</small>").format(
        shown(interval.value), star, shown(interval.low), shown(interval.high), tested
    )


def score_cell(name: str, interval: Interval | None, star: str = "", p: float | None = None) -> str:
    """A score of the registry, as :func:`with_interval` writes it."""
    return with_interval(interval, partial(score, name), star, p)
