"""Agreement of labels: precision, recall and F1 of classes between two lists of labelled reports."""

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

    def averages(self) -> dict[str, dict[str, float]]:
        """``precision``, ``recall`` and ``f1`` by ``micro``, ``macro`` and ``example`` average.

        Micro: over all (report, class) pairs. Macro: the mean of the classes that are positive on any side. Example:
        the mean of the reports; one of which no class is positive on either side counts as 1. What is undefined
        otherwise (no class named, none there) counts as 0.
        """
        sums = self.hits, self.named, self.there
        total, by_class, by_report = ([one.sum(axis=axis) for one in sums] for axis in (None, 0, 1))
        found = by_class[1] + by_class[2] > 0
        means = {"micro": _agreement(*total), "macro": _agreement(*(one[found] for one in by_class))}
        means["example"] = _agreement(*by_report)
        empty = by_report[1] + by_report[2] == 0
        means["example"] = {name: np.where(empty, 1.0, values) for name, values in means["example"].items()}
        return {
            kind: {name: float(np.mean(values)) if np.size(values) else 0.0 for name, values in scores.items()}
            for kind, scores in means.items()
        }


def _agreement(hits: Array, named: Array, there: Array) -> dict[str, Array]:
    return {
        "precision": hits / np.maximum(named, 1),
        "recall": hits / np.maximum(there, 1),
        "f1": 2 * hits / np.maximum(named + there, 1),
    }


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
