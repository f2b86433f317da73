"""Agreement of findings and of labels: precision, recall and F1 of what drafts name against what is true."""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.minimum_cell import full_cells, round_share
from fedtar_flare.metrics.language import require_pairs

Array = NDArray[np.float64]
Findings = Sequence[AbstractSet[Any]]
"""Findings, or pairs of a finding and a direction, of each of N reports."""
Average = Literal["micro", "macro", "example"]
Metric = Literal["precision", "recall", "f1"]
AVERAGES: tuple[Average, ...] = ("micro", "macro", "example")
METRICS: tuple[Metric, ...] = ("precision", "recall", "f1")

CERTAIN = frozenset({"positive"})
"""Only what is stated counts as positive."""
CERTAIN_OR_NOT = frozenset({"positive", "uncertain"})
"""What is doubted counts as positive too."""


def finding_f1(truth: Findings, predicted: Findings) -> dict[str, float | None]:
    """Micro ``finding_precision``, ``finding_recall`` and ``finding_f1`` over all pairs of a report and a finding.

    None where undefined: precision if nothing is predicted, recall if nothing is true, F1 if both. DataError:
    ``unequal-lengths`` or ``no-reports``.
    """
    require_pairs(truth, predicted)
    actual, named, hits = sum(map(len, truth)), sum(map(len, predicted)), 0
    for t, p in zip(truth, predicted, strict=True):
        hits += len(t & p)
    return {
        "finding_precision": hits / named if named else None,
        "finding_recall": hits / actual if actual else None,
        "finding_f1": 2 * hits / (actual + named) if actual + named else None,
    }


def known_and_new(truth: Findings, predicted: Findings, known: AbstractSet[str]) -> dict[str, float | None]:
    """``finding_f1``, ``finding_f1_known`` and ``finding_f1_new``, ``finding_recall_new``, see :func:`finding_f1`.

    ``known`` are the findings that the warm start has seen; the others are new to it.
    """
    of_known = finding_f1([t & known for t in truth], [p & known for p in predicted])
    of_new = finding_f1([t - known for t in truth], [p - known for p in predicted])
    return {
        "finding_f1": finding_f1(truth, predicted)["finding_f1"],
        "finding_f1_known": of_known["finding_f1"],
        "finding_f1_new": of_new["finding_f1"],
        "finding_recall_new": of_new["finding_recall"],
    }


def finding_counts(truth: Findings, predicted: Findings) -> dict[str, tuple[int, int, int]]:
    """Count reports by finding."""
    actual, named, hits = Counter[str](), Counter[str](), Counter[str]()
    for t, p in zip(truth, predicted, strict=True):
        actual.update(t)
        named.update(p)
        hits.update(t & p)
    return {name: (actual[name], named[name], hits[name]) for name in sorted(actual | named)}


@dataclass(frozen=True)
class LabelCounts:
    """Arrays (N, K) of N reports and K classes, from whose sums precision, recall and F1 follow.

    Attributes
    ----------
    classes : tuple of str
    hits, named, actual : ndarray of shape (N, K)
        1 where a class is positive in both texts, in the draft, in the reference.
    """

    classes: tuple[str, ...]
    hits: Array
    named: Array
    actual: Array

    def of_classes(self) -> dict[str, dict[str, float | None]]:
        """By class ``precision``, ``recall``, ``f1`` (None where undefined) and ``n``, the reports that have it."""
        scores = {}
        for k, name in enumerate(self.classes):
            hits, named, actual = (float(a[:, k].sum()) for a in (self.hits, self.named, self.actual))
            scores[name] = {
                "precision": hits / named if named else None,
                "recall": hits / actual if actual else None,
                "f1": 2 * hits / (named + actual) if named + actual else None,
                "n": actual,
            }
        return scores

    def parts(self, metric: Metric) -> tuple[Array, Array]:
        """Numerator and denominator of a metric, both (N, K)."""
        if metric == "f1":
            return 2 * self.hits, self.named + self.actual
        return self.hits, self.named if metric == "precision" else self.actual

    def averages(self, least: int = 1) -> dict[Average, dict[Metric, float]]:
        """``precision``, ``recall`` and ``f1`` by ``micro``, ``macro`` and ``example`` average.

        Micro: over all (report, class) pairs. Macro: the mean of the classes that are positive in any text. Example:
        the mean of the reports; one without a positive class in either text counts as 1. What is undefined otherwise
        (no class named, none true) counts as 0. With a minimum cell ``least``, shares of classes are each rounded by
        the class's own number of reports, since one report moves them by more than 1 / N.
        """
        positive, something = ((self.named + self.actual).sum(axis=axis) > 0 for axis in (0, 1))
        means: dict[Average, dict[Metric, float]] = {average: {} for average in AVERAGES}
        for metric in METRICS:
            above, below = self.parts(metric)
            pairs = 2 if metric == "f1" else 1

            def rounded(a: float, b: float, pairs: int = pairs) -> float:
                return round_share(a / max(b, 1), int(b) // pairs, least)

            of_classes = [rounded(*sums) for sums in zip(above.sum(0)[positive], below.sum(0)[positive], strict=True)]
            means["micro"][metric] = float(rounded(above.sum(), below.sum()))
            means["macro"][metric] = float(np.mean(of_classes or [0.0]))
            of_reports = np.where(something, above.sum(1) / np.maximum(below.sum(1), 1), 1.0)
            means["example"][metric] = float(of_reports.mean())
        return means

    def guarded(self, patients: Sequence[str], least: int) -> Self:
        """Without classes of fewer than ``least`` patients; one that fewer patients' drafts name counts as not named.

        The precision of a class that one patient's drafts name would reveal whether that patient has it.
        """

        def full(side: Array) -> set[int]:
            return full_cells(((k, patients[i]) for i, k in np.argwhere(side).tolist()), least)

        if least == 1:
            return self
        kept, named = sorted(full(self.actual)), full(self.named)
        counts = np.array([k in named for k in kept])
        classes = tuple(self.classes[k] for k in kept)
        return type(self)(classes, self.hits[:, kept] * counts, self.named[:, kept] * counts, self.actual[:, kept])


def label_code(labels: Mapping[str, str]) -> str:
    """Labels by class as one text, a letter for each class in its order: the first of ``positive`` and so on."""
    return "".join(label[0] for label in labels.values())


def label_counts(
    classes: Sequence[str], codes: Sequence[Sequence[str]], positive: AbstractSet[str] = CERTAIN
) -> LabelCounts:
    """Count the agreement of labels in N reports."""
    if not codes:
        raise DataError("there is no report to score", reason="no-reports")
    if any(len(code) != len(classes) for pair in codes for code in pair):
        raise DataError("every report must be labelled with the same classes", reason="unequal-classes")
    letters = {label[0] for label in positive}
    sides = np.array([[[one in letters for one in code] for code in pair] for pair in codes], dtype=np.float64)
    actual, named = sides[:, 0], sides[:, 1]
    return LabelCounts(tuple(classes), actual * named, named, actual)
