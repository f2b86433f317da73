"""Which words of a sentence are denied or doubted: cues and their reach, after NegEx (Chapman et al., 2001)."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from fedtar_flare.metrics.sentences import Match, Phrasebook, phrases


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


class Scopes(NamedTuple):
    """Per word of a sentence, whether a cue before it (left) or after it (right) denies or doubts it."""

    denied_from_left: list[bool]
    denied_from_right: list[bool]
    doubted_from_left: list[bool]
    doubted_from_right: list[bool]

    def denied(self, start: int, end: int) -> bool:
        """A denial reaches the phrase ``words[start:end]``; a cue within it counts."""
        return self.denied_from_left[end - 1] or self.denied_from_right[start]

    def doubted(self, start: int, end: int) -> bool:
        """The same for a doubt."""
        return self.doubted_from_left[end - 1] or self.doubted_from_right[start]


def scopes(words: Sequence[str]) -> Scopes:
    """Reach of every cue in a sentence, in one pass to the right and one to the left.

    To the right, a cue reaches to the end of its clause: a conjunction such as *but*, *and* after the predicate, or a
    comma after it or before a new statement ("no pneumothorax, small effusion") unless an *or* still follows ("no
    edema, large effusion or pneumothorax"). *Seen* and the like are predicates where no noun follows ("no visible
    pneumothorax, effusion, or edema"). To the left, it reaches to the predicate or the clause before its own.
    """
    starting: dict[int, Match[Cue]] = {}
    ending: dict[int, Match[Cue]] = {}
    for cue in _BOOK.cover(words):
        starting[cue.start] = ending[cue.end - 1] = cue
    denied, doubted = _to_the_right(words, starting)
    denied_back, doubted_back = _to_the_left(words, ending, _predicate_before(words, starting))
    return Scopes(denied, denied_back, doubted, doubted_back)


def _to_the_right(words: Sequence[str], starting: dict[int, Match[Cue]]) -> tuple[list[bool], list[bool]]:
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
            elif cue.tag is Cue.DENIES_AFTER or (cue.tag is Cue.DENIES_BEFORE and not i):  # "resolved effusion"
                denying, predicate = True, False
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
            elif _predicates(words, i):
                predicate = True
        denied[i], doubted[i] = denying, doubting
    return denied, doubted


def _predicates(words: Sequence[str], i: int) -> bool:
    """Whether a word is a predicate, and no adjective of a noun behind it."""
    observed = words[i] in _PREDICATES and (i + 1 == len(words) or words[i + 1] in _BEHIND)
    return words[i] in _VERBS or observed


def _alternative_ahead(words: Sequence[str], starting: dict[int, Match[Cue]]) -> list[bool]:
    """Per word, whether *or* follows in the same clause, before any other cue and predicate."""
    ahead = [False] * len(words)
    found = False
    for i in range(len(words) - 1, -1, -1):
        ahead[i] = found
        found = words[i] in _ALTERNATIVES or (found and i not in starting and words[i] not in _VERBS)
    return ahead


def _to_the_left(
    words: Sequence[str], ending: dict[int, Match[Cue]], stated: Sequence[bool]
) -> tuple[list[bool], list[bool]]:
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
    found = False
    passed = 0  # end of a phrase that does nothing
    for i, word in enumerate(words):
        cue = starting.get(i)
        if cue and cue.tag in (Cue.ENDS, Cue.DOUBTS_ANEW):
            found = word == "there"
        elif cue and cue.tag is Cue.NOTHING:
            passed = cue.end
        before[i] = found
        found = found or (i >= passed and word in _PREDICATES)
    return before
