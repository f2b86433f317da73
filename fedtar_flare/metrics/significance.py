"""Intervals and tests for scores of reports, over patients and over seeds.

A patient's reports are not independent, so patients are drawn; of each only sums are kept, from which the score of any
set of patients follows.

Efron and Tibshirani, An Introduction to the Bootstrap, 1993 (percentile interval, Section 13.3; permutation test,
Chapter 15). Holm, Scandinavian Journal of Statistics 1979. Kappa: Cohen 1960, and Fleiss 1971.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedtar_flare.core.errors import DataError
from fedtar_flare.metrics.agreement import CERTAIN, CERTAIN_OR_NOT, Average, LabelCounts, Metric, label_counts
from fedtar_flare.metrics.labeler import classes_of
from fedtar_flare.metrics.language import LanguageStatistics, bleu_of_sums
from fedtar_flare.metrics.registry import EFFICACY

Array = NDArray[np.float64]
Key = TypeVar("Key")
Score = Callable[[Array], Array]  # from sums (R, K) to scores (R,); nan where a score is undefined

REPLICATES, CONFIDENCE = 5_000, 0.95
SEED = 20_240_229  # of all draws
_CELLS = 2_000_000  # numbers drawn at a time


@dataclass(frozen=True)
class PatientSums:
    """What each of P patients adds to a score of the corpus, as ``sums`` (P, K)."""

    patients: tuple[Any, ...]
    sums: Array
    score: Score

    def __post_init__(self) -> None:
        if not self.patients:
            raise DataError("there is no patient to draw", reason="no-reports")
        if self.sums.ndim != 2 or len(self.sums) != len(self.patients) or not np.isfinite(self.sums).all():
            text = f"sums must be finite and of shape ({len(self.patients)}, K); got shape {self.sums.shape}"
            raise DataError(text, reason="unusable-sums")

    def __len__(self) -> int:
        return len(self.patients)

    def value(self) -> float:
        """The score of all patients together."""
        return float(self.score(self.sums.sum(axis=0, keepdims=True))[0])

    @property
    def of_each(self) -> Array:
        """The score of each single patient, (P,)."""
        return self.score(self.sums)


def patient_sums(patients: Sequence[Any], reports: ArrayLike, score: Score) -> PatientSums:
    """Sums of ``reports`` (N, K) by patient, given the patient of each (N,)."""
    rows = np.asarray(reports, dtype=np.float64)
    names = sorted(set(patients))
    index = {name: i for i, name in enumerate(names)}
    sums = np.zeros((len(names), rows.shape[1]))
    np.add.at(sums, [index[name] for name in patients], rows)
    return PatientSums(tuple(names), sums, score)


def mean_score(patients: Sequence[Any], values: ArrayLike) -> PatientSums:
    """A mean over reports, such as ROUGE-L or CIDEr with fixed document frequencies."""
    column = np.asarray(values, dtype=np.float64)
    return patient_sums(patients, np.stack([column, np.ones_like(column)], axis=1), share_of_sums)


def label_score(patients: Sequence[Any], counts: LabelCounts, average: Average, metric: Metric) -> PatientSums:
    """Precision, recall or F1 of labels, as in :meth:`.LabelCounts.averages`; nan where nothing is positive."""
    parts = [*counts.parts(metric), counts.actual + counts.named]
    if average != "macro":
        parts = [part.sum(axis=1, keepdims=True) for part in parts]
    if average == "example":
        above, below, positive = parts
        return mean_score(patients, np.where(positive > 0, above / np.maximum(below, 1), 1.0)[:, 0])

    def mean(sums: Array) -> Array:
        above, below, positive = np.split(sums, 3, axis=1)
        return share_of_sums(np.stack([(above / np.maximum(below, 1)).sum(axis=1), (positive > 0).sum(axis=1)], axis=1))

    return patient_sums(patients, np.concatenate(parts, axis=1), mean)


def bleu_score(patients: Sequence[Any], statistics: LanguageStatistics, n: int = 4) -> PatientSums:
    """Corpus BLEU-n, which is no mean over reports."""
    lengths = np.stack([statistics.hypothesis_length, statistics.reference_length], axis=1)

    def score(sums: Array) -> Array:
        return bleu_of_sums(sums[:, :4], sums[:, 4:8], sums[:, 8], sums[:, 9])[:, n - 1]

    return patient_sums(patients, np.concatenate([statistics.matches, statistics.guesses, lengths], axis=1), score)


def kappa_score(patients: Sequence[Any], codes: ArrayLike, kinds: int) -> PatientSums:
    """Cohen's kappa of two readers, or Fleiss's of more, by ``codes`` (N, R) below ``kinds``; nan if all are equal."""
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


def kendall_tau(patients: ArrayLike, first: ArrayLike, second: ArrayLike) -> "Interval":
    """Kendall's tau-b of two columns of reports, (N,), with its interval over patients; nan where one is constant."""
    names, whose = np.unique(np.asarray(patients), return_inverse=True)
    orders = [np.sign(np.subtract.outer(column, column)) for column in map(np.asarray, (first, second))]
    pairs = (orders[0] * orders[1], np.abs(orders[0]), np.abs(orders[1]))

    def tau(counts: Array) -> Array:
        agreed, *ordered = (((counts @ of) * counts).sum(axis=1) for of in pairs)
        return share_of_sums(np.stack([agreed, np.sqrt(ordered[0] * ordered[1])], axis=1))

    drawn = np.random.default_rng((SEED, 6)).multinomial(len(names), np.full(len(names), 1 / len(names)), REPLICATES)
    return interval(float(tau(np.ones((1, len(whose))))[0]), tau(drawn[:, whose].astype(np.float64)))


def share_of_sums(sums: Array) -> Array:
    """The first column by the second; nan where that is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sums[:, 1] > 0, sums[:, 0] / sums[:, 1], np.nan)


class Interval(NamedTuple):
    """A value with the ends of its percentile interval."""

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """A against B on the same patients: A - B, two-sided p, the shares of patients and of replicates that A won."""

    difference: Interval
    p: float
    win_rate: float
    replicates_won: float


def compare(
    a: Sequence[PatientSums], b: Sequence[PatientSums], *, higher_is_better: bool = True, tie: float = 0.0
) -> Comparison:
    """Compare two systems on the same patients, seed by seed: each replicate draws the same patients for both.

    The interval is that of :func:`over_seeds`; the rest is over patients, each with the results of all seeds. ``p`` is
    that of a paired permutation test: under the null hypothesis each patient's results may be exchanged between the
    systems. All 2^P exchanges are tried where they are no more than :data:`REPLICATES`; else as many random ones, with
    p = (1 + at least as extreme) / (1 + tried). Scores no further apart than ``tie`` are equal: nobody wins, and ``p``
    is 1. Patients, and replicates, in which either system has no score do not count in the shares.
    """
    value, drawn = _over_seeds(a, b, REPLICATES)
    first, second = _pooled(a), _pooled(b)

    def won(gains: Array) -> float:
        gains = gains[np.isfinite(gains)] * (1 if higher_is_better else -1)
        gains[np.abs(gains) <= tie] = 0
        return float(((gains > 0) + 0.5 * (gains == 0)).mean()) if len(gains) else float("nan")

    observed = first.value() - second.value()
    p = 1.0 if abs(observed) <= tie else _permutation_p(first, second, observed)
    return Comparison(interval(value, drawn), p, won(first.of_each - second.of_each), won(drawn))


def _pooled(runs: Sequence[PatientSums]) -> PatientSums:
    """Patients with the results of all seeds, which are exchanged together: who is hard for one is hard for all."""
    names = [name for run in runs for name in run.patients]
    return patient_sums(names, np.concatenate([run.sums for run in runs]), runs[0].score)


def _permutation_p(a: PatientSums, b: PatientSums, observed: float) -> float:
    if not np.isfinite(observed):
        return float("nan")
    patients, change = len(a), b.sums - a.sums
    exact = patients < 63 and 2**patients <= REPLICATES
    generator, at_least, count = np.random.default_rng((SEED, 4)), 0, 0
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
    """p of a group's score against all others', by a permutation of who belongs to it (``members`` (P,), 1 or 0)."""
    group, generator = np.asarray(members, dtype=np.float64)[None], np.random.default_rng((SEED, 5))
    drawn = (generator.permuted(group.repeat(rows, axis=0), axis=1) for rows in _parts(len(of), REPLICATES))
    scores = [of.score(who @ of.sums) - of.score((1 - who) @ of.sums) for who in chain([group], drawn)]
    gaps = np.abs(np.concatenate(scores))
    return float((~(gaps < gaps[0] - 1e-12)).mean()) if np.isfinite(gaps[0]) else float("nan")


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Correct p values of several tests after Holm: sorted upwards, the i-th of m is p (m - i + 1), never falling."""
    if not all(0 <= p <= 1 for p in p_values.values()):
        raise DataError(f"p values must lie in 0..1; got {dict(p_values)}", reason="unusable-p")
    upwards = sorted(p_values, key=lambda name: p_values[name])
    steps = [min(1.0, p_values[name] * (len(upwards) - i)) for i, name in enumerate(upwards)]
    corrected = dict(zip(upwards, accumulate(steps, max), strict=True))
    return {name: corrected[name] for name in p_values}


def over_seeds(runs: Sequence[PatientSums], *, replicates: int = REPLICATES, share: bool = False) -> Interval:
    """Mean score over seeds with a hierarchical interval; of fewer than two patients with a score there is none.

    A replicate draws as many seeds as there are, with replacement, then patients. Seeds that share their patients share
    the draw, since a patient who is hard for one is hard for all. Otherwise each drawn seed draws its own patients. Of
    a ``share`` that is 0 or 1 in all patients no draw tells how sure that is, and :func:`wilson` does.
    """
    found = interval(*_over_seeds(runs, None, replicates))
    if share and found.value in (0, 1) and not found.low < found.high:
        having = int(np.isfinite(_pooled(runs).of_each).sum())
        return Interval(found.value, *wilson(round(found.value) * having, having))
    return found


def wilson(right: int, of: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    from scipy.stats import binomtest

    low, high = binomtest(right, of).proportion_ci(method="wilson")
    return float(low), float(high)


def _over_seeds(
    runs: Sequence[PatientSums], against: Sequence[PatientSums] | None, replicates: int
) -> tuple[float, Array]:
    """The value, and that of each replicate (R,)."""
    if not runs:
        raise DataError("there is no run to combine", reason="no-reports")
    pairs = list(zip(runs, against if against is not None else [None] * len(runs), strict=True))
    if any(other is not None and other.patients != run.patients for run, other in pairs):
        raise DataError("both systems must have reported on the same patients", reason="unequal-patients")
    value = float(np.mean([run.value() - (other.value() if other else 0.0) for run, other in pairs]))
    shared = all(run.patients == runs[0].patients for run in runs)
    if any(_pooled(of).sums.any(axis=1).sum() < 2 for of in (runs, against or runs)):
        return value, np.full(replicates, np.nan)  # one patient does not tell how patients differ
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
    """A value with its percentile interval; undefined replicates (R,) are left out."""
    defined = replicates[np.isfinite(replicates)]
    if not len(defined) or not np.isfinite(value):
        return Interval(value, float("nan"), float("nan"))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(defined, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


Row = Mapping[str, Any]
Units = Literal["patients", "studies"]  # what is drawn in a bootstrap
SumsOf = Callable[..., PatientSums | None]
"""From rows, and by what they are drawn (patients by default), to their sums; None where no row has the score."""


def _drawn(rows: Sequence[Row], units: Units) -> list[tuple[str, ...]]:
    """The patient or study of each row."""
    keys = ("site", "patient_id", "visit_id")[: 2 if units == "patients" else 3]
    return [tuple(str(row.get(key)) for key in keys) for row in rows]


def mean_of(name: str, rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
    """Mean of a column of rows, of those that have it."""
    known = [row for row in rows if row.get(name) is not None]
    return mean_score(_drawn(known, units), [row[name] for row in known]) if known else None


def _bleu(n: int, rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
    columns = {name: np.asarray([row[name] for row in rows]) for name in LanguageStatistics.__dataclass_fields__}
    return bleu_score(_drawn(rows, units), LanguageStatistics(**columns), n) if rows else None


def finding_f1(
    truth: str,
    named: str,
    rows: Sequence[Row],
    units: Units = "patients",
    findings: Collection[str] = (),
    average: Average = "micro",
) -> PatientSums | None:
    """F1 of two columns of findings or changes; of some ``findings`` alone where they are given, as a mean needs."""
    known = [row for row in rows if row.get(truth) is not None]
    actual, drafted = (
        [{tuple(x) if isinstance(x, list) else x for x in row[column]} for row in known] for column in (truth, named)
    )
    counts = LabelCounts.of_findings(actual, drafted, findings or {*chain(*actual, *drafted)})
    return label_score(_drawn(known, units), counts, average, "f1") if known else None


def _share_of(column: str, rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
    """Share of what counts, of which a column has [those that are so, all] of each report."""
    known = [row for row in rows if row.get(column) is not None]
    return patient_sums(_drawn(known, units), [row[column] for row in known], share_of_sums) if known else None


def _labels(
    labeler: str, average: Average, metric: Metric, uncertain: bool, rows: Sequence[Row], units: Units = "patients"
) -> PatientSums | None:
    """Agreement of a labeler's labels of both texts."""
    known = [row for row in rows if labeler in row.get("labels", ())]
    if not known:
        return None
    codes = [row["labels"][labeler] for row in known]
    counts = label_counts(classes_of(labeler), codes, CERTAIN_OR_NOT if uncertain else CERTAIN)
    return label_score(_drawn(known, units), counts, average, metric)


SUMS: dict[str, SumsOf] = {
    "clinical_score": partial(mean_of, "clinical_score"),
    **{name: partial(_share_of, name) for name in ("degree_accuracy", "change_accuracy")},
    "finding_change_micro_f1": partial(finding_f1, "changes", "changes_in_text"),
    "contradictions": partial(_share_of, "contradictions"),
    **{f"bleu_{n}": partial(_bleu, n) for n in (1, 2, 3, 4)},
    **{name: partial(mean_of, name) for name in ("rouge_l", "cider", "token_loss")},
    "finding_f1": partial(finding_f1, "findings", "findings_in_text"),
    "chexpert_rules_f1": partial(_labels, "chexpert-rules", "micro", "f1", False),
    "ctrate_rules_f1": partial(_labels, "ctrate-rules", "micro", "f1", False),
    **{name: partial(_labels, *of) for name, of in EFFICACY.items()},
}
"""By the score's name in the registry."""
