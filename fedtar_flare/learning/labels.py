"""What a report says of each finding: not mentioned, there, not there, or in doubt; always by the report's own text."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Literal

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cohort import Visit
from fedtar_flare.metrics.labeler import RuleLabeler, rule_labeler, rules_for
from fedtar_flare.metrics.qualifiers import finding_changes

__all__ = ["POSITIVE", "Labeler", "LabelerName", "labeler", "labeler_of", "require_labeler"]

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
    """Reads findings off a report.

    ``label`` gives the D numbers of the findings' classes among ``classes``, ``changes`` what a report says became of
    findings since the visit before: pairs of a finding and a direction.
    """

    findings: tuple[str, ...]
    label: Callable[[str], tuple[int, ...]]
    changes: Callable[[str], AbstractSet[tuple[str, str]]]
    classes: tuple[str, ...] = CLASSES
    known: frozenset[str] | None = None
    """Findings that the shipped start has seen in images, of a source that knows the truth."""
    no_finding: str = ""
    """The one that says that there is none; "" where the labeler has none."""
    rules: RuleLabeler | None = None
    """The rules that grade a report's findings (:func:`.grade`); None of a labeler that knows none."""

    def stated(self, text: str) -> frozenset[str]:
        """Findings that a report states as there."""
        labels = zip(self.findings, self.label(text), strict=True)
        return frozenset(name for name, label in labels if label == POSITIVE and name != self.no_finding)


KEPT = 2**16
"""Reports whose labels a process keeps: a training report is read by the rules once, not in every update."""


@cache
def labeler(name: LabelerName, classes: ClassSet = "all") -> Labeler:
    """A labeler by its name; of classes ``positive`` it says only whether a finding is stated.

    ``synthetic`` reads the texts of the synthetic cohort alone; ``chexpert-rules`` and ``ctrate-rules`` are the
    package's rules, whose labels are not CheXbert's or RadBERT's; ``none`` knows no finding.
    """
    if classes == "positive":
        whole = labeler(name)

        def positive(text: str) -> tuple[int, ...]:
            return tuple(int(label == POSITIVE) for label in whole.label(text))

        return Labeler(whole.findings, positive, whole.changes, POSITIVE_OR_NOT)
    if name == "none":
        return Labeler((), lambda text: (), lambda text: frozenset())
    if name == "synthetic":
        return _synthetic()
    rules = rule_labeler(name)

    @lru_cache(maxsize=KEPT)
    def label(text: str) -> tuple[int, ...]:
        return tuple(CLASSES.index(found) for found in rules(text).values())

    return Labeler(
        rules.names, label, partial(finding_changes, labeler=rules), no_finding=rules.no_finding, rules=rules
    )


def labeler_of(visits: Sequence[Visit]) -> Labeler:
    """The labeler for the reports of these visits: the source's own where it knows the truth, else rules."""
    if all(visit.findings is not None for visit in visits):
        return labeler("synthetic")
    return labeler(rules_for(visits[0].modality))


def require_labeler(name: str, setting: str, source: str) -> None:
    """Raise :class:`ConfigError` where a real hospital's reports would be read by the synthetic cohort's rules."""
    if name == "synthetic" and source != "synthetic":
        raise ConfigError(
            f"{setting} is 'synthetic', whose rules are for the texts of the synthetic cohort: set it to "
            "chexpert-rules, ctrate-rules or none",
            public=f"the job's {setting} 'synthetic' is for synthetic sites alone",
        )


def _synthetic() -> Labeler:
    """That of the synthetic cohort, none of whose texts is in doubt; loaded where a site has such a cohort alone."""
    from fedtar_flare.synthetic.reading import changes_in, denied_in, findings_in, kind_labeler
    from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS

    @lru_cache(maxsize=KEPT)
    def label(text: str) -> tuple[int, ...]:
        stated, denied = findings_in(text), denied_in(text)
        return tuple(
            POSITIVE if f in stated else CLASSES.index("negative" if f in denied else "blank") for f in FINDINGS
        )

    return Labeler(FINDINGS, label, changes_in, known=frozenset(KNOWN_FINDINGS), rules=kind_labeler())
