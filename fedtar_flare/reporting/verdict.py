"""The result of a run in a sentence, in about ten numbers, and as a box for the console."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from fedtar_flare.core.text import plain
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.control import control_of, joined
from fedtar_flare.reporting.format import decimals, duration, heading, number, score
from fedtar_flare.reporting.render import Tile
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import MEAN, SEEN, Row, key_scores, overall, start_name
from fedtar_flare.reporting.section import Section, method_sections


def verdict(run: Run, sections: Sequence[Section] = ()) -> list[str]:
    """Which scores improved or fell and by how much, from the warm start to the round shown; of a classifier, its
    ``sections``' lines.
    """
    if not run.reports:
        parts = [(label, *text.rpartition(", ")[::2]) for section in sections for label, text in section.lines]
        values = [f"{label} {value}" for label, value, _ in parts]
        of = dict.fromkeys(about for *_, about in parts)
        return [f"{'; '.join(values)} ({', '.join(of)})."] if parts else ["Nothing is known: no image was scored."]
    row, off = overall(run), overall(run, generic=True)
    if row is None:
        return ["Nothing is known of the reports: no test report was scored."]
    if run.shown is None:
        return [f"Nothing is known of training: only the {start_name(run)} was scored ({_values(row)})."]
    if not row.before:
        return [f"Round {run.shown.round} has {_values(row)}; nothing was scored before, so the change is unknown."]
    over = f"{row.reports} test reports, {_where(row, run)}"
    lines = [f"From the {start_name(run)} to round {run.shown.round}, {_changes(row)}; {over}."]
    if control := control_of(run):
        lines.append(f"Each hospital alone reaches {_values(control)} ({control.site}).")
    if off and off.before:
        lines.append(f"The shared adapter alone, as other hospitals get it: {_changes(off)}.")
    return lines + ([f"{run.checkpoint_note.capitalize()}."] if run.checkpoint_note else [])


def key_numbers(run: Run, sections: Sequence[Section] = ()) -> list[Tile]:
    """About ten numbers from the warm start to the round shown; those of ``sections`` where images are classified."""
    if not run.reports:
        return [Tile(label, *text.split(", ", 1)) for section in sections for label, text in section.lines]
    row = overall(run)
    if row is None:
        return []
    control, tiles = control_of(run), []
    for name in key_scores(row):
        value = " → ".join(score(name, side.get(name), row.n) for side in (row.before, row.after))
        beside = f"alone {score(name, control.after.get(name), row.n)}" if control else ""
        tiles.append(Tile(heading(name), value, direction(name, row), beside))
    return [*tiles, Tile("Test reports", row.reports, _where(row, run))]


def direction(name: str, row: Row) -> str:
    """``better``, ``worse`` or ``unchanged`` as the numbers are shown; empty where one of them is unknown."""
    if name not in row.before or name not in row.after:
        return ""
    before, after = (_rounded(name, side[name], row.n) for side in (row.before, row.after))
    if before == after:
        return "unchanged"
    return "better" if (after > before) is SCORES[name].higher_is_better else "worse"


def _changes(row: Row) -> str:
    """``degree right fell by 9.5 points (94.4 → 84.9); BLEU-4 improved by 9.7 points (71.6 → 81.3)``: degree first."""
    verbs = product((True, False), ("improved", "fell", "rose (worse)", "stayed", "reached"))
    groups: dict[tuple[bool, str], list[str]] = {key: [] for key in verbs}
    for name in key_scores(row):
        if not (way := direction(name, row)):
            if name in row.after:  # the warm start claimed no change, say
                label, value = SCORES[name].label, score(name, row.after[name], row.n)
                groups[name in SEEN, "reached"].append(f"{label} reached {value}, not known before")
            continue
        before, after = (_rounded(name, side[name], row.n) for side in (row.before, row.after))
        worse = "fell" if after < before else "rose (worse)"
        verb = {"better": "improved", "unchanged": "stayed"}.get(way, worse)
        first, last, by = (number(value, decimals(name, row.n)) for value in (before, after, abs(after - before)))
        unit = "point" + "s" * (by != "1") if SCORES[name].scale == 100 else SCORES[name].unit
        change = f"at {last}" if before == after else f"by {by} {unit} ({first} → {last})"
        group = groups[name in SEEN, verb]
        group.append(f"{SCORES[name].label} {change if group else f'{verb} {change}'}")
    return "; ".join(_listed(group) for group in groups.values() if group) or "no score is known of both"


def _values(row: Row) -> str:
    side = row.after or row.before
    return ", ".join(f"{SCORES[name].label} {score(name, side.get(name), row.n)}" for name in key_scores(row))


def _where(row: Row, run: Run) -> str:
    return f"mean of {len(run.shown.sites if run.shown else ())} sites" if row.site == MEAN else row.site


def _rounded(name: str, value: float, n: float) -> float:
    return round(value * SCORES[name].scale, decimals(name, n))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


RULE = "-" * 78
UNKNOWN = "not known (fedtar report RUN --alone RUN_OF_LOCAL_PATIENT)"


def closing_box(run: Run, files: Mapping[str, Path | str] | None = None) -> str:
    """Summarise a run for the console, in ASCII except for names."""
    tiles = key_numbers(run, method_sections(run))
    rows = [[*map(_ascii, (tile.name, tile.value, tile.about, tile.beside))] for tile in tiles]
    rows = rows or [[f"no test {'report' if run.reports else 'image'} was scored", "", "", ""]]
    arrows = max(row[1].find("->") for row in rows)  # the arrows stand under each other
    for row in rows:
        row[1] = " " * (arrows - row[1].find("->")) * ("->" in row[1]) + row[1]
    columns = zip(*([row for row in rows if row[3]] or rows), strict=True)
    widths = [max(map(len, column)) + 3 for column in columns]
    lines = ["".join(map(str.ljust, row, widths)).rstrip() for row in rows]
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
