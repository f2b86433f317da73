"""Rule-based labelers: which observations a report states, denies, doubts, or does not mention.

Tables of phrases, in a YAML file for each labeler, name the observations; cues and their reach, after NegEx (Chapman et
al., 2001), deny or doubt them. These are no neural labelers: their labels are not CheXbert's or RadBERT's.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import yaml

from fedtar_flare.core.plugins import load
from fedtar_flare.data.cohort import Modality
from fedtar_flare.metrics.labels import Labeler
from fedtar_flare.metrics.sentences import Match, Phrasebook, listed, phrases, sentences


class Cue(Enum):
    """The effect of a phrase on the words around it."""

    DENIES_AFTER = 1
    DENIES_BEFORE = 2
    DOUBTS_AFTER = 3
    DOUBTS_BEFORE = 4
    DOUBTS_BOTH = 5
    ENDS = 6  # a clause ends here: nothing reaches over it
    ENDS_DENIAL = 7  # only a denial ends here: what is likely due to something is likely due to it
    DOUBTS_ANEW = 8  # a clause ends here, and what follows is doubted
    NOTHING = 9  # looks like a denial and is none


_WORDS = phrases("cues")
_BOOK: Phrasebook[Cue] = Phrasebook((phrase, cue) for cue in Cue for phrase in _WORDS[cue.name.lower()])
_VERBS = frozenset(
    ["is", "are", "was", "were", "has", "have", "had", "shows", "show", "remains", "remain", "demonstrates", "there"]
)
_PREDICATES = _VERBS | frozenset(phrases("names")["observed"][0].split("|"))
_STATES, _BEHIND = (frozenset(phrases("clauses")[name]) for name in ("states", "behind"))
_BEHIND |= {",", ":", "(", ")", "?"}
_ALTERNATIVES = frozenset({"or", "nor", "and/or"})


Reach = tuple[list[bool], list[bool]]  # of each word of a sentence, whether it is denied, and whether it is doubted


def scopes(words: Sequence[str]) -> tuple[Reach, Reach]:
    """Reach of the cues in a sentence, in one pass to the right and one to the left.

    To the right, a cue reaches to the end of its clause: a conjunction such as *but*, *and* after the predicate, or a
    comma after it or before a new statement ("no pneumothorax, small effusion") unless an *or* still follows ("no
    edema, large effusion or pneumothorax"). *Seen* and the like are predicates where no noun follows ("no visible
    pneumothorax, effusion, or edema"). To the left, it reaches to the predicate or the clause before its own.
    """
    starting: dict[int, Match[Cue]] = {}
    ending: dict[int, Match[Cue]] = {}
    for cue in _BOOK.cover(words):
        starting[cue.start] = ending[cue.end - 1] = cue
    return _to_the_right(words, starting), _to_the_left(words, ending, _predicate_before(words, starting))


def _to_the_right(words: Sequence[str], starting: dict[int, Match[Cue]]) -> Reach:
    alternative = _alternative_ahead(words, starting)
    denied, doubted = [False] * len(words), [False] * len(words)
    denying = doubting = predicate = False
    inside = 0  # end of the cue that is being passed
    for i, word in enumerate(words):
        cue = starting.get(i)
        if cue:
            inside = cue.end
            if cue.tag is Cue.ENDS:
                denying = doubting = False
            elif cue.tag is Cue.ENDS_DENIAL:
                denying = False
            elif cue.tag is Cue.DENIES_AFTER or (cue.tag is Cue.DENIES_BEFORE and (not i or _heads(words, cue))):
                denying, predicate = True, False  # as "resolved effusion"
            elif cue.tag in (Cue.DOUBTS_AFTER, Cue.DOUBTS_BOTH):
                doubting, predicate = True, False
            elif cue.tag is Cue.DOUBTS_ANEW:
                denying, doubting, predicate = False, True, False
        elif i >= inside:
            if word in (",", "and"):
                following = words[i + 1] if i + 1 < len(words) else ""
                ends = predicate or (word == "," and following in _STATES)
                if ends and not (word == "," and alternative[i]):
                    denying = doubting = predicate = False
            elif word in (":", ")"):
                denying = doubting = False
            elif word in _VERBS or (word in _PREDICATES and (i + 1 == len(words) or words[i + 1] in _BEHIND)):
                predicate = True  # and no adjective of a noun behind it
        denied[i], doubted[i] = denying, doubting
    return denied, doubted


def _heads(words: Sequence[str], cue: Match[Cue]) -> bool:
    """Whether it is of "pleura: no effusion", and not of "effusion: no, ..." or "effusion: no pneumothorax: no"."""
    first, second = [*words[cue.end : cue.end + 2], "", ""][:2]
    return words[cue.start] == ":" and words[cue.end - 1] == "no" and first.isalnum() and second != ":"


def _alternative_ahead(words: Sequence[str], starting: dict[int, Match[Cue]]) -> list[bool]:
    """Per word, whether *or* follows in the same clause, before any other cue and predicate."""
    ahead = [False] * len(words)
    follows = False
    for i in range(len(words) - 1, -1, -1):
        ahead[i] = follows
        follows = words[i] in _ALTERNATIVES or (follows and i not in starting and words[i] not in _VERBS)
    return ahead


def _to_the_left(words: Sequence[str], ending: dict[int, Match[Cue]], stated: Sequence[bool]) -> Reach:
    denied, doubted = [False] * len(words), [False] * len(words)
    denying = doubting = False
    inside = len(words)  # start of the cue that is being passed
    for i in range(len(words) - 1, -1, -1):
        word = words[i]
        cue = ending.get(i)
        if cue:
            inside = cue.start
            if cue.tag in (Cue.ENDS, Cue.DOUBTS_ANEW, Cue.DENIES_AFTER, Cue.DOUBTS_AFTER):
                denying = doubting = False
            elif cue.tag is Cue.DENIES_BEFORE:
                denying, doubting = True, False
            elif cue.tag in (Cue.DOUBTS_BEFORE, Cue.DOUBTS_BOTH):
                denying, doubting = False, True
        elif i < inside:
            if word == ",":
                doubting = False
                denying = denying and not stated[i]
            elif word == "and":
                denying, doubting = denying and not stated[i], doubting and not stated[i]
            elif word == "(":
                doubting = False
            elif word in _VERBS or word == ":":
                denying = doubting = False
        denied[i], doubted[i] = denying, doubting
    return denied, doubted


def _predicate_before(words: Sequence[str], starting: dict[int, Match[Cue]]) -> list[bool]:
    """Per word, whether its clause has a predicate before it."""
    before = [False] * len(words)
    predicate = False
    passed = 0  # end of a phrase that does nothing
    for i, word in enumerate(words):
        cue = starting.get(i)
        if cue and cue.tag in (Cue.ENDS, Cue.DOUBTS_ANEW):
            predicate = word == "there"
        elif cue and cue.tag is Cue.NOTHING:
            passed = cue.end
        before[i] = predicate
        predicate = predicate or (i >= passed and word in _PREDICATES)
    return before


Label = Literal["positive", "negative", "uncertain", "blank"]
Direction = Literal["new", "increased", "decreased", "unchanged", "resolved"]
RuleLabels = Literal["chexpert-rules", "ctrate-rules"]
NEURAL: dict[str, RuleLabels] = {"chexbert": "chexpert-rules", "radbert": "ctrate-rules"}
"""Names of the labelers that are neural models, each with the rules of the same classes."""

_STRENGTH: dict[Label, int] = {"blank": 0, "negative": 1, "uncertain": 2, "positive": 3}
_BY_ITSELF: dict[str, Label] = {"present": "positive", "absent": "negative", "unsure": "uncertain", "ignore": "blank"}
_KINDS = (*_BY_ITSELF, "elsewhere", "here")


@dataclass(frozen=True)
class Observation:
    """A class of a labeler, as tables of phrases separated by commas (see :class:`.Phrasebook`)."""

    name: str
    present: str  # states it, unless denied or doubted
    absent: str = ""  # denies it by itself ("heart size is normal"); denied, it states it
    unsure: str = ""  # leaves it open by itself ("heart size is top normal")
    ignore: str = ""  # has another meaning; the words it covers are no mention ("pericardial effusion")
    elsewhere: str = ""  # words of another organ: a sentence with one has no mention, unless it has one of ``here``
    here: str = ""


class Mention(NamedTuple):
    """An observation at ``words[start:end]`` of a sentence."""

    start: int
    end: int
    name: str
    label: Label


class RuleLabeler:
    """Labels reports by rules; equal texts get equal labels, in linear time.

    ``no_finding`` is positive where no class but those ``beside`` it is; ``degrees`` and ``changes`` are words of such
    reports.
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
        for observation in observations:
            self.names += (observation.name,)
            for kind in _KINDS:
                phrases += product(listed(getattr(observation, kind)), [(observation.name, kind)])
        self._book = Phrasebook(phrases)
        self._labels = lru_cache(maxsize=4096)(self._labels_of)  # references are labelled again in every evaluation

    def __call__(self, text: str) -> dict[str, Label]:
        """The label of every class: the strongest of its mentions, positive, uncertain or negative, else blank."""
        return self._labels(text).copy()

    def code(self, text: str) -> str:
        """The first letters of these labels."""
        return "".join(label[0] for label in self._labels(text).values())

    def _labels_of(self, text: str) -> dict[str, Label]:
        labels: dict[str, Label] = dict.fromkeys(self.names, "blank")
        findings, empty = set(), True
        for words in sentences(text):
            empty = False
            for mention in self.mentions(words):
                if _STRENGTH[mention.label] > _STRENGTH[labels[mention.name]]:
                    labels[mention.name] = mention.label
                if mention.label in ("positive", "uncertain"):
                    findings.add(mention.name)
        if self.no_finding and not empty and findings <= self.beside:
            labels[self.no_finding] = "positive"
        return labels

    def mentions(self, words: Sequence[str]) -> list[Mention]:
        """Find the mentions in a sentence."""
        by_class: dict[str, list[tuple[int, int, str]]] = {}
        for start, end, (name, kind) in self._book.find(words):
            by_class.setdefault(name, []).append((start, end, kind))
        if not by_class:
            return []
        (denied, doubted), (denied_back, doubted_back) = scopes(words)
        mentions = []
        for name, spans in by_class.items():
            kinds = {kind for *_, kind in spans}
            if "elsewhere" in kinds and "here" not in kinds:
                continue
            for start, end, kind in _longest(spans):  # a cue within the phrase counts
                label: Label = "uncertain" if doubted[end - 1] or doubted_back[start] else _BY_ITSELF[kind]
                if denied[end - 1] or denied_back[start]:
                    label = "positive" if kind == "absent" else "negative"
                if kind != "ignore":
                    mentions.append(Mention(start, end, name, label))
        return sorted(mentions)


def _longest(spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Spans of one class that do not overlap: the longest first, then from the left; words of organs are no spans."""
    longest: list[tuple[int, int, str]] = []
    for start, end, kind in sorted(spans, key=lambda span: (span[0], -span[1], -_KINDS.index(span[2]))):
        if kind in ("elsewhere", "here"):
            continue
        if not longest or start >= longest[-1][1]:
            longest.append((start, end, kind))
        elif end - start > longest[-1][1] - longest[-1][0]:  # within the one before, and longer
            longest[-1] = (start, end, kind)
    return longest


@cache
def rule_labeler(name: RuleLabels) -> RuleLabeler:
    """Get the labeler of a YAML file: 14 CheXpert classes (Irvin et al., AAAI 2019), or 18 of CT-RATE (Hamamci et al.,
    2024).

    A heart or mediastinum that is only called stable, or at the limit of normal, is uncertain.
    """
    rules = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    observations = []
    for name_of_class, tables in rules["observations"].items():
        filled = {kind: table.format_map(rules["words"]) for kind, table in tables.items()}
        observations.append(Observation(name_of_class, **filled))
    beside, unsided = frozenset(rules.get("beside", ())), frozenset(rules["unsided"])
    return RuleLabeler(observations, no_finding=rules.get("no_finding", ""), beside=beside, unsided=unsided)


def classes_of(name: str) -> tuple[str, ...]:
    """List a labeler's classes in the order of its labels; ``No Finding`` is CheXbert's last."""
    rules = NEURAL.get(name, name)
    if rules not in NEURAL.values():
        return load("labeler", name, Labeler).classes
    names = rule_labeler(rules).names
    return (*names[1:], names[0]) if name == "chexbert" else names


def rules_for(modality: Modality) -> RuleLabels:
    """Choose the rules whose classes are usual for reports on such images."""
    return "ctrate-rules" if modality == "ct" else "chexpert-rules"


def report_labels(name: RuleLabels) -> Callable[[str], tuple[frozenset[str], frozenset[str]]]:
    """Label images by their reports: what a report does not mention is absent; ``No Finding``, and what may be beside
    it, is no label.
    """
    labeler = rule_labeler(name)

    def labels(report: str) -> tuple[frozenset[str], frozenset[str]]:
        of_report = labeler(report)
        findings = [finding for finding in of_report if finding not in {labeler.no_finding, *labeler.beside}]
        positive = frozenset(finding for finding in findings if of_report[finding] == "positive")
        return positive, frozenset(finding for finding in findings if of_report[finding] == "uncertain")

    return labels
