"""Tables of the comparison: rows are methods, columns are scores, each with its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval
from fedtar_flare.reporting.format import NOTHING, number, score
from fedtar_flare.suite.against import COMPARED, SUMS, Difference, value
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.joining import Gain, case_gains
from fedtar_flare.suite.results import Done, Row

WARM_START = "warm start"


@dataclass(frozen=True)
class Table:
    """As the template shows it; cells are text or markup."""

    title: str
    about: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def head(names: Iterable[str]) -> list[str]:
    """Column heads of a table of scores; an arrow says which way is better."""
    return ["method", *(f"{SCORES[n].label} {'↑' if SCORES[n].higher_is_better else '↓'}" for n in names)]


def scores(
    title: str,
    about: str,
    results: Sequence[Done],
    rows_of: Callable[[Done, str], list[Row]],
    against: Sequence[Difference] = (),
) -> Table:
    """The warm start and then each arm, over all hospitals' patients together.

    ``rows_of`` gives the reports of a run ``start`` or ``end``; an arm that has none is left out. Where a score differs
    from the reference's (``against``), a star stands beside it.
    """
    by_arm = _by_arm(results)
    stars = {(one.arm, one.score): "∗" for one in against if one.p < 0.05}
    lines: list[dict[str, Interval | None]] = []
    names: list[tuple[str, str]] = []
    for arm, runs in by_arm.items():
        ends = [rows_of(one, "end") for one in runs]
        if not any(ends):
            continue
        if not lines:
            lines.append(_values([rows_of(one, "start") for one in runs]))
            names.append(("", WARM_START))
        lines.append(_values(ends))
        names.append((arm, runs[0].result["label"]))
    columns = [name for name in SUMS if any(line.get(name) for line in lines)]
    rows = [
        [label, *(_cell(name, line.get(name), stars.get((arm, name), "")) for name in columns)]
        for (arm, label), line in zip(names, lines, strict=True)
    ]
    return Table(title, about, head(columns), rows)


def left_out(results: Sequence[Done], suite: Suite) -> Table:
    """What the shared adapter gives a hospital that was left out, beside what the reference gives it as a member."""
    sites = list(suite.sites)
    turns = [one for one in results if "left_out" in one.cell.variant.values]
    columns = [*COMPARED, *(f"CIDEr at {site}" for site in sites)]
    lines: list[list[str]] = []
    for runs in _by_arm(turns).values():
        for when in ("start", "end") if not lines else ("end",):
            by_seed: dict[int, list[Row]] = {}
            for one in runs:
                out = one.cell.variant.values["left_out"]
                by_seed.setdefault(one.cell.seed, []).extend(r for r in one.outside(when) if r["site"] == out)
            lines.append([WARM_START if when == "start" else runs[0].result["label"], *_left_out(by_seed, sites)])
    alone = {one.cell.seed: one.members() for one in results if _is_own(one) and one.cell.name == suite.compared_with}
    if lines and alone:
        label = next(o for o in results if o.cell.name == suite.compared_with).result["label"]
        lines.append([f"{label}, as a member", *_left_out(alone, sites)])
    about = (
        "Each hospital in turn stayed outside; the shared adapter alone was scored there, on test patients of all "
        "hospitals together in the first columns."
    )
    heads = ["method", *(SCORES[c].label if c in SCORES else c for c in columns)]
    return Table("Leave one hospital out", about, heads, lines)


def cases(found: Sequence[Gain], suite: Suite, alone: str) -> Table:
    """Gains at the hospital that each case is about."""
    rows = [
        [f"{case['label']}: {label}", *_gains(by_score)]
        for key, case in suite.cases.items()
        for label, by_score in case_gains(found, key).items()
    ]
    about = (
        f"Gain over '{alone}' at that hospital, with 95 % intervals over patients and seeds. A hospital that joins "
        "late begins late alone, too, so that both make the same number of updates."
    )
    return Table(
        "A small hospital, and one that joins late",
        about,
        ["case", "seeds", *(SCORES[n].label for n in COMPARED)],
        rows,
    )


def grid(found: Sequence[Gain], suite: Suite) -> Table:
    """Gains at all points of the grid, the numbers of the figure."""
    rows = [
        [label, *(str(value) for value in values), *_gains(by_score)]
        for (values, label), by_score in _by_point(found, suite).items()
    ]
    names = {"patients": "patients per hospital", "hospitals": "hospitals", "own_words": "own words"}
    heads = ["method", *(names[key] for key in suite.grid), "seeds", *(f"gain in {SCORES[n].label}" for n in COMPARED)]
    return Table("Gains in numbers", "", heads, rows)


def _by_point(found: Sequence[Gain], suite: Suite) -> Mapping[tuple[tuple[object, ...], str], dict[str, Gain]]:
    rows: dict[tuple[tuple[object, ...], str], dict[str, Gain]] = {}
    for gain in found:
        if "case" not in gain.values:
            rows.setdefault((tuple(gain.values[k] for k in suite.grid), gain.label), {})[gain.score] = gain
    return rows


def _gains(by_score: Mapping[str, Gain]) -> list[str]:
    """Number of seeds, and the gain in each score."""
    seeds = max(gain.seeds for gain in by_score.values())
    return [str(seeds), *(_cell(n, by_score[n].gain if n in by_score else None) for n in COMPARED)]


def _by_arm(results: Sequence[Done]) -> dict[str, list[Done]]:
    found: dict[str, list[Done]] = {}
    for one in results:
        found.setdefault(one.cell.name, []).append(one)
    return found


def _is_own(one: Done) -> bool:
    return not one.cell.variant.values


def _values(runs: Sequence[list[Row]]) -> dict[str, Interval | None]:
    return {name: value(name, runs) for name in SUMS}


def _left_out(by_seed: Mapping[int, list[Row]], sites: Sequence[str]) -> list[str]:
    runs = list(by_seed.values())
    pooled = [_cell(name, value(name, runs)) for name in COMPARED]
    each = [_cell("cider", value("cider", [[r for r in rows if r["site"] == site] for rows in runs])) for site in sites]
    return [*pooled, *each]


def _cell(name: str, interval: Interval | None, star: str = "") -> str:
    """A value and below it its interval."""
    if interval is None or not math.isfinite(interval.value):
        return NOTHING
    middle, low, high = (score(name, part) for part in interval)
    return Markup("{}{}<small>{} to {}</small>").format(middle, star, low, high)


def differences(against: Sequence[Difference], labels: Mapping[str, str], reference: str) -> Table:
    """Each arm less the reference."""
    by_arm: dict[str, dict[str, Difference]] = {}
    for one in against:
        by_arm.setdefault(one.arm, {})[one.score] = one
    rows = [[labels[arm], *(_difference(by_score.get(n)) for n in COMPARED)] for arm, by_score in by_arm.items()]
    about = (
        "On the same test patients of the hospitals that took part, all hospitals together: mean over seeds, 95 % "
        "interval over patients and seeds (5,000 replicates), and p of a permutation of the two methods' results "
        "patient by patient, corrected after Holm for the number of methods. A p is about these hospitals; with one "
        "seed it says nothing of another training."
    )
    return Table(f"Difference to {labels[reference]}", about, ["method", *(SCORES[n].label for n in COMPARED)], rows)


def _difference(one: Difference | None) -> str:
    if one is None:
        return NOTHING
    value, low, high = (score(one.score, part) for part in one.difference)
    return Markup("{}<small>{} to {}, p {}</small>").format(value, low, high, number(one.p))
