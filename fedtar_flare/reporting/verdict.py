"""The result of a run, in a sentence and in about five numbers, for its page, its model card and the console."""

from collections.abc import Sequence

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import decimals, heading, number, score
from fedtar_flare.reporting.render import Tile
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import MEAN, Row, key_scores, overall, start_name
from fedtar_flare.reporting.section import Section


def verdict(run: Run, of_method: Sequence[Section] = ()) -> list[str]:
    """Which scores improved or fell and by how much, from the warm start to the round shown.

    Sentences on the shared adapter and on the round that is kept may follow. ``of_method`` are the method's sections,
    whose lines are the verdict where it classifies images.
    """
    if not run.reports:
        said = [(label, *text.rpartition(", ")[::2]) for section in of_method for label, text in section.lines]
        values, of = [f"{label} {value}" for label, value, _ in said], dict.fromkeys(about for *_, about in said)
        return [f"{'; '.join(values)} ({', '.join(of)})."] if said else ["Nothing is known: no image was scored."]
    row, off = overall(run), overall(run, generic=True)
    if row is None:
        return ["Nothing is known of the reports: no test report was scored."]
    if run.shown is None:
        return [f"Nothing is known of training: only the {start_name(run)} was scored ({_values(row)})."]
    if not row.before:
        return [f"Round {run.shown.round} has {_values(row)}; nothing was scored before, so the change is unknown."]
    over = f"{row.reports} test reports, {_where(row, run)}"
    return [
        f"From the {start_name(run)} to round {run.shown.round}, {_changes(row)}; {over}.",
        *([f"The shared adapter alone, as other hospitals get it: {_changes(off)}."] if off and off.before else []),
        *([f"{run.checkpoint_note.capitalize()}."] if run.checkpoint_note else []),
    ]


def key_numbers(run: Run, of_method: Sequence[Section] = ()) -> list[Tile]:
    """About five numbers from the warm start to the round shown; a method's own where it classifies images."""
    if not run.reports:
        return [Tile(label, *text.split(", ", 1)) for section in of_method for label, text in section.lines]
    row = overall(run)
    if row is None:
        return []
    tiles = [
        Tile(heading(name), " → ".join(score(name, side.get(name), row.n) for side in (row.before, row.after)), word)
        for name in key_scores(row)
        for word in [direction(name, row)]
    ]
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
    """``BLEU-4 improved by 9.7 points (71.6 → 81.3); known findings F1 fell by 9.5 points (94.4 → 84.9)``."""
    groups: dict[str, list[str]] = {"improved": [], "fell": [], "rose (worse)": [], "stayed": []}
    for name in [*key_scores(row), "contradictions"]:
        if not (way := direction(name, row)):
            continue
        before, after = (_rounded(name, side[name], row.n) for side in (row.before, row.after))
        worse = "fell" if after < before else "rose (worse)"
        verb = {"better": "improved", "unchanged": "stayed"}.get(way, worse)
        first, last, by = (number(value, decimals(name, row.n)) for value in (before, after, abs(after - before)))
        unit = "point" + "s" * (by != "1") if SCORES[name].unit == "x 100" else SCORES[name].unit
        said = f"at {last}" if before == after else f"by {by} {unit} ({first} → {last})"
        groups[verb].append(f"{SCORES[name].label} {said if groups[verb] else f'{verb} {said}'}")
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
