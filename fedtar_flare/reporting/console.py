"""The closing table of a run as plain text."""

from __future__ import annotations

from collections.abc import Mapping

from fedtar_flare.reporting.format import duration, plain, score
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import Row, mean_row, measured, score_rows, start_name


def final_table(run: Run) -> str:
    """Per site and time step: number of test reports, and each score from the warm start to the last evaluation.

    Plain ASCII but for the sites' own names. A cell with too few reports stays blank; ``-`` is a value that is not
    known. Without any evaluation, and for a run that did not complete, a sentence says so.
    """
    lines = [] if run.status == "completed" else [_status(run)]
    rows = score_rows(run, run.final)
    if not rows:
        return "\n".join([*lines, "No scores: the run has no evaluation."])
    mean = mean_row(rows)
    rows += [mean] if mean else []
    last = f"round {run.final.round}" if run.final else "no round evaluated yet"
    time = f" in {duration(run.seconds)}" if run.seconds is not None else ""
    lines.append(f"Scores of test reports, {start_name(run)} -> {last}{time}. All scores but token loss are x 100.")
    columns = [
        _column("site", [plain(row.site) for row in rows], left=True),
        _column("step", ["all" if row.step is None else str(row.step) for row in rows]),
        _column("n", [str(row.n) for row in rows]),
        *(_column(label, _arrows(name, rows)) for name, label in measured(rows).items()),
    ]
    return "\n".join([*lines, *("   ".join(parts).rstrip() for parts in zip(*columns, strict=True))])


def _status(run: Run) -> str:
    reason = f": {plain(run.reason)}" if run.reason else ""
    return f"The run is {plain(run.status)} after {len(run.outers)} of {run.rounds} round(s){reason}"


def _column(head: str, cells: list[str], left: bool = False) -> list[str]:
    width = max(map(len, [head, *cells]))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in [head, *cells]]


def _arrows(name: str, rows: list[Row]) -> list[str]:
    """``before -> after`` of one score, the arrows under each other."""
    before = [_value(name, row.before) for row in rows]
    after = [_value(name, row.after) for row in rows]
    wide = [max(map(len, side)) for side in (before, after)]
    return [
        f"{b.rjust(wide[0])} -> {a.rjust(wide[1])}" if row.before or row.after else " " * (sum(wide) + 4)
        for row, b, a in zip(rows, before, after, strict=True)
    ]


def _value(name: str, scores: Mapping[str, float]) -> str:
    return score(name, scores[name]) if name in scores else "-"
