"""Scores of classifiers that learn task after task: AUC, the area under its learning curve, and tests over seeds."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedtar_flare.core.errors import DataError

Array = NDArray[np.float64]
Curve = Sequence[float | None]
"""AUC at e = 0..E; None where it is not defined."""


def auc(labels: ArrayLike, scores: ArrayLike) -> float | None:
    """Probability that a positive example scores above a negative one, ties half; None with one class.

    Of labels (n,), 0 or 1, and scores (n,): Hanley and McNeil, Radiology 1982. DataError: ``unequal-lengths``, or
    ``non-finite-score``.
    """
    truth, value = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    if truth.shape != value.shape or truth.ndim != 1:
        raise DataError(f"labels of shape {truth.shape} for scores of {value.shape}", reason="unequal-lengths")
    if not np.isfinite(value).all():
        raise DataError("a score is not finite (NaN or infinity)", reason="non-finite-score")
    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives:
        return None
    _, place, many = np.unique(value, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(many) - (many - 1) / 2
    above = mean_rank[place][truth].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def auc_of_draws(labels: Sequence[int], scores: Array, places: Sequence[int], draws: Array) -> Array:
    """AUC (R, C) of R draws of patients, for C columns of scores of the same images; nan where a class is missing.

    A patient who is drawn k times counts as k, so each pair of a positive and a negative image counts as the product
    of their patients' draws::

        AUC_r = sum_pq w_rp A_pq w_rq / (sum_p w_rp n+_p)(sum_q w_rq n-_q)

    with A_pq the pairs of patients p and q in which the positive image scores higher, ties half. Of n images there are
    ``labels`` (n,), 0 or 1, ``scores`` (n, C), and ``places`` (n,), the column of each image's patient in ``draws``
    (R, P), which says how often each patient is drawn.
    """
    truth, whose = np.asarray(labels).astype(bool), np.asarray(places)
    patients = np.eye(draws.shape[1])
    positive, negative = patients[whose[truth]], patients[whose[~truth]]
    pairs = (draws @ positive.sum(0)) * (draws @ negative.sum(0))
    found = np.full((len(draws), scores.shape[1]), np.nan)
    for c in range(scores.shape[1]):
        high, low = scores[truth, c, None], scores[None, ~truth, c]
        above = positive.T @ ((high > low) + 0.5 * (high == low)) @ negative
        np.divide(((draws @ above) * draws).sum(1), pairs, out=found[:, c], where=pairs > 0)
    return found


def lca(curve: Curve) -> float | None:
    """Area under the learning curve: mean AUC over e = 1..E; None where the curve is not defined at some epoch."""
    counted = [value for value in curve[1:] if value is not None]
    return float(np.mean(counted)) if counted and len(counted) == len(curve) - 1 else None


def epochs_to(curve: Curve, target: float) -> int | None:
    """First epoch whose AUC is at least ``target``; None if there is none."""
    return next((e for e, value in enumerate(curve) if value is not None and value >= target), None)


def best_epoch(curve: Curve) -> int | None:
    """The (first) epoch of the highest AUC; None where no epoch has one."""
    defined = [(value, -e) for e, value in enumerate(curve) if value is not None]
    return -max(defined)[1] if defined else None


def welch(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided p of Welch's test of two samples of unequal variance (Biometrika 1947), such as one score a seed.

    DataError ``too-few-seeds`` with fewer than two numbers in either.
    """
    from scipy import stats

    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if min(first.size, second.size) < 2:
        raise DataError("Welch's test needs at least two seeds on either side", reason="too-few-seeds")
    if first.var() == 0 == second.var():  # where scipy's t is not defined
        return float(first.mean() == second.mean())
    return float(stats.ttest_ind(first, second, equal_var=False).pvalue)
