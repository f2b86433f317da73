"""The result of a run in a sentence, in about ten numbers, and as a box for the console."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtar_flare.core.text import plain
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.control import control_of, joined
from fedtar_flare.reporting.format import FEW, decimals, duration, heading, score
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import Row, averaged, key_scores, overall, score_rows, start_name
from fedtar_flare.reporting.section import Section, method_sections


def verdict(run: Run, sections: Sequence[Section] = ()) -> list[str]:
    """What the first :data:`MOST` numbers are of, and what else is known; of a classifier, by its ``sections``."""
    if not run.reports:
        of = dict.fromkeys(about for *_, about, _ in key_numbers(run, sections))
        return [f"{', '.join(of).capitalize()}."] if of else ["Nothing is known: no image was scored."]
    row, off = overall(run), overall(run, generic=True)
    if row is None:
        return ["Nothing is known of the reports: no test report was scored."]
    over = f"{row.reports} test reports, {_where(run)}"
    if run.shown is None:
        return [f"Nothing is known of training: only the {start_name(run)} was scored ({over})."]
    if not row.before:
        return [f"Only round {run.shown.round} was scored ({over}): no change is known."]
    lines = [f"From the {start_name(run)} to round {run.shown.round} ({over})."]
    if row.n < FEW:
        lines.append(f"{TOO_FEW.capitalize()}.")
    if control := control_of(run):
        lines.append(f"Alone: each hospital by itself ({control.site}).")
    elif joined(run):
        lines.append(f"Each hospital alone: {UNKNOWN}.")
    if off and off.after:
        known = (f"{SCORES[name].label} {score(name, off.after.get(name), off.n)}" for name in key_scores(off)[:MOST])
        lines.append(f"The shared adapter alone, as other hospitals get it, reaches {', '.join(known)}.")
    return lines + ([f"{run.checkpoint_note.capitalize()}."] if run.checkpoint_note else [])


def key_numbers(run: Run, sections: Sequence[Section] = ()) -> list[tuple[str, str, str, str]]:
    """About ten numbers: what it is, from the warm start to the round shown, better or worse, and alone; those of
    ``sections`` where images are classified.
    """
    if not run.reports:
        return [(label, *text.partition(", ")[::2], "") for section in sections for label, text in section.lines]
    row = overall(run)
    if row is None:
        return []
    control, numbers = control_of(run), []
    for name in key_scores(row):
        value = " → ".join(score(name, side.get(name), row.n) for side in (row.before, row.after))
        beside = f"alone {score(name, control.after.get(name), row.n)}" if control else ""
        numbers.append((heading(name), value, direction(name, row), beside))
    return [*numbers, ("Test reports", row.reports, _where(run), "")]


def direction(name: str, row: Row) -> str:
    """``better``, ``worse`` or ``unchanged`` as the numbers are shown; empty of few reports or of one number."""
    if row.n < FEW or name not in row.before or name not in row.after:
        return ""
    before, after = (round(side[name] * SCORES[name].scale, decimals(name, row.n)) for side in (row.before, row.after))
    if before == after:
        return "unchanged"
    return "better" if (after > before) is SCORES[name].higher_is_better else "worse"


def _where(run: Run) -> str:
    sites = [row.site for row in averaged(score_rows(run))]
    return f"mean of {len(sites)} sites" if len(sites) > 1 else sites[0]


TOO_FEW = f"fewer than {FEW} test reports: by chance alone scores move too much to call one better or worse"
MOST = 6
"""Rows of the table at the head of a page and of a model card."""
RULE = "-" * 78
UNKNOWN = "not known (fedtar report RUN --alone RUN_OF_LOCAL_PATIENT)"


def closing_box(run: Run, files: Mapping[str, Path | str] | None = None) -> str:
    """Summarise a run for the console, in ASCII except for names."""
    rows = [[_ascii(text) for text in row] for row in key_numbers(run, method_sections(run))]
    rows = rows or [[f"no test {'report' if run.reports else 'image'} was scored", "", "", ""]]
    arrows = max(row[1].find("->") for row in rows)  # the arrows stand under each other
    for row in rows:
        row[1] = " " * (arrows - row[1].find("->")) * ("->" in row[1]) + row[1]
    columns = zip(*([row for row in rows if row[3]] or rows), strict=True)
    widths = [max(map(len, column)) + 3 for column in columns]
    lines = ["".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if run.reports and run.warm_start and (mean := overall(run)) and mean.n < FEW:
        lines.append(TOO_FEW)
    if run.reports and run.shown and joined(run):
        control = control_of(run)
        lines.append(_ascii(f"each hospital alone: {control.site if control else UNKNOWN}"))
    width = max(map(len, files or {}), default=0) + 3
    lines += [f"{plain(name):<{width}}{file}" for name, file in (files or {}).items()]
    return "\n".join([RULE, *_head(run), *lines, RULE])


def _head(run: Run) -> list[str]:
    time = f" in {duration(run.end.seconds)}" if run.end and run.end.seconds is not None else ""
    reason = f": {plain(run.end.reason)}" if run.end and run.end.reason else ""
    done = f" after {len(run.validations)} of {run.start.rounds} round(s)" if run.status != "completed" else ""
    shown = f", {start_name(run)} -> round {run.shown.round}" if run.shown and run.warm_start else ""
    name = f"run {plain(run.start.run_id)}".strip()
    return [f"{name}: {run.status}{done}{time}{shown}{reason}", *([run.checkpoint_note] if run.checkpoint_note else [])]


def _ascii(text: str) -> str:
    for sign, word in ((" ↑", ""), (" ↓", ""), ("→", "->"), ("×", "x"), ("–", "-"), ("\u202f", " ")):
        text = text.replace(sign, word)
    return plain(text)
