"""``comparison.html``: a suite's arms side by side, one self-contained page; its figures also as SVG files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtar_flare.core.files import write_text
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import NOTHING, duration, score, size
from fedtar_flare.reporting.plots import Figure
from fedtar_flare.reporting.render import render
from fedtar_flare.suite import tables
from fedtar_flare.suite.against import Difference, Units, both, differences, every_metric
from fedtar_flare.suite.arrival import of_periods, period_figures, period_table
from fedtar_flare.suite.charts import figures
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.joining import gains, joining_figures
from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.results import Done, by_arm, done
from fedtar_flare.suite.summary import WHERE, Summary, summaries
from fedtar_flare.suite.tables import Table, head
from fedtar_flare.suite.task_page import task_page
from fedtar_flare.suite.verdict import MAIN, families, of_gains, of_reports, ranked

PAGE, FIGURES = "comparison.html", "figures"


def write_page(folder: Path, suite: Suite, experiments: Sequence[Experiment]) -> Path | None:
    """Write the page of those of the suite's runs that have results, and ``figures/``; None without any result."""
    results = done(folder, experiments)
    if not results:
        return None
    content, drawn = (page if experiments[0].writes_reports else task_page)(suite, results)
    for figure in drawn:
        figure.write(folder / FIGURES)
    return write_text(folder / PAGE, content)


def page(suite: Suite, results: Sequence[Done]) -> tuple[str, list[Figure]]:
    """The page as well-formed HTML, and its figures. Nothing is fetched when it is opened."""
    own = ranked([one for one in results if not one.experiment.variant.scenario])
    arms = summaries(own)
    first = suite.compared_with[0]
    found = gains(results, first)
    labels = {one.experiment.name: one.result["label"] for one in results}
    reference = labels.get(first, first)
    alone = not any(one.result["shares"] for one in results if one.experiment.name == first)
    joining, shown = joining_figures(found, reference), figures(own, arms, first) if own else []
    against = {name: differences(own, name) for name in suite.compared_with} if own else {}
    main = _main(own, against, labels, first) if own else []
    kinds, over_time = families(results), of_periods(results)
    if over_time:
        shown += period_figures(over_time)
        others = [tables.scenarios(gains(results, name), labels.get(name, name)) for name in suite.compared_with[1:]]
        main = [*main[:-2], period_table(over_time), *others]  # nothing is scored without the patient adapter
    costs = [
        [arm.label, str(len(arm.scored)), duration(arm.seconds), size(arm.bytes) if arm.bytes else NOTHING]
        for arm in arms
    ]
    text = render(
        "comparison.html",
        suite=suite,
        results=results,
        labels=labels,
        alone=alone,
        joining=joining,
        scenarios=tables.scenarios(found, reference),
        grid=tables.grid(found),
        verdict=of_reports(own, against[first], labels, first) if own else of_gains(found, reference, alone),
        tables=[t.fold(kinds) for t in (*main, tables.left_out(results, suite.sites, first)) if t.rows],
        metrics=_every_metric(own, suite.compared_with, labels, suite.drawn),
        figures=shown,
        every=[] if over_time else _every(arms),
        over_time=over_time,
        rounds=_rounds(arms),
        reference=reference,
        costs=Table("Cost", "", ["method", "seeds", "one run", "tensors both ways"], costs).fold(kinds),
    )
    return text, [*joining, *shown]


def _main(
    own: Sequence[Done], against: Mapping[str, Sequence[Difference]], labels: Mapping[str, str], first: str
) -> list[Table]:
    """In the paper's shape: at the hospitals that took part, with and without the patient adapter, and outside."""
    members, generic, outside = WHERE.values()
    about = "With each hospital's patient adapter, or the adapter that it tuned for itself, where the method has one. "
    about += f"The best {SCORES[MAIN].label} comes first."
    alone = "What a method's shared adapter knows by itself, without any patient adapter."
    strangers = "Hospitals that never took part and get the shared adapter of the same round."
    return [
        tables.scores(members, about, own, Done.members, against[first]),
        *(tables.differences(found, labels, name) for name, found in against.items() if found),
        tables.scores(generic, alone, own, Done.generic),
        tables.scores(outside, strangers, own, Done.outside),
    ]


def _every_metric(
    results: Sequence[Done], references: Sequence[str], labels: Mapping[str, str], drawn: Units
) -> list[Table]:
    """The best arm of each method (results are ranked) against each reference with which it has a seed in common."""
    found = []
    for reference in references:
        others = [one.experiment for one in results if one.experiment.name != reference]
        best = {one.arm.method: one.name for one in reversed(others)}
        for arm in (name for name in by_arm(results) if name in best.values()):
            if tests := every_metric(arm, both(results, arm, reference), drawn):
                found.append(tables.every_metric(tests, labels, reference, drawn))
    return found


def _every(arms: Sequence[Summary]) -> list[Table]:
    """All scores, as means over hospitals."""
    names = [name for name in SCORES if any(name in arm.after[where] for arm in arms for where in WHERE)]
    return [
        Table(title, "", head(names), lines) for where, title in WHERE.items() if (lines := _rows(arms, where, names))
    ]


def _rows(arms: Sequence[Summary], where: str, names: Sequence[str]) -> list[list[str]]:
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
