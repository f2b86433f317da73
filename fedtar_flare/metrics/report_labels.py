"""Labels of an image that its report states, by the rule-based labelers, where a source gives none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fedtar_flare.data.cohort import Modality
from fedtar_flare.metrics.chexpert_rules import chexpert_labeler
from fedtar_flare.metrics.ctrate_rules import ctrate_labeler
from fedtar_flare.metrics.labeler import RuleLabeler

RuleLabels = Literal["chexpert-rules", "ctrate-rules"]
FromReport = Callable[[str], tuple[frozenset[str], frozenset[str]]]
"""Labels that a report states, and those of which it is unsure."""


def rule_labeler(name: RuleLabels) -> RuleLabeler:
    """The labeler of this name: ``chexpert-rules`` (radiographs) or ``ctrate-rules`` (chest CT)."""
    return chexpert_labeler() if name == "chexpert-rules" else ctrate_labeler()


def rules_for(modality: Modality) -> RuleLabels:
    """Name of the labeler whose classes are usual for reports on such images."""
    return "ctrate-rules" if modality == "ct" else "chexpert-rules"


def report_labels(name: RuleLabels) -> FromReport:
    """Labels of a report by the rules of this name.

    What a report does not mention counts as absent. ``No Finding`` is no label, and neither is what may stand beside
    it (support devices): such an image has none.

    >>> report_labels("chexpert-rules")("Small left effusion. Possible pneumonia. No pneumothorax.")
    (frozenset({'Pleural Effusion'}), frozenset({'Pneumonia'}))
    """
    labeler = rule_labeler(name)
    no_labels = {labeler.no_finding, *labeler.beside}

    def labels(report: str) -> tuple[frozenset[str], frozenset[str]]:
        found = {one: label for one, label in labeler(report).items() if one not in no_labels}
        sure, unsure = (
            frozenset(one for one, label in found.items() if label == said) for said in ("positive", "uncertain")
        )
        return sure, unsure

    return labels
