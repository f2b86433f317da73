"""Labels of a report's findings: blank, positive, negative or uncertain, by the report's text alone."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Literal

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cohort import Visit
from fedtar_flare.metrics.grades import Statement, finding_changes, level_of, statements
from fedtar_flare.metrics.labeler import RuleLabeler, rule_labeler, rules_for
from fedtar_flare.metrics.sentences import Phrasebook, phrases, sentences

CLASSES = ("blank", "positive", "negative", "uncertain")
"""Classes of a finding, by number."""
POSITIVE_OR_NOT = ("other", "positive")
"""Classes for prompts that say no more than that."""
POSITIVE, NEGATIVE = CLASSES.index("positive"), CLASSES.index("negative")
"""Numbers of classes; that of "positive" is the same in both sets."""

LEVELS = ("absent", "small", "moderate", "large", "present")
"""Levels of a finding, by number; "present" where its degree is not stated."""
PRESENT = LEVELS.index("present")
UNKNOWN = -1
"""Level of a finding at a visit that nothing is known of, or a change that no report states."""

ClassSet = Literal["all", "positive"]
LabelerName = Literal["synthetic", "chexpert-rules", "ctrate-rules", "none"]


@dataclass(frozen=True)
class Labeler:
    """Labels the D ``findings`` of a report by numbers among ``classes``.

    ``levels`` are numbers among :data:`LEVELS`, and ``stated_levels`` too, UNKNOWN where a report is silent or in
    doubt (a normal report denies what it is silent on); ``changes`` are pairs of a finding and a direction that a text
    states; ``known`` are the findings that the shipped model learned from; ``rules`` grade a report's (:func:`.grade`).
    """

    findings: tuple[str, ...]
    label: Callable[[str], tuple[int, ...]]
    changes: Callable[[str], AbstractSet[tuple[str, str]]]
    levels: Callable[[str], tuple[int, ...]]
    stated_levels: Callable[[str], tuple[int, ...]]
    classes: tuple[str, ...] = CLASSES
    known: frozenset[str] | None = None
    no_finding: str = ""
    rules: RuleLabeler | None = None

    def stated(self, text: str) -> frozenset[str]:
        """Return the findings that a report states as present."""
        labels = zip(self.findings, self.label(text), strict=True)
        return frozenset(name for name, label in labels if label == POSITIVE and name != self.no_finding)


CACHED = 2**16
"""Labelled reports that a process caches: the rules label a training report once, not in every update."""


@cache
def labeler(name: LabelerName, classes: ClassSet = "all") -> Labeler:
    """Return a labeler by its name."""
    if classes == "positive":
        whole = labeler(name)

        def positive(text: str) -> tuple[int, ...]:
            return tuple(int(label == POSITIVE) for label in whole.label(text))

        return Labeler(whole.findings, positive, whole.changes, whole.levels, whole.stated_levels, POSITIVE_OR_NOT)
    if name == "none":
        return Labeler((), lambda text: (), lambda text: frozenset(), lambda text: (), lambda text: ())
    if name == "synthetic":
        return _synthetic()
    rules = rule_labeler(name)

    @lru_cache(maxsize=CACHED)
    def label(text: str) -> tuple[int, ...]:
        return tuple(map(CLASSES.index, rules(text).values()))

    changes = partial(finding_changes, labeler=rules)
    levels = lru_cache(maxsize=CACHED)(partial(_levels, findings=rules.names, label=label, rules=rules))
    stated = lru_cache(maxsize=CACHED)(partial(_stated_levels, levels=levels, rules=rules))
    return Labeler(rules.names, label, changes, levels, stated, no_finding=rules.no_finding, rules=rules)


def _levels(
    text: str,
    findings: Sequence[str],
    label: Callable[[str], Sequence[int]],
    rules: RuleLabeler,
    names: Callable[[Statement], Sequence[str]] = lambda statement: [statement.finding],
) -> tuple[int, ...]:
    """The highest stated level of each finding that a text labels as positive."""
    stated: dict[str, int] = {}
    for statement in statements(text, rules):
        level = level_of(statement, rules)
        if level is not None and not statement.resolved:
            stated |= {name: max(stated.get(name, 0), level + 1) for name in names(statement)}
    labels = zip(findings, label(text), strict=True)
    return tuple(stated.get(name, PRESENT) if number == POSITIVE else 0 for name, number in labels)


_NORMAL = Phrasebook((phrase, True) for phrase in phrases("normal")["states"])


def _stated_levels(text: str, levels: Callable[[str], Sequence[int]], rules: RuleLabeler) -> tuple[int, ...]:
    """The levels of the findings that a text states or denies, by itself or as a normal report."""
    labels = rules(text)
    normal = labels.get(rules.no_finding) == "positive" and any(map(_NORMAL.find, sentences(text)))
    denied = {name for name, label in labels.items() if label == "blank" and normal and name not in rules.beside}
    stated = {name for name, label in labels.items() if label in ("positive", "negative")} - {rules.no_finding}
    by_name = zip(labels, levels(text), strict=True)
    return tuple(level if name in stated | denied else UNKNOWN for name, level in by_name)


def labeler_of(visits: Sequence[Visit]) -> Labeler:
    """Return the labeler for the reports of these visits: the source's own where it knows the truth, else rules."""
    if all(visit.findings is not None for visit in visits):
        return labeler("synthetic")
    return labeler(rules_for(visits[0].modality))


def require_labeler(name: str, setting: str, source: str) -> None:
    """Refuse the synthetic cohort's rules for a real hospital's reports."""
    if name == "synthetic" and source != "synthetic":
        public = f"the job's {setting} is 'synthetic', for synthetic sites alone"
        raise ConfigError(f"{public}: set it to chexpert-rules, ctrate-rules or none", public=public)


def _synthetic() -> Labeler:
    """The labeler of the synthetic cohort, whose texts have no uncertain findings; imported only where it is used."""
    from fedtar_flare.synthetic.reading import changes_in, denied_in, findings_in, kind_labeler, names_of
    from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS

    @lru_cache(maxsize=CACHED)
    def label(text: str) -> tuple[int, ...]:
        stated, denied = findings_in(text), denied_in(text)
        return tuple(
            POSITIVE if f in stated else CLASSES.index("negative" if f in denied else "blank") for f in FINDINGS
        )

    rules = kind_labeler()
    levels = lru_cache(maxsize=CACHED)(partial(_levels, findings=FINDINGS, label=label, rules=rules, names=names_of))
    return Labeler(FINDINGS, label, changes_in, levels, levels, known=frozenset(KNOWN_FINDINGS), rules=rules)
