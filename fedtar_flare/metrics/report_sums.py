"""What the rows of single reports (:func:`.learning.evaluation.report_rows`) add to a score, by patient or by study."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedtar_flare.metrics.label_scores import CERTAIN, CERTAIN_OR_NOT, Average, Metric, label_counts
from fedtar_flare.metrics.language import LanguageStatistics
from fedtar_flare.metrics.registry import EFFICACY
from fedtar_flare.metrics.report_labels import classes_of
from fedtar_flare.metrics.significance import PatientSums, bleu_score, f1_score, label_score, mean_score

Row = Mapping[str, Any]
Units = Literal["patients", "studies"]
SumsOf = Callable[..., PatientSums | None]


def _drawn(rows: Sequence[Row], units: Units) -> list[tuple[str, ...]]:
    """What is drawn, of each row: its patient, or its study."""
    keys = ("site", "patient_id", "visit_id")[: 2 if units == "patients" else 3]
    return [tuple(str(row.get(key)) for key in keys) for row in rows]


def mean_of(name: str) -> SumsOf:
    """Mean of a column of rows."""

    def mean(rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
        return mean_score(_drawn(rows, units), [row[name] for row in rows]) if rows else None

    return mean


def _bleu(n: int) -> SumsOf:
    def bleu(rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
        columns = {name: np.asarray([row[name] for row in rows]) for name in LanguageStatistics.__dataclass_fields__}
        return bleu_score(_drawn(rows, units), LanguageStatistics(**columns), n) if rows else None

    return bleu


def finding_f1(there: str, named: str, names: Collection[str] | None = None) -> SumsOf:
    """F1 of what is there and what a report names, two columns of a row; None where no report has them."""

    def f1(rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
        known = [row for row in rows if row.get(there) is not None]
        sides = [[{tuple(x) if isinstance(x, list) else x for x in row[k]} for row in known] for k in (there, named)]
        truth, found = ([one if names is None else one & set(names) for one in side] for side in sides)
        counts = np.array([(len(a & b), len(b), len(a)) for a, b in zip(truth, found, strict=True)]).T
        return f1_score(_drawn(known, units), *counts) if known else None

    return f1


def _labels(labeler: str, average: Average, metric: Metric, uncertain: bool = False) -> SumsOf:
    """Agreement of the labels that a labeler reads off both texts of a row; None where no report has them."""

    def labels(rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
        known = [row for row in rows if labeler in row.get("labels", ())]
        if not known:
            return None
        codes = [row["labels"][labeler] for row in known]
        counts = label_counts(classes_of(labeler), codes, CERTAIN_OR_NOT if uncertain else CERTAIN)
        return label_score(_drawn(known, units), counts, average, metric)

    return labels


SUMS: dict[str, SumsOf] = {
    **{f"bleu_{n}": _bleu(n) for n in (1, 2, 3, 4)},
    **{name: mean_of(name) for name in ("rouge_l", "cider", "token_loss")},
    "finding_f1": finding_f1("findings", "findings_in_text"),
    "finding_change_micro_f1": finding_f1("changes", "changes_in_text"),
    "chexpert_rules_f1": _labels("chexpert-rules", "micro", "f1"),
    "ctrate_rules_f1": _labels("ctrate-rules", "micro", "f1"),
    **{name: _labels(*one) for name, one in EFFICACY.items()},
}
"""What rows add to a score, by the score's name in the registry."""
