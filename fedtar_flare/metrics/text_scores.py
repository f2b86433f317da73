"""All scores that reference and generated reports give by themselves, by the names of the registry."""

from __future__ import annotations

from collections.abc import Sequence

from fedtar_flare.data.cohort import Modality
from fedtar_flare.metrics.alarms import identical_share, length_ratio, mismatched_share
from fedtar_flare.metrics.chexpert_rules import chexpert_labeler
from fedtar_flare.metrics.ctrate_rules import ctrate_labeler
from fedtar_flare.metrics.label_scores import label_counts_of_texts
from fedtar_flare.metrics.labeler import RuleLabeler
from fedtar_flare.metrics.language import clean
from fedtar_flare.metrics.temporal import VisitReport, temporal_scores


def labeler_for(modality: Modality) -> RuleLabeler:
    """The rule-based labeler of the classes that are usual for reports on these images."""
    return ctrate_labeler() if modality == "ct" else chexpert_labeler()


def text_scores(rows: Sequence[VisitReport], modality: Modality) -> dict[str, float | None]:
    """Scores of one site's reports; None where one is not defined.

    Returns:
        ``ctrate_rules_f1`` or ``chexpert_rules_f1`` (micro F1 of what is stated, both texts labelled by the rules),
        ``change_f1``, ``finding_change_f1``, ``finding_change_micro_f1``, ``contradictions``, ``identical_share``,
        ``mismatched_share``, ``length_ratio``.

    Raises:
        DataError: ``no-reports`` without any row.
    """
    labeler = labeler_for(modality)
    name = "ctrate_rules_f1" if modality == "ct" else "chexpert_rules_f1"
    references, generated = [row.reference for row in rows], [row.generated for row in rows]
    return {
        name: label_counts_of_texts(labeler, references, generated).micro_f1(),
        **temporal_scores(rows, labeler),
        "identical_share": identical_share(generated),
        "mismatched_share": mismatched_share([row.patient for row in rows], references, generated),
        "length_ratio": length_ratio(references, generated) if any(map(clean, references)) else None,
    }
