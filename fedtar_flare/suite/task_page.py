"""``comparison.html`` of a suite whose arms learn tasks of classification: AUC, LCA, and what a start costs."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from fedtar_flare.metrics.classification import lca
from fedtar_flare.reporting.format import NOTHING, duration, number, size
from fedtar_flare.reporting.plots import SMALL, Chart, Figure, sharing_y
from fedtar_flare.reporting.render import render
from fedtar_flare.suite.charts import OTHERS, arm_series, colours_of
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.results import Done, by_arm
from fedtar_flare.suite.tables import Table, with_interval
from fedtar_flare.suite.task_scores import MEASURES, Run, Score, differences, values
from fedtar_flare.suite.verdict import families, verdict

MOST_CHARTS = 9
"""Diseases that the learning curves show at most."""
_LCA = list(MEASURES).index("lca")
_HEAD = ["method", *(f"{label} ↑" for label, _ in MEASURES.values())]

Arms = Mapping[str, Sequence[Run]]


def task_page(suite: Suite, results: Sequence[Done]) -> tuple[str, list[Figure]]:
    """The page as well-formed HTML, and its figures."""
    arms = {name: [Run(one) for one in several] for name, several in by_arm(results).items()}
    arms = dict(sorted(arms.items(), key=lambda pair: -_lca(pair[1])))
    labels = {one.experiment.name: one.result["label"] for one in results}
    first = suite.compared_with[0]
    curves = _curves(arms, labels, first)
    figures = [curves] if curves.charts else []
    against = {name: differences(arms, name) for name in suite.compared_with}
    gaps = [_differences(found, labels, name) for name, found in against.items()]
    tables = [_scores(arms, labels), *gaps, _diseases(arms, labels), _cost(arms, labels, first)]
    less = {name: scores["lca"] for name, scores in against[first].items()}
    best = values(next(iter(arms.values())))["lca"].value
    text = render(
        "comparison_tasks.html",
        suite=suite,
        results=results,
        labels=labels,
        verdict=[verdict("LCA", [*arms], best, less, first, labels, number)],
        tables=[table.fold(families(results)) for table in tables if table.rows],
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
    rows = [[labels[name], *(_cell(one) for one in values(runs).values())] for name, runs in arms.items()]
    return Table("How well, and how fast, new diseases are learnt", about, _HEAD, rows)


def _differences(found: Mapping[str, Mapping[str, Score]], labels: Mapping[str, str], reference: str) -> Table:
    about = (
        "Paired by image: the same test images of the same hospitals and seeds. p is of Welch's test of the seeds' "
        "means, corrected after Holm for the number of methods; it is blank with fewer than two seeds. Methods whose "
        "hospitals met other images (another order or other tasks) are not in this table."
    )
    rows = [[labels[name], *(_cell(one) for one in scores.values())] for name, scores in found.items()]
    return Table(f"Difference to {labels.get(reference, reference)}", about, _HEAD, rows)


def _diseases(arms: Arms, labels: Mapping[str, str]) -> Table:
    names = _names(arms)
    rows = []
    for arm, runs in arms.items():
        cells = []
        for name in names:
            found = [curve for run in runs for curve in run.curves_of(name)]
            last = fmean(curve[-1] for curve in found) if found else None
            cells.append(f"{number(last)} / {number(fmean(lca(c) or 0.0 for c in found))}" if found else NOTHING)
        rows.append([labels[arm], *cells])
    about = (
        "AUC after tuning / LCA of each disease, wherever in a hospital's order it came; mean of hospitals and seeds."
    )
    return Table("By disease", about, ["method", *(name.replace("_", " ") for name in names)], rows)


def _cost(arms: Arms, labels: Mapping[str, str], reference: str) -> Table:
    base = {run.seed: run for run in arms.get(reference, ())}
    rows = []
    for name, runs in arms.items():
        tried = [one for run in runs if run.seed in base for one in run.reached(base[run.seed])]
        there = [one for one in tried if one is not None]
        compared = [run.tasks[place] for run in runs for place in run.compared()]
        guessed = [one["membership"] for one in compared if one["membership"] is not None]
        rows.append(
            [
                labels[name],
                f"{len(there) / len(tried):.0%}" if tried else NOTHING,
                f"{median(epochs for epochs, _ in there):g}" if there else NOTHING,
                duration(median(seconds for _, seconds in there)) if there else NOTHING,
                duration(fmean(one["start_seconds"] for one in compared)) if compared else NOTHING,
                duration(fmean(one["seconds"][-1] for one in compared)) if compared else NOTHING,
                size(fmean(run.result["bytes"] for run in runs)),
                duration(fmean(run.result["seconds"] for run in runs)),
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


def _cell(one: Score) -> str:
    return with_interval(one.value, number, p=one.p)


# ---------------------------------------------------------------------- figures
def _curves(arms: Arms, labels: Mapping[str, str], reference: str) -> Figure:
    """AUC over epochs, a chart per disease."""
    best = {name: _lca(runs) for name, runs in arms.items()}
    colours = colours_of([*arms], [name for name in arms if name == reference], best)
    charts = []
    for name in _names(arms)[:MOST_CHARTS]:
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
    tasks = [one for runs in arms.values() for run in runs for one in run.tasks.values()]
    return list(dict.fromkeys(one["task"] for one in sorted(tasks, key=lambda one: one["step"])))
