"""Scores as rows of a table: per site and step, before and after, with their mean over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.run import Cell, Evaluation, Run

MEAN = "mean of sites"


@dataclass(frozen=True, slots=True)
class Row:
    """Scores of one site at one step (None: over all steps), raw.

    Args:
        n: test reports.
        before, after: score name to value; a small cell and what is not known are not in it.
    """

    site: str
    step: int | None
    n: int
    before: Mapping[str, float]
    after: Mapping[str, float]


def score_rows(run: Run, after: Evaluation | None) -> list[Row]:
    """Rows of all sites from the warm start to ``after``, each site's steps first, then the site as a whole."""
    evaluations = [run.warm_start, after]
    rows = []
    for site in sorted({site for one in evaluations if one for site in one.sites}):
        steps = {t for one in evaluations if one and site in one.sites for t in one.sites[site].steps}
        for step in [*sorted(steps), None]:
            before, latest = (_cell(one, site, step) for one in evaluations)
            rows.append(Row(site, step, latest.n or before.n, before.scores, latest.scores))
    return rows


def mean_row(rows: list[Row]) -> Row | None:
    """Mean over the sites of each site's own score over all steps; None for fewer than two sites.

    A score counts the sites that have it before and after, if any site has both: the means then tell of the same sites.
    """
    sites = [row for row in rows if row.step is None]
    if len(sites) < 2:
        return None
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    for name in SCORES:
        both = [row for row in sites if name in row.before and name in row.after]
        for mean, own in ((before, [r.before for r in both or sites]), (after, [r.after for r in both or sites])):
            values = [scores[name] for scores in own if name in scores]
            if values:
                mean[name] = sum(values) / len(values)
    return Row(MEAN, None, sum(row.n for row in sites), before, after)


def measured(rows: Sequence[Row]) -> dict[str, str]:
    """The scores that any row has, name to label: real data has no finding F1, and no empty column for it."""
    return {name: s.label for name, s in SCORES.items() if any(name in r.before or name in r.after for r in rows)}


def start_name(run: Run) -> str:
    """What the first evaluation is called: the warm start, or the round a resumed run began after."""
    return "warm start" if run.first_round == 1 else f"round {run.first_round - 1}"


def _cell(evaluation: Evaluation | None, site: str, step: int | None) -> Cell:
    scores = evaluation.sites.get(site) if evaluation else None
    found = (scores.all if step is None else scores.steps.get(step)) if scores else None
    return found or Cell(0, {})
