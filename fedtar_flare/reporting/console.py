"""The closing table of a run as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import duration, plain, scaling, score
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import Row, measured, score_rows, start_name
from fedtar_flare.reporting.section import own_sections

ACROSS = 4
"""Scores in one table: more would not fit a terminal."""


def final_table(run: Run) -> str:
    """Per site and time step: number of test reports, and each score from the warm start to the last evaluation.

    Cells with too few reports are blank; ``-`` is an unknown value. Scores of the shared adapter alone and the lines of
    the method's own sections follow.
    """
    parts = [] if run.status == "completed" else [_status(run)]
    own = [f"{plain(label)}: {plain(text)}" for section in own_sections(run) for label, text in section.lines]
    rows = score_rows(run, run.final)
    if not rows:
        return "\n".join([*parts, *(own if own and not run.reports else ["No scores: the run has no evaluation."])])
    last = f"round {run.final.round}" if run.final else "no round evaluated yet"
    time = f" in {duration(run.end.seconds)}" if run.end and run.end.seconds is not None else ""
    scale = scaling(measured(rows)).replace("×", "x")
    parts.append(f"Scores of test reports, {start_name(run)} -> {last}{time}.{f' {scale}' if scale else ''}")
    parts += _tables(rows)
    if off := score_rows(run, run.final, generic=True):
        parts += ["The shared adapter alone:", *_tables(off)]
    return "\n".join([*parts, *own])


def _status(run: Run) -> str:
    reason = f": {plain(run.end.reason)}" if run.end and run.end.reason else ""
    return f"The run is {run.status} after {len(run.validations)} of {run.start.rounds} round(s){reason}"


def _tables(rows: Sequence[Row]) -> list[str]:
    """All scores, a few of them to a table; some are not given by step."""
    lines = []
    for by_step, shown in ((True, rows), (False, [row for row in rows if row.step is None])):
        names = [name for name in measured(rows) if SCORES[name].by_step is by_step]
        for i in range(0, len(names), ACROSS):
            lines += _table(shown, names[i : i + ACROSS])
    return lines or _table(rows, ())


def _table(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    columns = [
        _column("site", [plain(row.site) for row in rows], left=True),
        _column("step", ["all" if row.step is None else str(row.step) for row in rows]),
        _column("n", [row.reports for row in rows]),
        *(_column(SCORES[name].label, _arrows(name, rows)) for name in names),
    ]
    return ["   ".join(parts).rstrip() for parts in zip(*columns, strict=True)]


def _column(head: str, cells: list[str], left: bool = False) -> list[str]:
    width = max(map(len, [head, *cells]))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in [head, *cells]]


def _arrows(name: str, rows: Sequence[Row]) -> list[str]:
    """``before -> after`` of one score, with aligned arrows."""
    before, after = (
        [score(name, one[name]) if name in one else "-" for one in side]
        for side in ([row.before for row in rows], [row.after for row in rows])
    )
    wide = [max(map(len, side)) for side in (before, after)]
    return [
        f"{b.rjust(wide[0])} -> {a.rjust(wide[1])}" if row.before or row.after else " " * (sum(wide) + 4)
        for row, b, a in zip(rows, before, after, strict=True)
    ]
