"""How right a labeler is on a sample that staff checked, and F1 of drafts corrected by that sample.

F1 by a labeler is biased by the labeler's errors, and more reports do not help. The difference estimator adds to the
sums of all cases what staff changed in the checked ones, scaled up to all (Cochran, Sampling Techniques, 1977, Chapter
12; as prediction-powered inference: Angelopoulos et al., Science 2023). Patients are drawn with their checked cases, so
that the interval has both the patients and the labeler in it. It takes the checked cases to be drawn at random and
staff to be right; errors may depend on the text and on one another, as where a draft copies its reference's words.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedtar_flare.metrics.agreement import Array, LabelCounts
from fedtar_flare.metrics.significance import Interval, over_seeds, patient_sums, share_of_sums


class LabelNoise(NamedTuple):
    """A labeler's precision and recall against staff, and F1 of drafts as it was labelled and as it is corrected."""

    checked: int
    precision: Interval
    recall: Interval
    labelled: Interval
    corrected: Interval


def label_noise(patients: Sequence[Any], labelled: LabelCounts, checked: Array) -> dict[str, LabelNoise]:
    """Compare a labeler's labels of N cases, each a reference with its draft, with what staff say of both texts.

    Parameters
    ----------
    patients : sequence
        The patient of each case (N).
    labelled : LabelCounts
        The labeler's labels of references and drafts (N, K).
    checked : array
        Staff's labels of reference and draft (N, 2, K): 1 where a text states a class, else 0; a case with a nan is not
        checked.

    Returns
    -------
    dict of str to LabelNoise
        For all classes together (``micro``), and for each by name; shares from 0 to 1 with 95 % intervals.
    """
    by_labeler = np.stack([labelled.actual, labelled.named], axis=1)
    looked = np.asarray(np.isfinite(checked).all(axis=(1, 2)))
    by_staff, seen = (np.where(looked[:, None, None], labels, 0.0) for labels in (checked, by_labeler))
    found = {}
    every = {"micro": [*range(len(labelled.classes))]} | {name: [k] for k, name in enumerate(labelled.classes)}
    for name, of in every.items():
        right = (by_staff * seen)[..., of].sum(axis=(1, 2))
        sides = [np.column_stack([right, side[..., of].sum(axis=(1, 2))]) for side in (seen, by_staff)]
        sums = _f1_sums(by_labeler[..., of])
        changes = _f1_sums(by_staff[..., of]) - _f1_sums(seen[..., of])
        columns = np.column_stack([sums, changes, looked, np.ones(len(looked))])
        scores = (*((rows, share_of_sums) for rows in (*sides, sums)), (columns, _corrected))
        intervals = (over_seeds([patient_sums(patients, rows, score)], share=True) for rows, score in scores)
        found[name] = LabelNoise(int(looked.sum()), *intervals)
    return found


def _f1_sums(labels: Array) -> Array:
    """Numerator and denominator of F1 (N, 2) by the labels of both texts (N, 2, K)."""
    return np.stack([2 * labels.prod(axis=1).sum(axis=1), labels.sum(axis=(1, 2))], axis=1)


def _corrected(sums: Array) -> Array:
    """F1 (R,) by sums (R, 6): two as labelled, what staff changed in them, how many cases were checked, and all."""
    above, below, above_changed, below_changed, checked, cases = sums.T
    scale = cases / np.maximum(checked, 1)
    f1 = share_of_sums(np.stack([above + scale * above_changed, below + scale * below_changed], axis=1))
    return np.where(checked > 0, np.clip(f1, 0.0, 1.0), np.nan)
