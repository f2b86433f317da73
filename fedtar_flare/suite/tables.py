"""Tables of the comparison, with a 95 % interval of each score, and its verdict in a sentence."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from fedtar_flare.metrics.registry import EFFICACY
from fedtar_flare.metrics.significance import Interval
from fedtar_flare.reporting.format import NOTHING, heading, number, p_value, score, shown
from fedtar_flare.suite.results import COMPARED, SUMS, Difference, Result, Row, by_arm, interval_of

WARM_START = "warm start"
COLUMNS = [n for n in SUMS if n not in EFFICACY or ("uncertain_positive" not in n and "_micro_" not in n)]
"""Scores of the tables of arms; all others are in those of every metric."""


@dataclass(frozen=True)
class Table:
    """A table as the page's template shows it, with a paragraph ``about`` it; cells are text or markup."""

    title: str
    about: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def arm_table(
    title: str,
    about: str,
    results: Sequence[Result],
    names: Collection[str],
    cell: Callable[[str, list[Result], str], str],
) -> Table:
    """The warm start, then each arm, by ``cell`` (score, runs, ``start`` or ``end``); no row or column is empty."""
    rows: list[dict[str, str]] = []
    for runs in by_arm(results).values():
        cells = {name: cell(name, runs, "end") for name in names}
        if any(text != NOTHING for text in cells.values()):
            if not rows:
                rows.append({"": WARM_START} | {name: cell(name, runs, "start") for name in names})
            rows.append({"": runs[0].label} | cells)
    columns = [name for name in names if any(row[name] != NOTHING for row in rows)]
    return Table(title, about, ["method", *map(heading, columns)], [[row[n] for n in ("", *columns)] for row in rows])


def scores(
    title: str,
    about: str,
    results: Sequence[Result],
    rows_of: Callable[[Result, str], list[Row]],
    tests: Sequence[Difference] = (),
) -> Table:
    """Scores over the reports of all hospitals; a star where ``tests`` has p below 0.05."""
    stars = {(test.arm, test.score): "∗" for test in tests if test.p < 0.05}

    def cell(name: str, runs: list[Result], when: str) -> str:
        star = stars.get((runs[0].arm, name), "") if when == "end" else ""
        return score_cell(name, interval_of(name, [rows_of(run, when) for run in runs]), star)

    return arm_table(title, about, results, COLUMNS, cell)


def difference_table(tests: Sequence[Difference], labels: Mapping[str, str], reference: str) -> Table:
    """Each arm minus the reference."""
    tested = {(test.arm, test.score): test for test in tests}
    columns = [n for n in COMPARED if any(test.score == n for test in tests)]
    rows = []
    for arm in dict.fromkeys(test.arm for test in tests):
        found = ((n, tested.get((arm, n))) for n in columns)
        rows.append([labels[arm], *(score_cell(n, of.difference, p=of.p) if of else NOTHING for n, of in found)])
    about = (
        "On the same test patients of the hospitals that took part, all together: mean over seeds, 95 % interval over "
        "patients and seeds (5,000 replicates), and p of a permutation of the two methods' results patient by patient, "
        "all seeds at once (Holm, for the methods). It is about these hospitals, and with one seed about one training."
    )
    heads = ["method", *(f"{heading(n).partition(', ')[0]}, points" for n in columns)]
    return Table(f"Difference to {labels[reference]}", about, heads, rows)


def metric_table(tests: Sequence[Difference], labels: Mapping[str, str], reference: str, units: str) -> Table:
    """One arm minus another in every score (FedTAR, Table 5)."""
    rows = []
    for test in tests:
        ends = (number(shown(test.score, part), 2) for part in test.difference)
        won = (NOTHING if math.isnan(share) else f"{share:.0%}" for share in (test.win_rate, test.replicates_won))
        beyond = "yes" if test.difference.low > 0 or test.difference.high < 0 else "no"
        rows.append([heading(test.score), *ends, p_value(test.p), *won, beyond])
    heads = ["metric", "difference", "95 % from", "to", "p (Holm)"]
    heads += [f"{units} won", "replicates won", "interval excludes 0"]
    one, other = labels[tests[0].arm], labels[reference]
    return Table(f"{one} against {other}", f"Difference: {one} minus {other}; won: by the first.", heads, rows)


def with_interval(
    interval: Interval | None, shown: Callable[[float], str], star: str = "", p: float | None = None
) -> str:
    """A value as ``shown`` writes it, and below it its interval, with p where there is one."""
    if interval is None or not math.isfinite(interval.value):
        return NOTHING
    tested = "" if p is None else f", p {p_value(p)}"
    return Markup("{}{}<small>{} to {}{}</small>").format(
        shown(interval.value), star, shown(interval.low), shown(interval.high), tested
    )


def interval_cell(interval: Interval) -> str:
    """A share or coefficient, as :func:`with_interval` writes it."""
    return with_interval(interval, partial(number, digits=2))


def score_cell(name: str, interval: Interval | None, star: str = "", p: float | None = None) -> str:
    """A score of the registry, as :func:`with_interval` writes it."""
    return with_interval(interval, partial(score, name), star, p)


def winner(means: Mapping[str, float], shown: Callable[[float], str]) -> str | None:
    """The first of the arms, the best first; None where the next is shown as equal, or there is none."""
    first, *others = means
    return first if others and shown(means[others[0]]) != shown(means[first]) else None


def verdict(
    what: str,
    means: Mapping[str, float],
    best: Interval | None,
    less: Mapping[str, tuple[Interval, float | None]],
    reference: str,
    labels: Mapping[str, str],
    shown: Callable[[float], str],
    unit: str = "",
) -> str:
    """``means`` are of the arms, the best first; ``less`` has their differences to the reference, each with its p."""
    order = [*means]
    text = f"{labels[order[0]]} has the best {what}"
    if len(order) == 1:
        text = f"{labels[order[0]]} is the only arm with results: {what}"
    elif winner(means, shown) is None:
        equal = [labels[name] for name in order if shown(means[name]) == shown(means[order[0]])]
        text = f"No method has the best {what}: {' and '.join(equal)} are equal"
    text += f", {shown(best.value)} (95 % interval {shown(best.low)} to {shown(best.high)})" if best else ""
    arm = next((name for name in order[: 1 if order[0] != reference else None] if name in less), None)
    if arm is None:
        return f"{text}."
    gap, p = less[arm]
    p = p if p is not None and math.isfinite(p) else None
    beyond = (gap.low > 0 or gap.high < 0) and (p is None or p < 0.05)  # the interval and the p both say so
    whose = f"the difference of {labels[arm]}" if arm == order[0] else f"next is {labels[arm]}, whose difference"
    inside = f"{shown(gap.low)} to {shown(gap.high)}{'' if p is None else f', p {p_value(p)}'}"
    chance = "beyond chance" if beyond else "not beyond chance"
    return f"{text}; {whose} to {labels[reference]} is {shown(gap.value)}{unit} ({inside}): {chance}."
