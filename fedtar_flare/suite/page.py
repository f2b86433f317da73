"""``comparison.html``: a suite's arms side by side, one self-contained page; its figures also as SVG and PNG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedtar_flare.files import write_text
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import NOTHING, duration, scaling, score, size
from fedtar_flare.reporting.render import render
from fedtar_flare.suite import tables
from fedtar_flare.suite.against import SUMS, differences
from fedtar_flare.suite.charts import figures
from fedtar_flare.suite.figures import can_draw, draw
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.joining import gains, joining_figures
from fedtar_flare.suite.plan import Cell
from fedtar_flare.suite.results import Done, done
from fedtar_flare.suite.run import RESULTS
from fedtar_flare.suite.summary import WHERE, Summary, summaries
from fedtar_flare.suite.tables import Table, head
from fedtar_flare.suite.task_page import task_page
from fedtar_flare.suite.texts import read_texts

PAGE, FIGURES = "comparison.html", "figures"


def write_page(folder: Path, suite: Suite, cells: Sequence[Cell]) -> Path | None:
    """Write the page of the runs that have results, and ``figures/``; returns its path, None without any result."""
    results = done(folder, cells)
    if not results:
        return None
    content = page(folder, suite, results) if cells[0].writes_reports else task_page(folder / FIGURES, suite, results)
    return write_text(folder / PAGE, content)


def page(folder: Path, suite: Suite, results: Sequence[Done]) -> str:
    """The page as well-formed HTML. Nothing is fetched when it is opened."""
    own = [one for one in results if not one.cell.variant.values]
    arms = summaries(own)
    found = gains(results, suite)
    texts = next((t for one in results if (t := read_texts(folder / RESULTS, one.cell)) is not None), None)
    wanted = figures(own, arms, suite.compared_with, texts) if own else []
    joining = joining_figures(found, suite)
    labels = {one.cell.name: one.result["label"] for one in results}
    shown = {figure.name: draw(figure, folder / FIGURES) for figure in (*joining, *wanted)} if can_draw() else {}
    joined = [shown.pop(figure.name) for figure in joining if figure.name in shown]
    main = _main(own, suite, labels) if own else []
    reference = labels.get(suite.compared_with, suite.compared_with)
    return render(
        "comparison.html",
        suite=suite,
        runs=len(results),
        arms=len(labels),
        seeds=len({one.cell.seed for one in results}),
        drawn=can_draw(),
        joining=joined,
        cases=tables.cases(found, suite, reference),
        grid=tables.grid(found, suite),
        tables=[table for table in (*main, tables.left_out(results, suite)) if table.rows],
        figures=list(shown.values()),
        scaling=scaling(list(SUMS)),
        every=_every(arms),
        rounds=_rounds(arms),
        reference=reference,
        costs=[
            [arm.label, str(len(arm.seeds)), duration(arm.seconds), size(arm.bytes) if arm.bytes else NOTHING]
            for arm in arms
        ],
        versions=results[0].result["versions"],
        time_steps=1,
    )


def _main(own: Sequence[Done], suite: Suite, labels: dict[str, str]) -> list[Table]:
    """In the paper's shape: at the hospitals that took part, with and without the personal part, and outside."""
    against = {name: differences(own, name) for name in suite.references}
    about = {
        "members": "With each hospital's personal part where the method has one.",
        "generic": "What a method's shared adapter knows by itself, without any personal part.",
        "outside": "Hospitals that never took part and get the shared adapter of the same round.",
    }
    starred = against[suite.compared_with]
    made = [
        tables.scores(WHERE["members"], about["members"], own, lambda one, when: one.members(when), starred),
        tables.scores(WHERE["generic"], about["generic"], own, lambda one, when: one.generic(when)),
        tables.scores(WHERE["outside"], about["outside"], own, lambda one, when: one.outside(when)),
    ]
    made[1:1] = [tables.differences(found, labels, name) for name, found in against.items() if found]
    return made


def _every(arms: Sequence[Summary]) -> list[Table]:
    """All scores, as means over hospitals."""
    names = [name for name in SCORES if any(name in arm.after[where] for arm in arms for where in WHERE)]
    return [
        Table(title, "", head(names), lines) for where, title in WHERE.items() if (lines := rows(arms, where, names))
    ]


def rows(arms: Sequence[Summary], where: str, names: Sequence[str]) -> list[list[str]]:
    """The warm start and then each arm, as mean and, over several seeds, standard deviation."""
    measured = [arm for arm in arms if arm.after[where]]
    if not measured:
        return []
    first = measured[0].before[where]
    start = [tables.WARM_START, *(score(n, sum(first[n]) / len(first[n]) if n in first else None) for n in names)]
    return [start, *([arm.label, *(_value(arm, where, name) for name in names)] for arm in measured)]


def _value(arm: Summary, where: str, name: str) -> str:
    mean, spread = arm.mean(where, name), arm.spread(where, name)
    return score(name, mean) + (f" ± {score(name, spread)}" if spread is not None else "")


def _rounds(arms: Sequence[Summary]) -> str:
    """Which round each arm was scored at, seed by seed; those of most runs are said once."""
    if not (scored := Counter(round_ for arm in arms for round_ in arm.scored)):
        return ""
    usual, _ = scored.most_common(1)[0]
    others = [f"{arm.label} {', '.join(map(str, arm.scored))}" for arm in arms if set(arm.scored) != {usual}]
    return f"Round {usual} in every run" + (f", but for (seed by seed) {'; '.join(others)}." if others else ".")
