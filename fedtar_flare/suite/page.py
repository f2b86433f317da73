"""``comparison.html``: a suite's arms side by side, one self-contained page."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from fedtar_flare.core.files import write_text
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Units
from fedtar_flare.reporting.format import NOTHING, duration, score, size
from fedtar_flare.reporting.render import render
from fedtar_flare.suite import tables
from fedtar_flare.suite.charts import figures
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.results import (
    COMPARED,
    MAIN,
    SUMS,
    WHERE,
    Difference,
    Result,
    by_arm,
    compare_scores,
    differences,
    interval_of,
    paired_runs,
    read_results,
    seed_means,
)
from fedtar_flare.suite.tables import Table, verdict, winner
from fedtar_flare.suite.task_page import task_page

PAGE = "comparison.html"


def write_page(folder: Path, suite: Suite, experiments: Sequence[Experiment]) -> Path | None:
    """Write the page of those of the suite's runs that have results."""
    results = read_results(folder, experiments)
    if not results:
        return None
    make = page if experiments[0].writes_reports else task_page
    return write_text(folder / PAGE, make(suite, results))


def page(suite: Suite, results: Sequence[Result]) -> str:
    """The page as well-formed HTML. Nothing is fetched when it is opened."""
    rank = {arm: i for i, arm in enumerate(arm_means(results, MAIN))}
    ranked = sorted(results, key=lambda result: rank.get(result.arm, len(rank)))
    first = suite.compared_with[0]
    labels = {result.arm: result.label for result in results}
    tests = {name: differences(ranked, name) for name in suite.compared_with}
    return render(
        "comparison.html",
        suite=suite,
        results=results,
        labels=labels,
        verdict=arm_verdict(ranked, tests[first], labels, first),
        tables=[table for table in _main(ranked, tests, labels, first) if table.rows],
        metrics=_every_metric(ranked, suite.compared_with, labels, suite.drawn),
        figures=figures(ranked, first),
        every=[table for where, title in WHERE.items() if (table := _means(ranked, where, title, "", SCORES)).rows],
        reference=labels.get(first, first),
        costs=_costs(ranked),
    )


def _main(
    results: Sequence[Result], tests: Mapping[str, Sequence[Difference]], labels: Mapping[str, str], first: str
) -> list[Table]:
    """In the paper's shape: at the hospitals that took part, with and without the patient adapter, and outside."""
    members, generic, outside = WHERE.values()
    mean = "As the papers' tables have it: the mean over hospitals and seeds; behind ± the deviation over seeds."
    about = "With each hospital's patient adapter, or the adapter that it tuned for itself, where the method has one. "
    about += f"The best {SCORES[MAIN].label} comes first."
    by_itself = "What a method's shared adapter knows by itself, without any patient adapter."
    strangers = "Hospitals that never took part and get the shared adapter of the same round."
    return [
        _means(results, "members", "Mean over the hospitals that took part", mean, tables.COLUMNS),
        tables.scores(members, about, results, Result.members, tests[first]),
        *(tables.difference_table(against, labels, name) for name, against in tests.items() if against),
        tables.scores(generic, by_itself, results, Result.generic),
        tables.scores(outside, strangers, results, Result.outside),
    ]


def _every_metric(
    results: Sequence[Result], references: Sequence[str], labels: Mapping[str, str], drawn: Units
) -> list[Table]:
    """Each arm, the best first, against each reference with which it has a seed in common."""
    out = []
    for reference in references:
        for arm in (name for name in by_arm(results) if name != reference):
            if tests := compare_scores(arm, paired_runs(results, arm, reference), drawn):
                out.append(tables.metric_table(tests, labels, reference, drawn))
    return out


def _means(results: Sequence[Result], where: str, title: str, about: str, scores: Collection[str]) -> Table:
    """Scores as means over hospitals and seeds, with the standard deviation over seeds."""

    def cell(name: str, runs: list[Result], when: str) -> str:
        means = seed_means(runs, where, name, when)
        spread = f" ± {score(name, stdev(means))}" if when == "end" and len(means) > 1 else ""
        return score(name, fmean(means) if means else None) + spread

    return tables.arm_table(title, about, results, scores, cell)


def _costs(results: Sequence[Result]) -> Table:
    rows = []
    for runs in by_arm(results).values():
        seconds, sent = (fmean(run.content[name] for run in runs) for name in ("seconds", "bytes"))
        rounds = ", ".join(str(run.content["scored_round"]) for run in runs)
        rows.append([runs[0].label, str(len(runs)), rounds, duration(seconds), size(sent) if sent else NOTHING])
    return Table("Cost", "", ["method", "seeds", "scored at round", "one run", "tensors both ways"], rows)


def arm_means(results: Sequence[Result], name: str) -> dict[str, float]:
    """A score at the hospitals that took part, mean over seeds, by arm, best first; arms without it are left out."""
    means = {}
    for arm, runs in by_arm(results).items():
        sums = [of_run for run in runs if (of_run := SUMS[name](run.members())) is not None]
        if sums and math.isfinite(mean := fmean(of_run.value() for of_run in sums)):
            means[arm] = mean
    return dict(sorted(means.items(), key=lambda pair: pair[1], reverse=SCORES[name].higher_is_better is not False))


def arm_verdict(
    results: Sequence[Result], tests: Sequence[Difference], labels: Mapping[str, str], reference: str
) -> list[str]:
    """The verdict on the main score against the arm ``reference``, and which arms are best in the other scores."""
    best = {name: means for name in COMPARED if (means := arm_means(results, name))}
    if MAIN not in best:
        return ["No arm has a score that arms are compared by."]
    less = {test.arm: (test.difference, test.p) for test in tests if test.score == MAIN}
    first = next(iter(best[MAIN]))
    interval = interval_of(MAIN, [run.members() for run in by_arm(results)[first]])
    text = verdict(SCORES[MAIN].label, best[MAIN], interval, less, reference, labels, partial(score, MAIN), " points")
    winners = {name: winner(means, partial(score, name)) for name, means in best.items() if name != MAIN}
    others = [f"{SCORES[name].label}: {labels[arm]}" for name, arm in winners.items() if arm is not None]
    return [text, *([f"Best in other scores: {'; '.join(others)}."] if others else [])]
