"""``comparison.html`` of a suite whose arms learn tasks of classification: AUC, LCA, and what a start costs."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from fedtar_flare.metrics.classification import lca
from fedtar_flare.reporting.format import NOTHING, duration, number, size
from fedtar_flare.reporting.plots import SMALL, Chart, Figure, sharing_y
from fedtar_flare.reporting.render import render
from fedtar_flare.suite.charts import OTHERS, arm_colours, arm_series
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.results import Result, by_arm
from fedtar_flare.suite.tables import Table, verdict, with_interval
from fedtar_flare.suite.task_scores import MEASURES, Run, Score, differences, values

MAX_CHARTS = 9
"""Diseases that the learning curves show at most."""
_LCA = list(MEASURES).index("lca")
_HEAD = ["method", *(f"{label} ↑" for label, _ in MEASURES.values())]

Arms = Mapping[str, Sequence[Run]]


def task_page(suite: Suite, results: Sequence[Result]) -> tuple[str, list[Figure]]:
    """The page as well-formed HTML, and its figures."""
    arms = {name: [Run(result) for result in of_arm] for name, of_arm in by_arm(results).items()}
    arms = dict(sorted(arms.items(), key=lambda pair: -_lca(pair[1])))
    labels = {result.arm: result.label for result in results}
    first = suite.compared_with[0]
    curves = _curves(arms, labels, first)
    figures = [curves] if curves.charts else []
    less = {name: differences(arms, name) for name in suite.compared_with}
    gaps = [_differences(scores, labels, name) for name, scores in less.items()]
    tables = [_scores(arms, labels), *gaps, _diseases(arms, labels), _cost(arms, labels, first)]
    lca_less = {name: scores["lca"] for name, scores in less[first].items()}
    best = values(next(iter(arms.values())))["lca"].value
    text = render(
        "comparison_tasks.html",
        suite=suite,
        results=results,
        labels=labels,
        verdict=[verdict("LCA", [*arms], best, lca_less, first, labels, number)],
        tables=[table for table in tables if table.rows],
        figures=figures,
    )
    return text, figures


def _lca(runs: Sequence[Run]) -> float:
    """Mean LCA over seeds; -1 where it is not known."""
    mean = fmean(float(run.scores()[_LCA, 0]) for run in runs)
    return mean if math.isfinite(mean) else -1.0


# ---------------------------------------------------------------------- tables
def _scores(arms: Arms, labels: Mapping[str, str]) -> Table:
    about = (
        "The new disease of each task against all before it, on test images: mean over hospitals, then over tasks "
        "(without the first where there are several, as no start can inform it), then over seeds. LCA is the mean AUC "
        "over the epochs of tuning. Below a value stands its 95 % interval over patients and seeds (1,000 replicates, "
        "patients drawn whole). The best LCA comes first."
    )
    rows = [[labels[name], *map(_cell, values(runs).values())] for name, runs in arms.items()]
    return Table("How well, and how fast, new diseases are learnt", about, _HEAD, rows)


def _differences(arms: Mapping[str, Mapping[str, Score]], labels: Mapping[str, str], reference: str) -> Table:
    about = (
        "Paired by image: the same test images of the same hospitals and seeds. p is of Welch's test of the seeds' "
        "means, corrected after Holm for the number of methods; it is blank with fewer than two seeds. Methods whose "
        "hospitals met other images (another order or other tasks) are not in this table."
    )
    rows = [[labels[name], *map(_cell, scores.values())] for name, scores in arms.items()]
    return Table(f"Difference to {labels.get(reference, reference)}", about, _HEAD, rows)


def _diseases(arms: Arms, labels: Mapping[str, str]) -> Table:
    names = _names(arms)
    rows = []
    for arm, runs in arms.items():
        cells = []
        for name in names:
            curves = [curve for run in runs for curve in run.curves_of(name)]
            last = fmean(curve[-1] for curve in curves) if curves else None
            cells.append(f"{number(last)} / {number(fmean(lca(c) or 0.0 for c in curves))}" if curves else NOTHING)
        rows.append([labels[arm], *cells])
    about = (
        "AUC after tuning / LCA of each disease, wherever in a hospital's order it came; mean of hospitals and seeds."
    )
    return Table("By disease", about, ["method", *(name.replace("_", " ") for name in names)], rows)


def _cost(arms: Arms, labels: Mapping[str, str], reference: str) -> Table:
    base = {run.seed: run for run in arms.get(reference, ())}
    rows = []
    for name, runs in arms.items():
        tried = [when for run in runs if run.seed in base for when in run.reached(base[run.seed])]
        reached = [when for when in tried if when is not None]
        compared = [run.tasks[key] for run in runs for key in run.compared()]
        guessed = [task["membership"] for task in compared if task["membership"] is not None]
        rows.append(
            [
                labels[name],
                f"{len(reached) / len(tried):.0%}" if tried else NOTHING,
                f"{median(epochs for epochs, _ in reached):g}" if reached else NOTHING,
                duration(median(seconds for _, seconds in reached)) if reached else NOTHING,
                duration(fmean(task["start_seconds"] for task in compared)) if compared else NOTHING,
                duration(fmean(task["seconds"][-1] for task in compared)) if compared else NOTHING,
                size(fmean(run.content["bytes"] for run in runs)),
                duration(fmean(run.content["seconds"] for run in runs)),
                number(fmean(guessed)) if guessed else NOTHING,
            ]
        )
    about = (
        f"In how many tasks a method reaches the last AUC of {labels.get(reference, reference)}, and after how many "
        "epochs and seconds there (medians). Seconds are of one hospital and task and include the start, which is "
        "all that comes before the first epoch. Membership is the AUC of separating training from test images by "
        "the module (0.5: a guess)."
    )
    head = ["method", "tasks", "epochs", "seconds", "of a start", "of a task", "bytes of a run", "a run", "membership"]
    return Table("What it costs, the start included", about, head, rows)


def _cell(score: Score) -> str:
    return with_interval(score.value, number, p=score.p)


# ---------------------------------------------------------------------- figures
def _curves(arms: Arms, labels: Mapping[str, str], reference: str) -> Figure:
    """AUC over epochs, a chart per disease."""
    best = {name: _lca(runs) for name, runs in arms.items()}
    colours = arm_colours([*arms], [name for name in arms if name == reference], best)
    charts = []
    for name in _names(arms)[:MAX_CHARTS]:
        lines = []
        for arm, runs in arms.items():
            curves = [zip(*run.curves_of(name), strict=True) for run in runs]
            pairs = [(float(e), fmean(at)) for of_run in curves for e, at in enumerate(of_run)]
            if pairs:
                lines.append(arm_series(arm, labels, colours, pairs))
        if lines:  # a disease may have too few test images everywhere
            charts.append(Chart(name.replace("_", " "), lines, (), "epoch", "AUC", size=SMALL))
    about = "Test images; epoch 0 is the start itself. Mean of hospitals and seeds; the band is the range of the seeds."
    return Figure("learning_curves", "Learning curves", about, sharing_y(charts, 0.5), OTHERS)


def _names(arms: Arms) -> list[str]:
    """Diseases in the order in which a hospital met them first."""
    tasks = [task for runs in arms.values() for run in runs for task in run.tasks.values()]
    return list(dict.fromkeys(task["task"] for task in sorted(tasks, key=lambda task: task["step"])))
