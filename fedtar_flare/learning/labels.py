"""What a report says of each finding: not mentioned, there, not there, or in doubt; always by the report's own text."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Literal

from fedtar_flare.errors import ConfigError
from fedtar_flare.metrics.chexpert_rules import chexpert_labeler
from fedtar_flare.metrics.ctrate_rules import ctrate_labeler
from fedtar_flare.metrics.temporal import finding_changes
from fedtar_flare.synthetic.changes import changes_in
from fedtar_flare.synthetic.vocabulary import FINDINGS, denied_in, findings_in

CLASSES = ("blank", "positive", "negative", "uncertain")
"""Of a finding, by their number."""
POSITIVE_OR_NOT = ("other", "positive")
"""The same, where a prompt tells no more than that."""
POSITIVE = CLASSES.index("positive")
"""In both."""

ClassSet = Literal["all", "positive"]

LabelerName = Literal["synthetic", "chexpert-rules", "ctrate-rules", "none"]


@dataclass(frozen=True)
class Labeler:
    """Findings, in their order, and functions from a report to the number of each one's class among ``classes``, and to
    what it says became of findings since the visit before, pairs of a finding and a direction.
    """

    findings: tuple[str, ...]
    label: Callable[[str], tuple[int, ...]]
    changes: Callable[[str], AbstractSet[tuple[str, str]]]
    classes: tuple[str, ...] = CLASSES


KEPT = 2**16
"""Reports whose labels a process keeps: a training report is read by the rules once, not in every update."""


@cache
def labeler(name: LabelerName, classes: ClassSet = "all") -> Labeler:
    """A labeler by its name; of classes ``positive`` it tells only whether a finding is stated.

    ``synthetic``: the findings of the synthetic cohort, by its own rules, for its texts alone; ``chexpert-rules`` and
    ``ctrate-rules``: the rule-based labelers of the package, whose labels are not CheXbert's or RadBERT's; ``none``: no
    finding at all.
    """
    if classes == "positive":
        whole = labeler(name)

        def positive(text: str) -> tuple[int, ...]:
            return tuple(int(label == POSITIVE) for label in whole.label(text))

        return Labeler(whole.findings, positive, whole.changes, POSITIVE_OR_NOT)
    if name == "none":
        return Labeler((), lambda text: (), lambda text: frozenset())
    if name == "synthetic":
        return Labeler(FINDINGS, lru_cache(maxsize=KEPT)(_synthetic), changes_in)
    rules = chexpert_labeler() if name == "chexpert-rules" else ctrate_labeler()

    @lru_cache(maxsize=KEPT)
    def label(text: str) -> tuple[int, ...]:
        return tuple(CLASSES.index(found) for found in rules(text).values())

    return Labeler(rules.names, label, partial(finding_changes, labeler=rules))


def require_labeler(name: str, setting: str, source: str) -> None:
    """Raise :class:`ConfigError` where a real hospital's reports would be read by the synthetic cohort's rules."""
    if name == "synthetic" and source != "synthetic":
        raise ConfigError(
            f"{setting} is 'synthetic', whose rules are for the texts of the synthetic cohort: set it to "
            "chexpert-rules, ctrate-rules or none",
            public=f"the job's {setting} 'synthetic' is for synthetic sites alone",
        )


def _synthetic(text: str) -> tuple[int, ...]:
    """Classes of the synthetic findings; none of its texts is in doubt."""
    stated, denied = findings_in(text), denied_in(text)
    return tuple(POSITIVE if f in stated else CLASSES.index("negative" if f in denied else "blank") for f in FINDINGS)
