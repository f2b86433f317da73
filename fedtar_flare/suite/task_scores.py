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
from fedtar_flare.suite.results import Done, grouped

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

Place = tuple[int, str]
"""Step of the stream, and site."""


class Score(NamedTuple):
    """Mean over seeds, with its 95 % interval over patients and seeds; ``p`` of Welch's test over seeds (Holm)."""

    value: Interval
    p: float | None = None


class Run:
    """The test images of one run, task by task and site by site."""

    def __init__(self, done: Done):
        self.seed, self.result = done.experiment.seed, done.result
        self._rows: dict[Place, list[dict[str, Any]]] = grouped(done.rows, lambda row: (row["step"], row["site"]))
        self.tasks = {(one["step"], one["site"]): one for one in self.result["tasks"]}
        self._scores: dict[int, Array] = {}

    @cached_property
    def places(self) -> list[Place]:
        """Steps and sites with test images of both classes."""
        return sorted(place for place, rows in self._rows.items() if len({row["label"] for row in rows}) == 2)

    @cached_property
    def images(self) -> tuple[Any, ...]:
        """Which images were scored: two runs with equal ones can be compared image by image."""
        return tuple((*p, *((r["patient_id"], r["label"]) for r in self._rows[p])) for p in self.places)

    def compared(self) -> list[Place]:
        """The places that a run's score is a mean of."""
        return [place for place in self.places if place[0] > 1] or self.places

    def curves(self) -> dict[Place, list[float]]:
        return {place: drawn[0].tolist() for place, drawn in self._drawn(None).items()}

    def curves_of(self, task: str) -> list[list[float]]:
        """The curves of one task at all its places."""
        return [curve for place, curve in self.curves().items() if self.tasks[place]["task"] == task]

    def scores(self, draws: int = 0) -> Array:
        """(4, 1): the :data:`MEASURES` as they are; with ``draws``, (4, draws) of drawn patients.

        Runs of equal images and seed draw the same patients.
        """
        if draws in self._scores:
            return self._scores[draws]
        generator = np.random.default_rng((SEED, self.seed)) if draws else None
        drawn = self._drawn(generator, draws)
        steps = grouped(self.compared(), lambda place: place[0])
        found = np.full((len(MEASURES), max(draws, 1)), np.nan)
        if steps:
            for i, (_, read) in enumerate(MEASURES.values()):
                of_sites = (np.ma.masked_invalid([read(drawn[place]) for place in places]) for places in steps.values())
                found[i] = np.mean([one.mean(0).filled(np.nan) for one in of_sites], 0)  # of sites that have a value
        self._scores[draws] = found
        return found

    def _drawn(self, generator: np.random.Generator | None, draws: int = 1) -> dict[Place, Array]:
        """Curves (R, E + 1) of drawn patients of each site, who are the same in all its tasks; None: all once."""
        weights: dict[str, tuple[dict[str, int], Array]] = {}
        for site in sorted({site for _, site in self.places}):
            patients = sorted({r["patient_id"] for p in self.places if p[1] == site for r in self._rows[p]})
            many = len(patients)
            counts = np.ones((1, many)) if generator is None else generator.multinomial(many, [1 / many] * many, draws)
            weights[site] = {name: i for i, name in enumerate(patients)}, counts.astype(np.float64)
        found = {}
        for step, site in self.places:
            rows, (numbers, counts) = self._rows[step, site], weights[site]
            found[step, site] = auc_of_draws(
                [row["label"] for row in rows],
                np.array([row["scores"] for row in rows]),
                [numbers[row["patient_id"]] for row in rows],
                counts,
            )
        return found

    def reached(self, other: "Run") -> list[tuple[int, float] | None]:
        """For each compared place of both, epochs and seconds until the other's last AUC; None: never."""
        mine, theirs = self.curves(), other.curves()
        found: list[tuple[int, float] | None] = []
        for place in self.compared():
            if place in theirs:
                epoch = epochs_to(mine[place], theirs[place][-1])
                found.append(None if epoch is None else (epoch, self.tasks[place]["seconds"][epoch]))
        return found


def values(runs: Sequence[Run]) -> dict[str, Score]:
    """Each measure of an arm."""
    return _over_seeds([(run, None) for run in runs])


def differences(arms: Mapping[str, Sequence[Run]], reference: str) -> dict[str, dict[str, Score]]:
    """Each other arm less the reference, on the seeds and images that both have; p only from two seeds on."""
    base = {run.seed: run for run in arms.get(reference, ())}
    pairs = {
        name: [(run, base[run.seed]) for run in runs if run.seed in base and run.images == base[run.seed].images]
        for name, runs in arms.items()
        if name != reference
    }
    found = {name: _over_seeds(several) for name, several in pairs.items() if several}
    for i, measure in enumerate(MEASURES):
        of_base = [run.scores()[i, 0] for run in base.values()]
        of_seeds = {n: [mine.scores()[i, 0] for mine, _ in pairs[n]] for n in found if len(pairs[n]) > 1}
        of_seeds = {n: known for n, known in of_seeds.items() if np.isfinite([*known, *of_base]).all()}
        for name, p in holm({n: welch(known, of_base) for n, known in of_seeds.items()}).items():
            found[name][measure] = found[name][measure]._replace(p=p)
    return found


def _over_seeds(pairs: Sequence[tuple[Run, Run | None]]) -> dict[str, Score]:
    """Means over seeds of runs, or of runs less others, with intervals.

    A replicate draws as many seeds as there are, with replacement, and of each a draw of its patients.
    """

    def of_seeds(draws: int = 0) -> Array:
        return np.stack([mine.scores(draws) - (other.scores(draws) if other else 0.0) for mine, other in pairs])

    plain, drawn, generator = of_seeds(), of_seeds(REPLICATES), np.random.default_rng((SEED, 1))
    many, _, replicates = drawn.shape
    total = np.zeros(drawn.shape[1:])
    for _ in range(many):
        seeds, draws = generator.integers(many, size=replicates), generator.permutation(replicates)
        total += drawn[seeds, :, draws].T / many
    return {name: Score(interval(float(np.mean(plain[:, i, 0])), total[i])) for i, name in enumerate(MEASURES)}
