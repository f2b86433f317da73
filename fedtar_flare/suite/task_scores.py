"""Scores of runs that learn tasks of classification, with intervals over patients and seeds.

A curve is the AUC of a site's test images in a task, at e = 0..E. A run's score is the mean over sites, then over
tasks; where there are several tasks, the first is left out, which no start can inform.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fedtar_flare.metrics.classification import Array, auc_of_draws, epochs_to, welch
from fedtar_flare.metrics.significance import SEED, Interval, holm, interval
from fedtar_flare.suite.results import Result, grouped

REPLICATES = 1_000
"""Of the bootstrap."""

MEASURES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "start": ("AUC at the start", lambda curves: curves[..., 0]),
    "final": ("AUC", lambda curves: curves[..., -1]),
    "lca": ("LCA", lambda curves: curves[..., 1:].mean(-1)),
    "lca0": ("LCA from epoch 0", lambda curves: curves.mean(-1)),
}
"""What a curve (..., E + 1) is read as: AUC before the first and after the last epoch; its mean over the epochs 1..E
(the paper's LCA), and over 0..E, which counts the start too."""

Cell = tuple[int, str]
"""Step of the stream, and site."""


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
        self._scores: dict[int, Array] = {}

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

    def scores(self, draws: int = 0) -> Array:
        """(4, 1): the :data:`MEASURES` as they are; with ``draws``, (4, draws) of drawn patients.

        Runs of equal images and seed draw the same patients.
        """
        if draws in self._scores:
            return self._scores[draws]
        generator = np.random.default_rng((SEED, self.seed)) if draws else None
        drawn = self._drawn(generator, draws)
        steps = grouped(self.compared(), lambda cell: cell[0])
        out = np.full((len(MEASURES), max(draws, 1)), np.nan)
        if steps:
            for i, (_, read) in enumerate(MEASURES.values()):
                by_step = (np.ma.masked_invalid([read(drawn[cell]) for cell in cells]) for cells in steps.values())
                out[i] = np.mean([sites.mean(0).filled(np.nan) for sites in by_step], 0)  # over sites with a value
        self._scores[draws] = out
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
            curves[step, site] = auc_of_draws(
                [row["label"] for row in rows],
                np.array([row["scores"] for row in rows]),
                [numbers[row["patient_id"]] for row in rows],
                counts,
            )
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
    """Means over seeds of runs, or of runs minus others, with intervals.

    A replicate draws as many seeds as there are, with replacement, and for each seed a draw of its patients.
    """

    def of_seeds(draws: int = 0) -> Array:
        return np.stack([mine.scores(draws) - (other.scores(draws) if other else 0.0) for mine, other in pairs])

    plain, drawn, generator = of_seeds(), of_seeds(REPLICATES), np.random.default_rng((SEED, 1))
    n, _, replicates = drawn.shape
    total = np.zeros(drawn.shape[1:])
    for _ in range(n):
        seeds, draws = generator.integers(n, size=replicates), generator.permutation(replicates)
        total += drawn[seeds, :, draws].T / n
    return {name: Score(interval(float(np.mean(plain[:, i, 0])), total[i])) for i, name in enumerate(MEASURES)}
