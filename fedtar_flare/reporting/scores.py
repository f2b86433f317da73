"""Scores as table rows: per site and step, before and after, and the mean over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import Cell, Evaluation
from fedtar_flare.reporting.format import total, visits, whole
from fedtar_flare.reporting.run import Run

MEAN = "mean of sites"


@dataclass(frozen=True, slots=True)
class Row:
    """Raw scores of one site at one step (None: all steps), no small cells; ``reports`` is their number as shown."""

    site: str
    step: int | None
    reports: str
    before: Mapping[str, float]
    after: Mapping[str, float]


def score_rows(run: Run, after: Evaluation | None, generic: bool = False) -> list[Row]:
    """Rows of all sites, each site's steps before the site as a whole; with several sites, their mean comes last.

    The rows go from the warm start to ``after``; ``generic`` takes the scores without the personal part.
    """
    both = [(one.generic if generic else one.sites) if one else {} for one in (run.warm_start, after)]
    min_cell = run.start.min_cell
    rows = []
    parts: list[int] = []
    scored = 0
    for site in sorted({site for sites in both for site in sites}):
        steps = sorted({t for sites in both if site in sites for t in sites[site].steps})
        pairs = {t: [sites[site].steps.get(t, {}) if site in sites else {} for sites in both] for t in steps}
        counts = {t: _reports(*pair) for t, pair in pairs.items()}
        rows += [Row(site, t, visits(counts[t], min_cell), *map(_scores, pair)) for t, pair in pairs.items()]
        every = [sites[site].all if site in sites else {} for sites in both]
        n = _reports(*every)
        own = list(counts.values()) or [n]
        rows.append(Row(site, None, _total(own, n, min_cell), *map(_scores, every)))
        parts += own
        scored += n
    return rows + _mean(rows, _total(parts, scored, min_cell))


def mean_row(rows: Sequence[Row]) -> Row | None:
    """The mean over sites among rows; None for fewer than two sites."""
    return rows[-1] if rows and rows[-1].site == MEAN else None


def _mean(rows: Sequence[Row], reports: str) -> list[Row]:
    """Mean of the sites' scores over all steps; where any site has both before and after, only such sites count."""
    sites = [row for row in rows if row.step is None]
    if len(sites) < 2:
        return []
    means: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for name in SCORES:
        both = [row for row in sites if name in row.before and name in row.after] or sites
        for mean, own in zip(means, ([r.before for r in both], [r.after for r in both]), strict=True):
            values = [scores[name] for scores in own if name in scores]
            if values:
                mean[name] = sum(values) / len(values)
    return [Row(MEAN, None, reports, *means)]


def measured(rows: Sequence[Row]) -> list[str]:
    """The scores that any row has, so that real data gets no empty column for finding F1."""
    return [name for name in SCORES if any(name in row.before or name in row.after for row in rows)]


def start_name(run: Run) -> str:
    """What the first evaluation is called: the warm start, or the round before a resumed run began."""
    return "warm start" if run.start.first_round == 1 else f"round {run.start.first_round - 1}"


def _reports(before: Cell, after: Cell) -> int:
    return int(after.get("n") or before.get("n") or 0)


def _total(parts: Sequence[int], scored: int, min_cell: int) -> str:
    """Over how many reports a score is taken, unless that tells of a small part by subtraction."""
    shown = [n for n in parts if n >= min_cell]
    return whole(scored) if parts and scored == sum(shown) else total(parts, min_cell)


def _scores(cell: Cell) -> dict[str, float]:
    return {name: value for name, value in cell.items() if name != "n" and value is not None}
