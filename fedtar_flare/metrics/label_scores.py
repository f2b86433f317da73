"""Agreement of labels: precision, recall and F1 of classes between two lists of labelled reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedtar_flare.errors import DataError
from fedtar_flare.metrics.pairs import require_pairs

Array = NDArray[np.float64]
Labels = Mapping[str, str]
"""Class to ``positive``, ``negative``, ``uncertain`` or ``blank``."""

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

    def __len__(self) -> int:
        return len(self.hits)

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

    def micro_f1(self) -> float | None:
        """F1 over all (report, class) pairs; None where no class is positive on any side."""
        total = float(self.named.sum() + self.there.sum())
        return 2 * float(self.hits.sum()) / total if total else None

    def macro_f1(self) -> float | None:
        """Mean F1 of the classes that are positive on any side at all; None without any."""
        defined = [f1 for scores in self.of_classes().values() if (f1 := scores["f1"]) is not None]
        return sum(defined) / len(defined) if defined else None

    def example_f1(self) -> float:
        """Mean of the reports' own F1; 1 where no class is positive on either side."""
        total = self.named.sum(axis=1) + self.there.sum(axis=1)
        return float(np.mean(np.where(total > 0, 2 * self.hits.sum(axis=1) / np.maximum(total, 1), 1.0)))


def label_counts(
    truth: Sequence[Labels], predicted: Sequence[Labels], *, positive: AbstractSet[str] = CERTAIN
) -> LabelCounts:
    """Counts of agreement of N reports' labels; ``positive`` is :data:`CERTAIN` or :data:`CERTAIN_OR_NOT`.

    DataError: ``no-reports``, ``unequal-lengths``, or ``unequal-classes``.
    """
    require_pairs(truth, predicted)
    classes = tuple(truth[0])
    if any(set(labels) != set(classes) for labels in (*truth, *predicted)):
        raise DataError("every report must be labelled with the same classes", reason="unequal-classes")
    there, named = (
        np.array([[labels[name] in positive for name in classes] for labels in side], dtype=np.float64)
        for side in (truth, predicted)
    )
    return LabelCounts(classes, there * named, named, there)


def label_counts_of_texts(
    labeler: Callable[[str], Labels],
    references: Sequence[str],
    hypotheses: Sequence[str],
    *,
    positive: AbstractSet[str] = CERTAIN,
) -> LabelCounts:
    """The same for generated reports against references, both labelled by ``labeler``."""
    return label_counts(
        [labeler(text) for text in references], [labeler(text) for text in hypotheses], positive=positive
    )
