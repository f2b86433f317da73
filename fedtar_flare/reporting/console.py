"""The closing box of a run as plain text: about five numbers, and the files to look at."""

from collections.abc import Mapping
from pathlib import Path

from fedtar_flare.core.errors import plain
from fedtar_flare.reporting.format import duration
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import start_name
from fedtar_flare.reporting.section import method_sections
from fedtar_flare.reporting.verdict import key_numbers

RULE = "-" * 78


def closing_box(run: Run, files: Mapping[str, Path | str] | None = None) -> str:
    """Summarise a run for the console, in ASCII except for names."""
    tiles = key_numbers(run, method_sections(run))
    rows = [[_ascii(text) for text in (tile.name, tile.value, tile.about)] for tile in tiles]
    rows = rows or [[f"no test {'report' if run.reports else 'image'} was scored", "", ""]]
    names = max(len(name) for name, *_ in rows) + 3
    arrows = max(value.find("->") for _, value, _ in rows)  # the arrows stand under each other
    values = [value.rjust(len(value) + arrows - value.find("->")) if "->" in value else value for _, value, _ in rows]
    wide = max(map(len, values)) + 3
    lines = [f"{row[0]:<{names}}{value:<{wide}}{row[2]}".rstrip() for row, value in zip(rows, values, strict=True)]
    return "\n".join([RULE, *_head(run), *lines, *_listed(files or {}), RULE])


def _head(run: Run) -> list[str]:
    time = f" in {duration(run.end.seconds)}" if run.end and run.end.seconds is not None else ""
    reason = f": {plain(run.end.reason)}" if run.end and run.end.reason else ""
    done = f" after {len(run.validations)} of {run.start.rounds} round(s)" if run.status != "completed" else ""
    shown = f", {start_name(run)} -> round {run.shown.round}" if run.shown and run.warm_start else ""
    name = f"run {plain(run.start.run_id)}".strip()
    return [f"{name}: {run.status}{done}{time}{shown}{reason}", *([run.checkpoint_note] if run.checkpoint_note else [])]


def _listed(files: Mapping[str, Path | str]) -> list[str]:
    width = max(map(len, files), default=0) + 3
    return [f"{plain(name):<{width}}{file}" for name, file in files.items()]


def _ascii(text: str) -> str:
    for sign, word in ((" ↑", ""), (" ↓", ""), ("→", "->"), ("×", "x"), ("–", "-"), ("\u202f", " ")):
        text = text.replace(sign, word)
    return plain(text)
