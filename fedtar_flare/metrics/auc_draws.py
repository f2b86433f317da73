"""AUC of drawn patients: what a bootstrap over patients needs, whose images stay together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
