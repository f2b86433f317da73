"""Scores of classifiers that learn task after task: AUC, the area under the learning curve, and a test over seeds."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedtar_flare.core.errors import DataError

Array = NDArray[np.float64]
Curve = Sequence[float | None]  # AUC at e = 0..E; None where it is undefined


def auc(labels: ArrayLike, scores: ArrayLike) -> float | None:
    """Probability that a positive scores above a negative, ties half (Hanley and McNeil 1982); None without either."""
    from sklearn.metrics import roc_auc_score

    truth, value = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    if not np.isfinite(value).all():
        raise DataError("a score is not finite (NaN or infinity)", reason="non-finite-score")
    return float(roc_auc_score(truth, value)) if truth.any() and not truth.all() else None


def auc_of_draws(labels: Sequence[int], scores: Array, patients: Sequence[int], draws: Array) -> Array:
    """AUC (R, C) of C columns of scores (n, C), with each patient counted as often as ``draws`` (R, P) has it.

    A pair of a positive and a negative image counts as the product of their patients' draws::

        AUC_r = sum_pq w_rp A_pq w_rq / (sum_p w_rp n+_p)(sum_q w_rq n-_q)

    with A_pq the pairs of patients p and q in which the positive image scores higher, ties half; nan without pairs.
    """
    truth, columns, one_hot = np.asarray(labels).astype(bool), np.asarray(patients), np.eye(draws.shape[1])
    positive, negative = one_hot[columns[truth]], one_hot[columns[~truth]]
    pairs = (draws @ positive.sum(0)) * (draws @ negative.sum(0))
    aucs = np.full((len(draws), scores.shape[1]), np.nan)
    for c in range(scores.shape[1]):
        high, low = scores[truth, c, None], scores[None, ~truth, c]
        above = positive.T @ ((high > low) + 0.5 * (high == low)) @ negative
        np.divide(((draws @ above) * draws).sum(1), pairs, out=aucs[:, c], where=pairs > 0)
    return aucs


def lca(curve: Curve) -> float | None:
    """Area under the learning curve: mean AUC over e = 1..E."""
    counted = [value for value in curve[1:] if value is not None]
    return float(np.mean(counted)) if counted and len(counted) == len(curve) - 1 else None


def epochs_to(curve: Curve, target: float) -> int | None:
    """Find the first epoch whose AUC reaches a target."""
    return next((e for e, value in enumerate(curve) if value is not None and value >= target), None)


def welch(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided p of Welch's test of two samples of unequal variance (Biometrika 1947)."""
    from scipy import stats

    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.var() == 0 == second.var():  # where scipy's t is not defined
        return float(first.mean() == second.mean())
    return float(stats.ttest_ind(first, second, equal_var=False).pvalue)
