"""``comparison.html`` of a suite whose arms learn tasks of classification: AUC, LCA, and what a start costs.

A run's score is the mean over sites, then over tasks, without the first where there are several: no start informs it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from fedtar_flare.metrics.classification import Array, auc_of_draws, epochs_to, lca, welch
from fedtar_flare.metrics.significance import SEED, Interval, holm, interval
from fedtar_flare.reporting.format import NOTHING, duration, number, size
from fedtar_flare.reporting.plots import SMALL, Chart, Figure, sharing_y
from fedtar_flare.reporting.render import render
from fedtar_flare.suite.charts import OTHERS, arm_colours, arm_series
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.results import Result, by_arm, grouped
from fedtar_flare.suite.tables import Table, verdict, with_interval

REPLICATES = 1_000  # of the bootstrap
MEASURES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "start": ("AUC at the start", lambda curves: curves[..., 0]),
    "final": ("AUC", lambda curves: curves[..., -1]),
    "lca": ("LCA", lambda curves: curves[..., 1:].mean(-1)),
    "lca0": ("LCA from epoch 0", lambda curves: curves.mean(-1)),
}
"""Of a curve (..., E + 1) the AUC before the first and after the last epoch; its mean over the epochs 1..E (the paper's
LCA), and over 0..E, which counts the start too."""
NO_LCA = "No method has an LCA: no hospital has test images with and without a disease."
MAX_CHARTS = 9  # diseases that the learning curves show
_LCA = list(MEASURES).index("lca")
_HEAD = ["method", *(f"{label} ↑" for label, _ in MEASURES.values())]

Arms = Mapping[str, Sequence["Run"]]
Cell = tuple[int, str]  # step of the stream, and site


class Score(NamedTuple):
    """Mean over seeds, with its 95 % interval over patients and seeds; ``p`` of Welch's test over seeds (Holm)."""

    value: Interval
    p: float | None = None


class Run:
    """The test images of one run, task by task and site by site."""

    def __init__(self, result: Result):
        self.seed, self.content = result.experiment.seed, result.content
        self._rows: dict[Cell, list[dict[str, Any]]] = grouped(result.rows, lambda row: (row["step"], row["site"]))
        self.tasks = {(task["step"], task["site"]): task for task in self.content["tasks"]}
        self._scores: dict[tuple[int, int], Array] = {}

    @cached_property
    def cells(self) -> list[Cell]:
        """Steps and sites with test images of both classes."""
        return sorted(cell for cell, rows in self._rows.items() if len({row["label"] for row in rows}) == 2)

    @cached_property
    def images(self) -> tuple[Any, ...]:
        """Which images were scored: two runs with equal ones can be compared image by image."""
        return tuple((*p, *((r["patient_id"], r["label"]) for r in self._rows[p])) for p in self.cells)

    def compared(self) -> list[Cell]:
        """The cells that a run's score is a mean of."""
        return [cell for cell in self.cells if cell[0] > 1] or self.cells

    def curves(self) -> dict[Cell, list[float]]:
        return {cell: drawn[0].tolist() for cell, drawn in self._drawn(None).items()}

    def curves_of(self, task: str) -> list[list[float]]:
        """The curves of one task at all its cells."""
        return [curve for cell, curve in self.curves().items() if self.tasks[cell]["task"] == task]

    @cached_property
    def patients(self) -> set[tuple[str, str]]:
        """Site and id of each patient of the cells."""
        return {(site, row["patient_id"]) for step, site in self.cells for row in self._rows[step, site]}

    def scores(self, draws: int = 0, seed: int = 0) -> Array:
        """(4, 1): the :data:`MEASURES` as they are; with ``draws``, (4, draws) of patients drawn by ``seed``."""
        if (draws, seed) in self._scores:
            return self._scores[draws, seed]
        generator = np.random.default_rng((SEED, seed)) if draws else None
        drawn = self._drawn(generator, draws)
        steps = grouped(self.compared(), lambda cell: cell[0])
        out = np.full((len(MEASURES), max(draws, 1)), np.nan)
        if steps:
            for i, (_, measure) in enumerate(MEASURES.values()):
                by_step = (np.ma.masked_invalid([measure(drawn[cell]) for cell in cells]) for cells in steps.values())
                out[i] = np.mean([sites.mean(0).filled(np.nan) for sites in by_step], 0)  # over sites with a value
        self._scores[draws, seed] = out
        return out

    def _drawn(self, generator: np.random.Generator | None, draws: int = 1) -> dict[Cell, Array]:
        """Curves (R, E + 1) of drawn patients of each site, who are the same in all its tasks; None: all once."""
        weights: dict[str, tuple[dict[str, int], Array]] = {}
        for site in sorted({site for _, site in self.cells}):
            patients = sorted({r["patient_id"] for p in self.cells if p[1] == site for r in self._rows[p]})
            n = len(patients)
            counts = np.ones((1, n)) if generator is None else generator.multinomial(n, [1 / n] * n, draws)
            weights[site] = {name: i for i, name in enumerate(patients)}, counts.astype(np.float64)
        curves = {}
        for step, site in self.cells:
            rows, (numbers, counts) = self._rows[step, site], weights[site]
            scores = np.array([row["scores"] for row in rows])
            who = [numbers[row["patient_id"]] for row in rows]
            curves[step, site] = auc_of_draws([row["label"] for row in rows], scores, who, counts)
        return curves

    def reached(self, other: "Run") -> list[tuple[int, float] | None]:
        """For each compared cell of both, epochs and seconds until the other's last AUC; None: never."""
        mine, theirs = self.curves(), other.curves()
        out: list[tuple[int, float] | None] = []
        for cell in self.compared():
            if cell in theirs:
                epoch = epochs_to(mine[cell], theirs[cell][-1])
                out.append(None if epoch is None else (epoch, self.tasks[cell]["seconds"][epoch]))
        return out


def values(runs: Sequence[Run]) -> dict[str, Score]:
    """Each measure of an arm."""
    return _over_seeds([(run, None) for run in runs])


def differences(arms: Mapping[str, Sequence[Run]], reference: str) -> dict[str, dict[str, Score]]:
    """Each other arm minus the reference, on the seeds and images that both have; p only from two seeds on."""
    base = {run.seed: run for run in arms.get(reference, ())}
    pairs, out = {}, {}
    for name, runs in arms.items():
        if name != reference:
            pairs[name] = [(r, base[r.seed]) for r in runs if r.seed in base and r.images == base[r.seed].images]
            if pairs[name]:
                out[name] = _over_seeds(pairs[name])
    for i, measure in enumerate(MEASURES):
        of_base = [run.scores()[i, 0] for run in base.values()]
        p = {}
        for name in out:
            of_seeds = [mine.scores()[i, 0] for mine, _ in pairs[name]]
            if len(of_seeds) > 1 and np.isfinite([*of_seeds, *of_base]).all():
                p[name] = welch(of_seeds, of_base)
        for name, corrected in holm(p).items():
            out[name][measure] = out[name][measure]._replace(p=corrected)
    return out


def _over_seeds(pairs: Sequence[tuple[Run, Run | None]]) -> dict[str, Score]:
    """Means over seeds of runs, or of runs minus others; a replicate draws seeds, and patients for each.

    Seeds that share their patients share the draw, as in :func:`.over_seeds`.
    """
    first = pairs[0][0]
    shared = all(mine.patients == first.patients for mine, _ in pairs)
    drawn_by = [(mine, other, first.seed if shared else mine.seed) for mine, other in pairs]

    def of_seeds(draws: int = 0) -> Array:
        return np.stack([a.scores(draws, s) - (b.scores(draws, s) if b else 0.0) for a, b, s in drawn_by])

    plain, drawn, generator = of_seeds(), of_seeds(REPLICATES), np.random.default_rng((SEED, 1))
    n, _, replicates = drawn.shape
    total = np.zeros(drawn.shape[1:])
    for _ in range(n):
        seeds = generator.integers(n, size=replicates)
        draws = np.arange(replicates) if shared else generator.permutation(replicates)
        total += drawn[seeds, :, draws].T / n
    return {name: Score(interval(float(np.mean(plain[:, i, 0])), total[i])) for i, name in enumerate(MEASURES)}


def task_page(suite: Suite, results: Sequence[Result]) -> str:
    """The page as well-formed HTML."""
    arms = {name: [Run(result) for result in of_arm] for name, of_arm in by_arm(results).items()}
    means = dict(sorted(((name, _lca(runs)) for name, runs in arms.items()), key=lambda pair: -pair[1]))
    arms = {name: arms[name] for name in means}
    labels = {result.arm: result.label for result in results}
    first = suite.compared_with[0]
    curves = _curves(arms, labels, first)
    less = {name: differences(arms, name) for name in suite.compared_with}
    gaps = [_differences(scores, labels, name) for name, scores in less.items()]
    tables = [_scores(arms, labels), *gaps, _diseases(arms, labels), _cost(arms, labels, first)]
    lca_less = {name: scores["lca"] for name, scores in less[first].items()}
    best, known = values(next(iter(arms.values())))["lca"].value, {name: of for name, of in means.items() if of >= 0}
    return render(
        "comparison_tasks.html",
        suite=suite,
        results=results,
        labels=labels,
        verdict=[verdict("LCA", known, best, lca_less, first, labels, number) if known else NO_LCA],
        tables=[table for table in tables if table.rows],
        figures=[curves] if curves.charts else [],
    )


def _lca(runs: Sequence[Run]) -> float:
    """Mean LCA over seeds; -1 where it is not known."""
    mean = fmean(float(run.scores()[_LCA, 0]) for run in runs)
    return mean if math.isfinite(mean) else -1.0


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


def _curves(arms: Arms, labels: Mapping[str, str], reference: str) -> Figure:
    """AUC over epochs, a chart per disease."""
    colours = arm_colours({name: _lca(runs) for name, runs in arms.items()}, reference)
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
    return Figure("Learning curves", about, sharing_y(charts, 0.5), OTHERS)


def _names(arms: Arms) -> list[str]:
    """Diseases in the order in which a hospital met them first."""
    tasks = [task for runs in arms.values() for run in runs for task in run.tasks.values()]
    return list(dict.fromkeys(task["task"] for task in sorted(tasks, key=lambda task: task["step"])))
