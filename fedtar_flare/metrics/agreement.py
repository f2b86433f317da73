"""Agreement of findings and of labels: precision, recall and F1 of what drafts name against what is true."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.minimum_cell import full_cells, round_share

Array = NDArray[np.float64]
Findings = Sequence[AbstractSet[Any]]  # findings, or pairs of a finding and a direction, of each of N reports
Average = Literal["micro", "macro", "example"]
Metric = Literal["precision", "recall", "f1"]
AVERAGES: tuple[Average, ...] = ("micro", "macro", "example")
METRICS: tuple[Metric, ...] = ("precision", "recall", "f1")

CERTAIN, CERTAIN_OR_NOT = frozenset({"positive"}), frozenset({"positive", "uncertain"})
"""Labels that count as positive: what is stated, or what is doubted too."""


def finding_f1(truth: Findings, predicted: Findings) -> dict[str, float | None]:
    """Micro precision, recall and F1 over pairs of a report and a finding; None where undefined."""
    actual, named = sum(map(len, truth)), sum(map(len, predicted))
    hits = sum(len(t & p) for t, p in zip(truth, predicted, strict=True))
    return {
        "finding_precision": hits / named if named else None,
        "finding_recall": hits / actual if actual else None,
        "finding_f1": 2 * hits / (actual + named) if actual + named else None,
    }


def known_and_new(
    truth: Findings, predicted: Findings, known: AbstractSet[str], patients: Sequence[str], least: int = 1
) -> dict[str, float | None]:
    """F1, also as mean (``_macro``), of all findings, those ``known`` to the warm start and the others; the latter's
    recall.
    """
    scores, every = dict[str, float | None](), frozenset[Any]().union(*truth, *predicted)
    for kind, findings in (("", every), ("_known", every & known), ("_new", every - known)):
        actual, drafted = ([of & findings for of in side] for side in (truth, predicted))
        pairs = finding_f1(actual, drafted)
        counts = LabelCounts.of_findings(actual, drafted, sorted(findings)).guarded(patients, least)
        scores[f"finding_f1{kind}"] = pairs["finding_f1"]
        scores[f"finding_f1{kind}_macro"] = counts.averages(least)["macro"]["f1"] if counts.classes else None
    return scores | {"finding_recall_new": pairs["finding_recall"]}


@dataclass(frozen=True)
class LabelCounts:
    """Arrays (N, K): 1 where a class is positive in both texts, in the draft, in the reference."""

    classes: tuple[str, ...]
    hits: Array
    named: Array
    actual: Array

    @classmethod
    def of_findings(cls, truth: Findings, named: Findings, findings: Iterable[Any]) -> Self:
        """Counts of ``findings`` in N reports, each finding a class."""
        classes = tuple(findings)
        actual, drafted = (np.array([[c in of for c in classes] for of in side], float) for side in (truth, named))
        return cls(classes, actual * drafted, drafted, actual)

    def of_classes(self) -> dict[str, dict[str, float | None]]:
        """By class ``precision``, ``recall``, ``f1`` (None where undefined) and ``n``, the reports that have it."""
        scores: dict[str, dict[str, float | None]] = {}
        for k, name in enumerate(self.classes):
            parts = {metric: [float(side[:, k].sum()) for side in self.parts(metric)] for metric in METRICS}
            scores[name] = {metric: hits / total if total else None for metric, (hits, total) in parts.items()}
            scores[name]["n"] = float(self.actual[:, k].sum())
        return scores

    def parts(self, metric: Metric) -> tuple[Array, Array]:
        """Numerator and denominator of a metric, both (N, K)."""
        if metric == "f1":
            return 2 * self.hits, self.named + self.actual
        return self.hits, self.named if metric == "precision" else self.actual

    def averages(self, least: int = 1) -> dict[Average, dict[Metric, float]]:
        """``precision``, ``recall`` and ``f1`` over all pairs, as mean of the classes positive in any text, of reports.

        A report without a positive class in either text counts as 1; what is undefined otherwise counts as 0. With a
        minimum cell each class is rounded by its own number of reports.
        """
        positive, something = ((self.named + self.actual).sum(axis=axis) > 0 for axis in (0, 1))
        means: dict[Average, dict[Metric, float]] = {average: {} for average in AVERAGES}
        for metric in METRICS:
            above, below = self.parts(metric)
            sums = [*zip(above.sum(0)[positive], below.sum(0)[positive], strict=True), (above.sum(), below.sum())]
            pairs = 2 if metric == "f1" else 1
            *of_classes, micro = [round_share(a / max(b, 1), int(b) // pairs, least) for a, b in sums]
            means["micro"][metric], means["macro"][metric] = float(micro), float(np.mean(of_classes or [0.0]))
            of_reports = np.where(something, above.sum(1) / np.maximum(below.sum(1), 1), 1.0)
            means["example"][metric] = float(of_reports.mean())
        return means

    def guarded(self, patients: Sequence[str], least: int) -> Self:
        """Without classes that too few patients have; named by drafts of fewer, one would tell who has it."""

        def full(side: Array) -> set[int]:
            return full_cells(((k, patients[i]) for i, k in np.argwhere(side).tolist()), least)

        if least == 1:
            return self
        columns, named = sorted(full(self.actual)), full(self.named)
        counts, classes = np.array([k in named for k in columns]), tuple(self.classes[k] for k in columns)
        hits, named_by_draft, actual = (side[:, columns] for side in (self.hits, self.named, self.actual))
        return type(self)(classes, hits * counts, named_by_draft * counts, actual)


def label_counts(
    classes: Sequence[str], codes: Sequence[Sequence[str]], positive: AbstractSet[str] = CERTAIN
) -> LabelCounts:
    """Count the agreement of the labels of N reports by the codes (:meth:`.Labeler.code`) of reference and draft."""
    if not codes:
        raise DataError("there is no report to score", reason="no-reports")
    if any(len(code) != len(classes) for pair in codes for code in pair):
        raise DataError("every report must be labelled with the same classes", reason="unequal-classes")
    letters = {label[0] for label in positive}
    actual, named = (np.isin([list(pair[side]) for pair in codes], [*letters]).astype(float) for side in (0, 1))
    return LabelCounts(tuple(classes), actual * named, named, actual)
