"""Scores of test reports: a table from the warm start to the last evaluation, and charts over rounds."""

from __future__ import annotations

from markupsafe import Markup

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import Evaluation
from fedtar_flare.reporting.format import scaling, score, shown
from fedtar_flare.reporting.plots import Series, legend_of, line_chart
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import Row, measured, score_rows, start_name
from fedtar_flare.reporting.section import Section, charts, round_axis


def scores(run: Run) -> Section:
    """With the personal part on and, where that was scored, off."""
    rows = score_rows(run, run.final)
    off = score_rows(run, run.final, generic=True)
    return Section("scores", "Scores", _lead(run, rows), _table(rows, off) + _curves(run))


def _lead(run: Run, rows: list[Row]) -> str:
    until = f" to round {run.final.round}" if run.final else ", before training"
    scale = scaling(measured(rows))
    blank = (
        f"Cells with fewer than {run.start.min_cell} reports are left blank"
        if run.start.min_cell > 1
        else "It is 0 by definition for one report, and then left blank"
    )
    return (
        f"Test patients, from the {start_name(run)}{until}; n is the number of reports. "
        f"{scale + ' ' if scale else ''}"
        "CIDEr depends on the corpus that it is taken over: compare it along a line, not between sites. "
        f"{blank}."
    )


def _table(rows: list[Row], off: list[Row]) -> Markup:
    tables = [("With the personal part" if off else "", rows), ("Without the personal part", off)]
    return render(
        "scores.html",
        tables=[(title, rows, measured(rows)) for title, rows in tables if rows],
        labels={name: one.label for name, one in SCORES.items()},
    )


def _curves(run: Run) -> Markup:
    """Per score, a small chart for each site with a line per step."""
    parts = []
    sites = sorted({site for one in run.evaluations for site in one.sites})
    for name in (name for name, one in SCORES.items() if one.curve):
        lines = [_lines(run, site, name) for site in sites]
        known = [y for of_site in lines for line in of_site for _, y, _ in line.points if y is not None]
        if not known:
            continue
        label = SCORES[name].label
        figures = [
            line_chart(
                site,
                of_site,
                x_label="round",
                y_label=label,
                x_range=round_axis(run),
                y_range=(0.0, 1.06 * max(known) or 1.0),
                legend=False,
                size=(270, 170),
            )
            for site, of_site in zip(sites, lines, strict=True)
        ]
        title = f"{label} × 100" if SCORES[name].scale == 100 else label
        parts.append(Markup("<h3>{}</h3>").format(title) + legend_of(lines[-1]) + charts(figures, "small"))
    return Markup("").join(parts)


def _lines(run: Run, site: str, name: str) -> list[Series]:
    def line(label: str, step: int | None, generic: bool = False) -> Series:
        points = []
        for one in run.evaluations:
            value = _value(one, site, step, name, generic)
            points.append((one.round, shown(name, value), f"{site}, {label}, round {one.round}: {score(name, value)}"))
        if generic:
            return Series(label, points, "site", 6)
        return Series(label, points, "ink" if step is None else "step", 0 if step is None else step - 1)

    steps = [line(f"step {t}", t) for t in range(1, run.start.time_steps + 1)]
    off = [line("all steps, without the personal part", None, True)] if any(e.generic for e in run.evaluations) else []
    return [*steps, line("all steps", None), *off]


def _value(evaluation: Evaluation, site: str, step: int | None, name: str, generic: bool) -> float | None:
    found = (evaluation.generic if generic else evaluation.sites).get(site)
    if found is None:
        return None
    return (found.all if step is None else found.steps.get(step, {})).get(name)
