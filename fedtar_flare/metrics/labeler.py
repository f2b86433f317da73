"""A rule-based labeler: which observations a report states, denies, doubts, or does not mention.

Tables of phrases (:func:`.rule_labeler`) and the scope rules of :mod:`.scope` decide. It is no
neural labeler and its labels are not CheXbert's or RadBERT's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from fedtar_flare.metrics.scope import scopes
from fedtar_flare.metrics.sentences import Phrasebook, listed, sentences

Label = Literal["positive", "negative", "uncertain", "blank"]
Direction = Literal["new", "increased", "decreased", "unchanged", "resolved"]
_STRENGTH: dict[Label, int] = {"blank": 0, "negative": 1, "uncertain": 2, "positive": 3}


@dataclass(frozen=True)
class Observation:
    """One class of a labeler, as tables of phrases separated by commas (see :class:`.Phrasebook`)."""

    name: str
    present: str
    """Phrases that state it, unless denied or doubted."""
    absent: str = ""
    """Phrases that deny it by themselves ("heart size is normal"); denied, they state it."""
    unsure: str = ""
    """Phrases that leave it open by themselves ("heart size is top normal")."""
    ignore: str = ""
    """Phrases that say something else; what they cover is no mention ("pericardial effusion")."""
    elsewhere: str = ""
    """Words of another organ: a sentence with one of them has no mention, unless one of ``here`` is in it."""
    here: str = ""


class Mention(NamedTuple):
    """An observation at ``words[start:end]`` of a sentence."""

    start: int
    end: int
    name: str
    label: Label


class RuleLabeler:
    """Labels of reports by rules; equal for equal texts, in linear time.

    ``no_finding`` names the class that is positive where no other is positive or uncertain, except those of ``beside``,
    which may stand with it; "" for none. Sides are not read of those ``unsided``. ``degrees`` has per class scales of
    words, each from a word to its level, and ``changes`` words with their direction, of reports that use words of
    their own (see :mod:`.grades` and :mod:`.temporal`).
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
        self.observations = tuple(observations)
        self.no_finding = no_finding
        self.beside = frozenset(beside)
        self.unsided = frozenset(unsided)
        self.degrees = degrees
        self.changes = changes
        tables = ((one.name, kind, getattr(one, kind)) for one in observations for kind in _KINDS)
        self._labels = lru_cache(maxsize=4096)(self._labels_of)  # references are labelled again in every evaluation
        self._book = Phrasebook((phrase, (name, kind)) for name, kind, table in tables for phrase in listed(table))

    @property
    def names(self) -> tuple[str, ...]:
        """All classes; ``no_finding`` is the first."""
        return ((self.no_finding,) if self.no_finding else ()) + tuple(one.name for one in self.observations)

    def __call__(self, text: str) -> dict[str, Label]:
        """The label of every class; a text without any word has blank labels only.

        Positive if any mention is, else uncertain if any is, else negative if any is, else blank.
        """
        return dict(self._labels(text))

    def _labels_of(self, text: str) -> tuple[tuple[str, Label], ...]:
        labels: dict[str, Label] = dict.fromkeys(self.names, "blank")
        empty = True
        for words in sentences(text):
            empty = False
            for mention in self.mentions(words):
                if _STRENGTH[mention.label] > _STRENGTH[labels[mention.name]]:
                    labels[mention.name] = mention.label
        found = {name for name, label in labels.items() if label in ("positive", "uncertain")}
        if self.no_finding and not empty and found <= self.beside:
            labels[self.no_finding] = "positive"
        return tuple(labels.items())

    def mentions(self, words: Sequence[str]) -> list[Mention]:
        """Mentions in one sentence (see :func:`.sentences`), sorted; at most one per class and word."""
        by_class: dict[str, list[tuple[int, int, str]]] = {}
        for start, end, (name, kind) in self._book.find(words):
            by_class.setdefault(name, []).append((start, end, kind))
        if not by_class:
            return []
        reach = scopes(words)
        found = []
        for name, spans in by_class.items():
            kinds = {kind for _, _, kind in spans}
            if "elsewhere" in kinds and "here" not in kinds:
                continue
            for start, end, kind in _longest(spans):
                if kind != "ignore":
                    label = _label(kind, reach.denied(start, end), reach.doubted(start, end))
                    found.append(Mention(start, end, name, label))
        return sorted(found)


_KINDS = ("present", "absent", "unsure", "ignore", "elsewhere", "here")


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
