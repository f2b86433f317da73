"""Intervals and tests for scores of reports, over patients and over seeds.

A patient's reports are not independent, so patients are drawn. Of each patient only sums are kept, from which the score
of any set of patients follows: a few numbers per patient instead of texts. Replicates are rows of weights and one
matrix product, which takes a fifth of the time of ``scipy.stats.permutation_test`` on the same sums.

References
----------
Efron and Tibshirani, An Introduction to the Bootstrap, 1993 (percentile interval, Section 13.3; permutation test,
Chapter 15). Holm, Scandinavian Journal of Statistics 1979. Cohen, Educational and Psychological Measurement 1960, and
Fleiss, Psychological Bulletin 1971 (kappa).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedtar_flare.core.errors import DataError
from fedtar_flare.metrics.agreement import Average, LabelCounts, Metric
from fedtar_flare.metrics.language import LanguageStatistics, bleu_of_sums

Array = NDArray[np.float64]
Key = TypeVar("Key")
Score = Callable[[Array], Array]
"""From sums (R, K) to scores (R,); nan where a score is undefined."""

REPLICATES = 5_000
CONFIDENCE = 0.95
SEED = 20_240_229
"""Of all draws."""
_CELLS = 2_000_000  # numbers drawn at a time


@dataclass(frozen=True)
class PatientSums:
    """What each of P patients adds to a score of the corpus.

    Attributes
    ----------
    patients, sums : tuple, ndarray of shape (P, K)
    score : callable
        From sums (R, K) to scores (R,); nan where undefined.

    Raises
    ------
    DataError
        ``no-reports`` without any patient; ``unusable-sums`` where a sum is not finite or the shape is wrong.
    """

    patients: tuple[Any, ...]
    sums: Array
    score: Score

    def __post_init__(self) -> None:
        if not self.patients:
            raise DataError("there is no patient to draw", reason="no-reports")
        if self.sums.ndim != 2 or len(self.sums) != len(self.patients) or not np.isfinite(self.sums).all():
            raise DataError(
                f"sums must be finite and of shape ({len(self.patients)}, K); got shape {self.sums.shape}",
                reason="unusable-sums",
            )

    def __len__(self) -> int:
        return len(self.patients)

    def value(self) -> float:
        """Score all patients together."""
        return float(self.score(self.sums.sum(axis=0, keepdims=True))[0])

    @property
    def of_each(self) -> Array:
        """The score of each single patient, (P,)."""
        return self.score(self.sums)


def patient_sums(patients: Sequence[Any], reports: ArrayLike, score: Score) -> PatientSums:
    """Sums of ``reports`` (N, K) by patient, given the patient of each (N,). DataError ``unequal-lengths``."""
    rows = np.asarray(reports, dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(patients):
        raise DataError(
            f"{len(patients)} patient(s) for reports of shape {rows.shape}: each report needs one",
            reason="unequal-lengths",
        )
    names = sorted(set(patients))
    index = {name: i for i, name in enumerate(names)}
    sums = np.zeros((len(names), rows.shape[1]))
    np.add.at(sums, [index[name] for name in patients], rows)
    return PatientSums(tuple(names), sums, score)


def mean_score(patients: Sequence[Any], values: ArrayLike) -> PatientSums:
    """Prepare a mean over reports, such as ROUGE-L or CIDEr with fixed document frequencies.

    Parameters
    ----------
    patients, values : sequence of length N, array of shape (N,)
        The patient and the value of each report.
    """
    column = np.asarray(values, dtype=np.float64)
    return patient_sums(patients, np.stack([column, np.ones_like(column)], axis=1), _ratio)


def f1_score(patients: Sequence[Any], hits: ArrayLike, named: ArrayLike, actual: ArrayLike) -> PatientSums:
    """Micro F1, 2 hits / (named + actual), from counts per report, (N,)."""
    two_hits, total = 2 * np.asarray(hits), np.asarray(named) + np.asarray(actual)
    return patient_sums(patients, np.stack([two_hits, total], axis=1), _ratio)


def label_score(patients: Sequence[Any], counts: LabelCounts, average: Average, metric: Metric) -> PatientSums:
    """Prepare precision, recall or F1 of labels, as in :meth:`.LabelCounts.averages`; nan where nothing is positive."""
    parts = [*counts.parts(metric), counts.actual + counts.named]
    if average != "macro":
        parts = [part.sum(axis=1, keepdims=True) for part in parts]
    if average == "example":
        above, below, found = parts
        return mean_score(patients, np.where(found > 0, above / np.maximum(below, 1), 1.0)[:, 0])

    def mean(sums: Array) -> Array:
        above, below, found = np.split(sums, 3, axis=1)
        return _ratio(np.stack([(above / np.maximum(below, 1)).sum(axis=1), (found > 0).sum(axis=1)], axis=1))

    return patient_sums(patients, np.concatenate(parts, axis=1), mean)


def bleu_score(patients: Sequence[Any], statistics: LanguageStatistics, n: int = 4) -> PatientSums:
    """Corpus BLEU-n, which is no mean over reports."""
    lengths = np.stack([statistics.hypothesis_length, statistics.reference_length], axis=1)

    def score(sums: Array) -> Array:
        return bleu_of_sums(sums[:, :4], sums[:, 4:8], sums[:, 8], sums[:, 9])[:, n - 1]

    return patient_sums(patients, np.concatenate([statistics.matches, statistics.guesses, lengths], axis=1), score)


def kappa_score(patients: Sequence[Any], codes: ArrayLike, kinds: int) -> PatientSums:
    """Prepare Cohen's kappa of two readers, or Fleiss's of more; nan where all answers are the same.

    Parameters
    ----------
    patients, codes : sequence of length N, array of shape (N, R)
        Answers of R >= 2 readers about N items, as whole numbers below ``kinds``.
    """
    answers = np.eye(kinds)[np.asarray(codes, dtype=int)]  # (N, R, kinds)
    items, readers, _ = answers.shape
    same = answers.sum(axis=1)
    agreed = (same * (same - 1)).sum(axis=1, keepdims=True) / (readers * (readers - 1))

    def score(sums: Array) -> Array:
        observed, *shares = (sums[:, [0, *range(2, sums.shape[1])]] / np.maximum(sums[:, 1:2], 1)).T
        of_reader = np.reshape(shares, (readers, kinds, -1))
        expected = (of_reader.prod(axis=0) if readers == 2 else of_reader.mean(axis=0) ** 2).sum(axis=0)
        return np.where(expected < 1 - 1e-12, (observed - expected) / np.maximum(1 - expected, 1e-12), np.nan)

    columns = [agreed, np.ones((items, 1)), answers.reshape(items, -1)]
    return patient_sums(patients, np.concatenate(columns, axis=1), score)


def _ratio(sums: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sums[:, 1] > 0, sums[:, 0] / sums[:, 1], np.nan)


class Interval(NamedTuple):
    """A value with the ends of its percentile interval.

    Attributes
    ----------
    value, low, high : float
    """

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """System A against system B on the same patients.

    ``difference`` is A - B with its interval; ``p`` is two-sided; ``win_rate`` is the share of patients, and
    ``replicates_won`` that of bootstrap replicates, in which A scores better, ties half.
    """

    difference: Interval
    p: float
    win_rate: float
    replicates_won: float


def compare(a: Sequence[PatientSums], b: Sequence[PatientSums], *, higher_is_better: bool = True) -> Comparison:
    """Compare two systems on the same patients, seed by seed: each replicate draws the same patients for both.

    The interval is that of :func:`over_seeds`; the rest is over the patients of all seeds together. ``p`` is that of a
    paired permutation test: under the null hypothesis each patient's results may be exchanged between the systems. All
    2^P exchanges are tried where they are no more than :data:`REPLICATES`; else as many random ones, with p = (1 + at
    least as extreme) / (1 + tried).
    """
    value, drawn = _over_seeds(a, b, REPLICATES)
    one, other = _pooled(a), _pooled(b)

    def won(gains: Array) -> float:
        gains = np.nan_to_num(gains) * (1 if higher_is_better else -1)
        return float(((gains > 0) + 0.5 * (gains == 0)).mean())

    p = _permutation_p(one, other, one.value() - other.value())
    return Comparison(interval(value, drawn), p, won(one.of_each - other.of_each), won(drawn))


def _pooled(runs: Sequence[PatientSums]) -> PatientSums:
    """Patients of several seeds as one group."""
    names = tuple((i, name) for i, run in enumerate(runs) for name in run.patients)
    return PatientSums(names, np.concatenate([run.sums for run in runs]), runs[0].score)


def _permutation_p(a: PatientSums, b: PatientSums, observed: float) -> float:
    if not np.isfinite(observed):
        return float("nan")
    patients, change = len(a), b.sums - a.sums
    exact = patients < 63 and 2**patients <= REPLICATES
    generator = np.random.default_rng((SEED, 4))
    at_least, count = 0, 0
    for rows in [2**patients] if exact else _parts(patients, REPLICATES):
        every = (np.arange(rows)[:, None] >> np.arange(patients)) & 1 if exact else None
        swaps = (generator.integers(2, size=(rows, patients)) if every is None else every).astype(np.float64)
        moved = swaps @ change
        differences = a.score(a.sums.sum(axis=0) + moved) - b.score(b.sums.sum(axis=0) - moved)
        # an exchange that leaves a score undefined counts as extreme, so p is never too small
        extreme = ~(np.abs(differences) < abs(observed) - 1e-12 * max(1.0, abs(observed)))
        at_least, count = at_least + int(extreme.sum()), count + len(swaps)
    return at_least / count if exact else (1 + at_least) / (1 + count)


def against_others(of: PatientSums, members: ArrayLike) -> float:
    """Test a group's score against that of all others, by a permutation of who belongs to the group.

    Parameters
    ----------
    of, members : PatientSums, array of shape (P,)
        ``members`` has 1 for the group's patients, else 0.
    """
    group, generator = np.asarray(members, dtype=np.float64)[None], np.random.default_rng((SEED, 5))
    drawn = (generator.permuted(group.repeat(rows, axis=0), axis=1) for rows in _parts(len(of), REPLICATES))
    scores = [of.score(one @ of.sums) - of.score((1 - one) @ of.sums) for one in chain([group], drawn)]
    gaps = np.abs(np.concatenate(scores))
    return float((~(gaps < gaps[0] - 1e-12)).mean()) if np.isfinite(gaps[0]) else float("nan")


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Correct p values of several tests after Holm: sorted upwards, the i-th of m is p (m - i + 1), never falling."""
    if not all(0 <= p <= 1 for p in p_values.values()):
        raise DataError(f"p values must lie in 0..1; got {dict(p_values)}", reason="unusable-p")
    corrected, highest = {}, 0.0
    for i, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        highest = max(highest, min(1.0, p_values[name] * (len(p_values) - i)))
        corrected[name] = highest
    return {name: corrected[name] for name in p_values}


def over_seeds(
    runs: Sequence[PatientSums], against: Sequence[PatientSums] | None = None, *, replicates: int = REPLICATES
) -> Interval:
    """Mean score over seeds, or mean difference to other runs, with a hierarchical interval.

    A replicate draws as many seeds as there are, with replacement, then patients. Seeds that share their patients share
    the draw, since a patient who is hard for one is hard for all. Otherwise each drawn seed draws its own patients.
    """
    return interval(*_over_seeds(runs, against, replicates))


def _over_seeds(
    runs: Sequence[PatientSums], against: Sequence[PatientSums] | None, replicates: int
) -> tuple[float, Array]:
    """The value, and that of each replicate (R,)."""
    if not runs:
        raise DataError("there is no run to combine", reason="no-reports")
    if against is not None and len(against) != len(runs):
        raise DataError(f"{len(runs)} run(s) but {len(against)} to compare: one per seed", reason="unequal-lengths")
    pairs = list(zip(runs, against if against is not None else [None] * len(runs), strict=True))
    if any(other is not None and other.patients != run.patients for run, other in pairs):
        raise DataError("both systems must have reported on the same patients", reason="unequal-patients")
    value = float(np.mean([run.value() - (other.value() if other else 0.0) for run, other in pairs]))
    shared = all(run.patients == runs[0].patients for run in runs)
    chosen = np.random.default_rng((SEED, 1)).integers(len(runs), size=(replicates, len(runs)))
    totals = np.zeros(replicates)
    for s, (run, other) in enumerate(pairs):
        if shared:
            totals += (chosen == s).sum(axis=1) * _replicates(run, other, replicates, (SEED, 2))
            continue
        for slot in range(len(runs)):
            drawn = _replicates(run, other, replicates, (SEED, 3, slot, s))
            totals += np.where(chosen[:, slot] == s, drawn, 0.0)
    return value, totals / len(runs)


def _replicates(run: PatientSums, other: PatientSums | None, replicates: int, seed: Any) -> Array:
    """Scores of drawn patients, (R,), less those of the other run."""
    generator, patients, scores = np.random.default_rng(seed), len(run), []
    for rows in _parts(patients, replicates):
        drawn = generator.integers(patients, size=(rows, patients)) + patients * np.arange(rows)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * patients).reshape(rows, patients).astype(np.float64)
        scores.append(run.score(weights @ run.sums) - (other.score(weights @ other.sums) if other else 0.0))
    return np.concatenate(scores)


def _parts(patients: int, replicates: int) -> Iterator[int]:
    """Rows per part, so that a part stays small whatever the number of patients."""
    rows = max(1, min(replicates, _CELLS // max(1, patients)))
    for start in range(0, replicates, rows):
        yield min(rows, replicates - start)


def interval(value: float, replicates: Array) -> Interval:
    """Give a value its percentile interval.

    Parameters
    ----------
    value, replicates : float, ndarray of shape (R,)
        Undefined replicates are left out.
    """
    defined = replicates[np.isfinite(replicates)]
    if not len(defined) or not np.isfinite(value):
        return Interval(value, float("nan"), float("nan"))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(defined, [tail, 100 - tail])
    return Interval(value, float(low), float(high))
