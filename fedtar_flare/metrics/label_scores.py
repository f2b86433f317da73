"""Agreement of labels: precision, recall and F1 of classes between two lists of labelled reports."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.minimum_cell import full_cells, round_share

Array = NDArray[np.float64]
Labels = Mapping[str, str]
"""Class to ``positive``, ``negative``, ``uncertain`` or ``blank``."""
Average = Literal["micro", "macro", "example"]
Metric = Literal["precision", "recall", "f1"]
AVERAGES: tuple[Average, ...] = ("micro", "macro", "example")
METRICS: tuple[Metric, ...] = ("precision", "recall", "f1")

CERTAIN = frozenset({"positive"})
"""Only what is stated counts as positive."""
CERTAIN_OR_NOT = frozenset({"positive", "uncertain"})
"""What is doubted counts as positive too."""


@dataclass(frozen=True)
class LabelCounts:
    """Arrays (N, K) of N reports and K classes, whose sums are all that precision, recall and F1 need.

    1 where a class is positive on both sides, in the prediction, in the truth.
    """

    classes: tuple[str, ...]
    hits: Array
    named: Array
    there: Array

    def of_classes(self) -> dict[str, dict[str, float | None]]:
        """Per class ``precision``, ``recall``, ``f1`` (None where undefined) and ``n``, the reports that have it."""
        scores = {}
        for k, name in enumerate(self.classes):
            hits, named, there = (float(a[:, k].sum()) for a in (self.hits, self.named, self.there))
            scores[name] = {
                "precision": hits / named if named else None,
                "recall": hits / there if there else None,
                "f1": 2 * hits / (named + there) if named + there else None,
                "n": there,
            }
        return scores

    def parts(self, metric: Metric) -> tuple[Array, Array]:
        """Numerator and denominator of a metric, both (N, K)."""
        if metric == "f1":
            return 2 * self.hits, self.named + self.there
        return self.hits, self.named if metric == "precision" else self.there

    def averages(self, least: int = 1) -> dict[Average, dict[Metric, float]]:
        """``precision``, ``recall`` and ``f1`` by ``micro``, ``macro`` and ``example`` average.

        Micro: over all (report, class) pairs. Macro: the mean of the classes that are positive on any side. Example:
        the mean of the reports; one of which no class is positive on either side counts as 1. What is undefined
        otherwise (no class named, none there) counts as 0. With a minimum cell ``least``, shares of classes are rounded
        each by its own number of reports, since one report moves them by more than 1 / N.
        """
        found, something = ((self.named + self.there).sum(axis=axis) > 0 for axis in (0, 1))
        means: dict[Average, dict[Metric, float]] = {kind: {} for kind in AVERAGES}
        for metric in METRICS:
            above, below = self.parts(metric)
            pairs = 2 if metric == "f1" else 1

            def rounded(a: float, b: float, pairs: int = pairs) -> float:
                return round_share(a / max(b, 1), int(b) // pairs, least)

            of_classes = [rounded(*one) for one in zip(above.sum(0)[found], below.sum(0)[found], strict=True)]
            means["micro"][metric] = float(rounded(above.sum(), below.sum()))
            means["macro"][metric] = float(np.mean(of_classes or [0.0]))
            of_reports = np.where(something, above.sum(1) / np.maximum(below.sum(1), 1), 1.0)
            means["example"][metric] = float(of_reports.mean())
        return means

    def guarded(self, patients: Sequence[str], least: int) -> Self:
        """Without classes that fewer than ``least`` patients have; one that fewer patients' reports name is not named.

        Drafts that name a class of one patient's alone would tell by a precision whether that patient has it.
        """

        def full(side: Array) -> set[int]:
            return full_cells(((k, patients[i]) for i, k in np.argwhere(side).tolist()), least)

        if least == 1:
            return self
        kept, named = sorted(full(self.there)), full(self.named)
        said = np.array([k in named for k in kept])
        classes = tuple(self.classes[k] for k in kept)
        hits, there = self.hits[:, kept], self.there[:, kept]
        return type(self)(classes, hits * said, self.named[:, kept] * said, there)


def label_code(labels: Labels) -> str:
    """Labels as one text, a letter for each class in its order: the first of ``positive`` and so on."""
    return "".join(label[0] for label in labels.values())


def label_counts(
    classes: Sequence[str], reports: Sequence[Sequence[str]], positive: AbstractSet[str] = CERTAIN
) -> LabelCounts:
    """Agreement of N reports: of each the codes (:func:`label_code`) of the reference and of the generated text.

    ``positive`` is :data:`CERTAIN` or :data:`CERTAIN_OR_NOT`. DataError: ``no-reports``, ``unequal-classes``.
    """
    if not reports:
        raise DataError("there is no report to score", reason="no-reports")
    if any(len(code) != len(classes) for codes in reports for code in codes):
        raise DataError("every report must be labelled with the same classes", reason="unequal-classes")
    letters = {label[0] for label in positive}
    found = np.array([[[one in letters for one in code] for code in codes] for codes in reports], dtype=np.float64)
    there, named = found[:, 0], found[:, 1]
    return LabelCounts(tuple(classes), there * named, named, there)
