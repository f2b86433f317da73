"""All scores that reference and generated reports give by themselves, by the names of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedtar_flare.metrics.alarms import identical_share, length_ratio, mismatched_share
from fedtar_flare.metrics.chexpert_rules import chexpert_labeler
from fedtar_flare.metrics.ctrate_rules import ctrate_labeler
from fedtar_flare.metrics.label_scores import label_counts_of_texts
from fedtar_flare.metrics.temporal import VisitReport, temporal_scores


def text_scores(rows: Sequence[VisitReport], modality: Literal["ct", "radiograph"]) -> dict[str, float | None]:
    """Scores of one site's reports; None where one is not defined.

    Returns:
        ``ctrate_rules_f1`` or ``chexpert_rules_f1`` (micro F1 of what is stated, both texts labelled by the rules),
        ``change_f1``, ``finding_change_f1``, ``contradictions``, ``identical_share``, ``mismatched_share``,
        ``length_ratio``.

    Raises:
        DataError: ``no-reports`` without any row.
    """
    name, labeler = (
        ("ctrate_rules_f1", ctrate_labeler()) if modality == "ct" else ("chexpert_rules_f1", chexpert_labeler())
    )
    references, generated = [row.reference for row in rows], [row.generated for row in rows]
    return {
        name: label_counts_of_texts(labeler, references, generated).micro_f1(),
        **temporal_scores(rows, labeler),
        "identical_share": identical_share(generated),
        "mismatched_share": mismatched_share([row.patient for row in rows], references, generated),
        "length_ratio": length_ratio(references, generated),
    }
