"""``comparison.html``: a suite's arms side by side, one self-contained page; its figures also as SVG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from fedtar_flare.core.files import write_text
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.report_sums import Units
from fedtar_flare.reporting.format import NOTHING, duration, score, size
from fedtar_flare.reporting.plots import Figure
from fedtar_flare.reporting.render import render
from fedtar_flare.suite import tables
from fedtar_flare.suite.charts import figures
from fedtar_flare.suite.compare import Difference, compare_scores, differences, paired_runs
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.joining import gains, joining_figures
from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.results import WHERE, Result, by_arm, read_results, seed_means
from fedtar_flare.suite.tables import Table
from fedtar_flare.suite.task_page import task_page
from fedtar_flare.suite.verdict import MAIN, arm_verdict, gain_verdict, ranked

__all__ = ["write_page"]

PAGE, FIGURES = "comparison.html", "figures"


def write_page(folder: Path, suite: Suite, experiments: Sequence[Experiment]) -> Path | None:
    """Write the page of those of the suite's runs that have results, and its figures.

    Parameters
    ----------
    folder : Path
        Folder of the comparison, with ``results/``; gets ``comparison.html`` and ``figures/*.svg``.
    suite : Suite
        The suite file's content.
    experiments : sequence of Experiment
        The suite's runs.

    Returns
    -------
    Path or None
        The page; None without any result.
    """
    results = read_results(folder, experiments)
    if not results:
        return None
    content, drawn = (page if experiments[0].writes_reports else task_page)(suite, results)
    for figure in drawn:
        figure.write(folder / FIGURES)
    return write_text(folder / PAGE, content)


def page(suite: Suite, results: Sequence[Result]) -> tuple[str, list[Figure]]:
    """The page as well-formed HTML, and its figures. Nothing is fetched when it is opened."""
    own = ranked([result for result in results if not result.experiment.variant.scenario])
    first = suite.compared_with[0]
    labels = {result.arm: result.label for result in results}
    reference = labels.get(first, first)
    gained = gains(results, first)
    joining = joining_figures(gained, reference)
    shown: list[Figure] = []
    main: list[Table] = []
    verdict = [gain_verdict(gained, reference)]
    if own:
        tests = {name: differences(own, name) for name in suite.compared_with}
        shown, main = figures(own, first), _main(own, tests, labels, first)
        verdict = arm_verdict(own, tests[first], labels, first)
    text = render(
        "comparison.html",
        suite=suite,
        results=results,
        labels=labels,
        joining=joining,
        gains=tables.gain_table(gained, reference),
        verdict=verdict,
        tables=[table for table in main if table.rows],
        metrics=_every_metric(own, suite.compared_with, labels, suite.drawn),
        figures=shown,
        every=_every_score(own),
        reference=reference,
        costs=_costs(own),
    )
    return text, [*joining, *shown]


def _main(
    own: Sequence[Result], tests: Mapping[str, Sequence[Difference]], labels: Mapping[str, str], first: str
) -> list[Table]:
    """In the paper's shape: at the hospitals that took part, with and without the patient adapter, and outside."""
    members, generic, outside = WHERE.values()
    about = "With each hospital's patient adapter, or the adapter that it tuned for itself, where the method has one. "
    about += f"The best {SCORES[MAIN].label} comes first."
    alone = "What a method's shared adapter knows by itself, without any patient adapter."
    strangers = "Hospitals that never took part and get the shared adapter of the same round."
    return [
        tables.scores(members, about, own, Result.members, tests[first]),
        *(tables.difference_table(against, labels, name) for name, against in tests.items() if against),
        tables.scores(generic, alone, own, Result.generic),
        tables.scores(outside, strangers, own, Result.outside),
    ]


def _every_metric(
    results: Sequence[Result], references: Sequence[str], labels: Mapping[str, str], drawn: Units
) -> list[Table]:
    """The best arm of each method (results are ranked) against each reference with which it has a seed in common."""
    out = []
    for reference in references:
        others = [result.experiment for result in results if result.arm != reference]
        best = {experiment.arm.method: experiment.name for experiment in reversed(others)}
        for arm in (name for name in by_arm(results) if name in best.values()):
            if tests := compare_scores(arm, paired_runs(results, arm, reference), drawn):
                out.append(tables.metric_table(tests, labels, reference, drawn))
    return out


def _every_score(results: Sequence[Result]) -> list[Table]:
    """All scores, mean over hospitals and seeds, with the standard deviation over seeds."""
    arms = by_arm(results)
    out: list[Table] = []
    names = [n for n in SCORES if any(seed_means(results, where, n) for where in WHERE)]
    for where, title in WHERE.items():
        rows: list[list[str]] = []
        for runs in arms.values():
            means = {name: seed_means(runs, where, name) for name in names}
            if any(means.values()):
                if not rows:
                    start = {name: seed_means(runs, where, name, "start") for name in names}
                    rows.append([tables.WARM_START, *(score(n, fmean(v) if v else None) for n, v in start.items())])
                rows.append([runs[0].label, *(_with_spread(name, values) for name, values in means.items())])
        if rows:
            out.append(Table(title, "", tables.head(names), rows))
    return out


def _with_spread(name: str, values: Sequence[float]) -> str:
    text = score(name, fmean(values) if values else None)
    return f"{text} ± {score(name, stdev(values))}" if len(values) > 1 else text


def _costs(results: Sequence[Result]) -> Table:
    rows = []
    for runs in by_arm(results).values():
        seconds, sent = (fmean(run.content[name] for run in runs) for name in ("seconds", "bytes"))
        rounds = ", ".join(str(run.content["scored_round"]) for run in runs)
        rows.append([runs[0].label, str(len(runs)), rounds, duration(seconds), size(sent) if sent else NOTHING])
    return Table("Cost", "", ["method", "seeds", "scored at round", "one run", "tensors both ways"], rows)
