"""The rule-based labelers by name, and the labels of an image that its report states, where a source gives none."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

from fedtar_flare.core.files import read_yaml
from fedtar_flare.data.cohort import Modality
from fedtar_flare.metrics.labeler import Observation, RuleLabeler

RuleLabels = Literal["chexpert-rules", "ctrate-rules"]
FromReport = Callable[[str], tuple[frozenset[str], frozenset[str]]]
"""Labels that a report states, and those of which it is unsure."""


@cache
def rule_labeler(name: RuleLabels) -> RuleLabeler:
    """The labeler of this name, whose phrases are in the YAML file of the same name.

    ``chexpert-rules``: the 14 CheXpert classes, of radiographs (Irvin et al., AAAI 2019). ``No Finding`` is positive
    where no other class is positive or uncertain, support devices aside, else blank. A heart or mediastinum that is
    only called stable, or at the limit of normal, is uncertain. ``ctrate-rules``: the 18 CT-RATE classes, of chest CT
    (Hamamci et al., CT-RATE and CT-CLIP, 2024, arXiv:2403.17834); CT-RATE's own labels are 0 or 1.
    """
    rules = read_yaml(Path(__file__).with_name(f"{name}.yaml"), "the phrases of observations")
    words, observations = rules["words"], rules["observations"].items()
    return RuleLabeler(
        [Observation(one, **{k: table.format_map(words) for k, table in own.items()}) for one, own in observations],
        no_finding=rules.get("no_finding", ""),
        beside=frozenset(rules.get("beside", ())),
        unsided=frozenset(rules["unsided"]),
    )


NEURAL: dict[str, RuleLabels] = {"chexbert": "chexpert-rules", "radbert": "ctrate-rules"}
"""Labelers that are neural models, each with the rules of the same classes."""


def classes_of(name: str) -> tuple[str, ...]:
    """A labeler's classes, in the order of its labels; ``No Finding`` is CheXbert's last."""
    names = rule_labeler(NEURAL.get(name, name)).names
    return (*names[1:], names[0]) if name == "chexbert" else names


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
