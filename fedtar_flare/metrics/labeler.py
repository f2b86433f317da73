"""Rule-based labelers: which observations a report states, denies, doubts, or does not mention.

Tables of phrases, in a YAML file for each labeler, and the scope rules of :mod:`.scope` decide. These are no neural
labelers: their labels are not CheXbert's or RadBERT's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import yaml

from fedtar_flare.data.cohort import Modality
from fedtar_flare.metrics.scope import scopes
from fedtar_flare.metrics.sentences import Phrasebook, listed, sentences

Label = Literal["positive", "negative", "uncertain", "blank"]
Direction = Literal["new", "increased", "decreased", "unchanged", "resolved"]
"""How a finding changed since the visit before."""
RuleLabels = Literal["chexpert-rules", "ctrate-rules"]
"""Names of the rule-based labelers."""
NEURAL: dict[str, RuleLabels] = {"chexbert": "chexpert-rules", "radbert": "ctrate-rules"}
"""Names of the labelers that are neural models, each with the rules of the same classes."""

_STRENGTH: dict[Label, int] = {"blank": 0, "negative": 1, "uncertain": 2, "positive": 3}
_KINDS = ("present", "absent", "unsure", "ignore", "elsewhere", "here")


@dataclass(frozen=True)
class Observation:
    """A class of a labeler, as tables of phrases separated by commas (see :class:`.Phrasebook`).

    Attributes
    ----------
    name : str
    present : str
        Phrases that state it, unless denied or doubted.
    absent : str
        Phrases that deny it by themselves ("heart size is normal"); denied, they state it.
    unsure : str
        Phrases that leave it open by themselves ("heart size is top normal").
    ignore : str
        Phrases with another meaning; the words they cover are no mention ("pericardial effusion").
    elsewhere, here : str
        Words of another organ: a sentence with one of them has no mention, unless it has one of ``here``.
    """

    name: str
    present: str
    absent: str = ""
    unsure: str = ""
    ignore: str = ""
    elsewhere: str = ""
    here: str = ""


class Mention(NamedTuple):
    """An observation at ``words[start:end]`` of a sentence."""

    start: int
    end: int
    name: str
    label: Label


class RuleLabeler:
    """Labels reports by rules; equal texts get equal labels, in linear time.

    Parameters
    ----------
    observations : sequence of Observation
    no_finding : str
        The class that is positive where no other is positive or uncertain; "" for none.
    beside : set of str
        Classes that may be positive together with ``no_finding``.
    unsided : set of str
        Classes that have no side.
    degrees : mapping of str to sequence of mapping
        By class, scales of words of degree, each from a word to its level, for reports with words of their own (see
        :mod:`.grades`).
    changes : mapping of str to Direction
        Further words of change (see :mod:`.qualifiers`).
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        *,
        no_finding: str = "",
        beside: AbstractSet[str] = frozenset(),
        unsided: AbstractSet[str] = frozenset(),
        degrees: Mapping[str, Sequence[Mapping[str, int]]] = MappingProxyType({}),
        changes: Mapping[str, Direction] = MappingProxyType({}),
    ):
        self.no_finding = no_finding
        self.beside = frozenset(beside)
        self.unsided = frozenset(unsided)
        self.degrees = degrees
        self.changes = changes
        self.names: tuple[str, ...] = (no_finding,) if no_finding else ()
        """All classes; ``no_finding`` is the first."""
        phrases: list[tuple[str, tuple[str, str]]] = []
        for one in observations:
            self.names += (one.name,)
            for kind in _KINDS:
                phrases += product(listed(getattr(one, kind)), [(one.name, kind)])
        self._book = Phrasebook(phrases)
        self._labels = lru_cache(maxsize=4096)(self._labels_of)  # references are labelled again in every evaluation

    def __call__(self, text: str) -> dict[str, Label]:
        """The label of every class: positive if any mention is, else uncertain if any is, else negative if any is.

        A class without a mention is blank.
        """
        return self._labels(text).copy()

    def _labels_of(self, text: str) -> dict[str, Label]:
        labels: dict[str, Label] = dict.fromkeys(self.names, "blank")
        found, empty = set(), True
        for words in sentences(text):
            empty = False
            for mention in self.mentions(words):
                if _STRENGTH[mention.label] > _STRENGTH[labels[mention.name]]:
                    labels[mention.name] = mention.label
                if mention.label in ("positive", "uncertain"):
                    found.add(mention.name)
        if self.no_finding and not empty and found <= self.beside:
            labels[self.no_finding] = "positive"
        return labels

    def mentions(self, words: Sequence[str]) -> list[Mention]:
        """Find the mentions in a sentence."""
        by_class: dict[str, list[tuple[int, int, str]]] = {}
        kinds: dict[str, set[str]] = {}
        for start, end, (name, kind) in self._book.find(words):
            by_class.setdefault(name, []).append((start, end, kind))
            kinds.setdefault(name, set()).add(kind)
        if not by_class:
            return []
        reach = scopes(words)
        found = []
        for name, spans in by_class.items():
            if "elsewhere" in kinds[name] and "here" not in kinds[name]:
                continue
            for start, end, kind in _longest(spans):
                if kind != "ignore":
                    label = _label(kind, reach.denied(start, end), reach.doubted(start, end))
                    found.append(Mention(start, end, name, label))
        return sorted(found)


def _longest(spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Spans of one class that do not overlap: the longest first, then from the left; words of organs are no spans."""
    kept: list[tuple[int, int, str]] = []
    for start, end, kind in sorted(spans, key=lambda span: (span[0], -span[1], -_KINDS.index(span[2]))):
        if kind in ("elsewhere", "here"):
            continue
        if not kept or start >= kept[-1][1]:
            kept.append((start, end, kind))
        elif end - start > kept[-1][1] - kept[-1][0]:  # within the one before, and longer
            kept[-1] = (start, end, kind)
    return kept


def _label(kind: str, denied: bool, doubted: bool) -> Label:
    if kind == "absent":
        return "positive" if denied else "uncertain" if doubted else "negative"
    if denied:
        return "negative"
    return "uncertain" if doubted or kind == "unsure" else "positive"


@cache
def rule_labeler(name: RuleLabels) -> RuleLabeler:
    """Get a labeler whose phrases are in the YAML file of the same name.

    ``chexpert-rules``: the 14 CheXpert classes, of radiographs (Irvin et al., AAAI 2019). ``No Finding`` is positive
    where no other class is positive or uncertain, support devices aside, else blank. A heart or mediastinum that is
    only called stable, or at the limit of normal, is uncertain. ``ctrate-rules``: the 18 CT-RATE classes, of chest CT
    (Hamamci et al., CT-RATE and CT-CLIP, 2024, arXiv:2403.17834); CT-RATE's own labels are 0 or 1.
    """
    rules = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    observations = []
    for observation, tables in rules["observations"].items():
        filled = {kind: table.format_map(rules["words"]) for kind, table in tables.items()}
        observations.append(Observation(observation, **filled))
    return RuleLabeler(
        observations,
        no_finding=rules.get("no_finding", ""),
        beside=frozenset(rules.get("beside", ())),
        unsided=frozenset(rules["unsided"]),
    )


def classes_of(name: str) -> tuple[str, ...]:
    """List a labeler's classes in the order of its labels; ``No Finding`` is CheXbert's last."""
    names = rule_labeler(NEURAL.get(name, name)).names
    return (*names[1:], names[0]) if name == "chexbert" else names


def rules_for(modality: Modality) -> RuleLabels:
    """Choose the rules whose classes are usual for reports on such images."""
    return "ctrate-rules" if modality == "ct" else "chexpert-rules"


def report_labels(name: RuleLabels) -> Callable[[str], tuple[frozenset[str], frozenset[str]]]:
    """Label images by their reports, where a source gives no labels.

    What a report does not mention counts as absent. ``No Finding`` is no label, and neither is a class that may be
    positive beside it (support devices): such an image has none.
    """
    labeler = rule_labeler(name)

    def labels(report: str) -> tuple[frozenset[str], frozenset[str]]:
        found: dict[Label, set[str]] = {"positive": set(), "uncertain": set()}
        for one, label in labeler(report).items():
            if label in found and one != labeler.no_finding and one not in labeler.beside:
                found[label].add(one)
        return frozenset(found["positive"]), frozenset(found["uncertain"])

    return labels
