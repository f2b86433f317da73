"""Signs that generated reports do not come from the image: each a number, its limit, and what it means.

All are about one site's reports; the texts stay there and the numbers may leave.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedtar_flare.core.errors import DataError
from fedtar_flare.metrics.language import clean, require_pairs

IDENTICAL_EXCESS = 0.25
"""How much larger the share of identical reports may be than among the references: normal studies do read alike."""
MISMATCHED = 0.4
"""A report that says nothing of its patient fits half of the other patients' references better than its own (0.5)."""
LENGTH_RATIO = (0.6, 1.5)
"""Below, reports are cut short or leave things out; above, they repeat themselves."""
FINDINGS_LOSS = 0.02
"""Findings missed or invented beyond the warm start's that are more than rounding and chance in a small test set."""
CONTRADICTIONS_EXCESS = 0.1
"""How much larger the share of contradicted claims may be than among the references, which leave things out too."""
MOST_REFERENCES = 500
"""Reports and references compared with each other, at most; spread evenly over those given."""

_MEANING = {
    "identical_share": "reports repeat each other word for word",
    "mismatched_share": "reports fit other patients nearly as well as their own",
    "length_ratio": "reports are much shorter or longer than the references",
    "finding_recall": "findings that the warm start reported are missed now",
    "invented_findings": "findings are named that are not there, more often than by the warm start",
    "contradictions": "claims of change do not follow from the patient's report before",
}


@dataclass(frozen=True)
class Alarm:
    """``value`` against ``limits``, lowest and highest; ``meaning`` says what a raised one shows."""

    name: str
    value: float
    limits: tuple[float, float]
    meaning: str

    @property
    def raised(self) -> bool:
        return not self.limits[0] <= self.value <= self.limits[1]


def identical_share(texts: Sequence[str]) -> float:
    """Share of reports whose cleaned text another one has too; 0 where all differ. DataError ``no-reports``."""
    require_pairs(texts, texts)
    counts = Counter(clean(text) for text in texts)
    return sum(count for count in counts.values() if count > 1) / len(texts)


def mismatched_share(patients: Sequence[str], references: Sequence[str], generated: Sequence[str]) -> float | None:
    """Mean share of other patients' references that a generated report fits better than its own reference.

    0 is perfect, 0.5 is chance; None where there is one patient only. Fit is the Dice overlap of words and word pairs;
    a tie counts half. DataError: ``no-reports``, or ``unequal-lengths``.
    """
    require_pairs(references, generated)
    require_pairs(patients, generated)
    chosen = np.unique(np.linspace(0, len(generated) - 1, min(len(generated), MOST_REFERENCES)).astype(int))
    rows = [_grams(texts[i]) for texts in (generated, references) for i in chosen]
    column = {gram: k for k, gram in enumerate(set().union(*rows))}
    matrix = np.zeros((len(rows), len(column)), dtype=np.float32)
    for i, row in enumerate(rows):
        matrix[i, [column[gram] for gram in row]] = 1
    hypothesis, reference = np.split(matrix, 2)
    fit = 2 * (hypothesis @ reference.T) / np.maximum(hypothesis.sum(1)[:, None] + reference.sum(1)[None], 1)
    own = np.diagonal(fit)[:, None]
    names = np.array([str(patients[i]) for i in chosen])
    others = names[:, None] != names[None]
    if not others.any():
        return None
    better = ((fit > own) + 0.5 * (fit == own)) * others
    counted = others.sum(1)
    return float((better.sum(1)[counted > 0] / counted[counted > 0]).mean())


def length_ratio(references: Sequence[str], generated: Sequence[str]) -> float:
    """Words of all generated reports, per word of the references; DataError ``empty-references`` without any."""
    require_pairs(references, generated)
    words = sum(len(clean(text).split()) for text in references)
    if not words:
        raise DataError("no reference has a word", reason="empty-references")
    return sum(len(clean(text).split()) for text in generated) / words


def alarms(
    scores: Mapping[str, float | None],
    references: Mapping[str, float | None],
    *,
    recall: tuple[float | None, float | None] = (None, None),
    invented: tuple[float | None, float | None] = (None, None),
) -> list[Alarm]:
    """All alarms of one site's test reports, raised or not; one without its numbers is left out.

    ``references`` has ``identical_share`` and ``contradictions`` of the references themselves. Of the findings that
    the warm start knows, ``recall`` is the share that is named, ``invented`` the share of those named that is not
    there: the warm start's, and now.
    """

    def above(natural: float | None, excess: float) -> tuple[float, float] | None:
        return None if natural is None else (0.0, min(1.0, natural + excess))

    limits = {
        "identical_share": above(references.get("identical_share"), IDENTICAL_EXCESS),
        "mismatched_share": (0.0, MISMATCHED),
        "length_ratio": LENGTH_RATIO,
        "finding_recall": None if recall[0] is None else (max(0.0, recall[0] - FINDINGS_LOSS), 1.0),
        "invented_findings": above(invented[0], FINDINGS_LOSS),
        "contradictions": above(references.get("contradictions"), CONTRADICTIONS_EXCESS),
    }
    values = {**scores, "finding_recall": recall[1], "invented_findings": invented[1]}
    return [
        Alarm(name, value, limit, _MEANING[name])
        for name, limit in limits.items()
        if limit and (value := values.get(name)) is not None
    ]


def _grams(text: str) -> set[tuple[str, ...]]:
    words = clean(text).split()
    return {(word,) for word in words} | set(pairwise(words))
