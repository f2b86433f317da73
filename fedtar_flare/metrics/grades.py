"""A finding of a generated report against the reference, in four parts: presence, side, degree and change.

What a text says is read by rules: findings by a :class:`.RuleLabeler`, change by :mod:`.temporal`, side and degree by
the words here. Only what the reference says is graded, and measurements ("6 mm") are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Literal

from fedtar_flare.metrics.labeler import Direction, Mention, RuleLabeler
from fedtar_flare.metrics.qualifiers import nearest, qualifiers
from fedtar_flare.metrics.sentences import Match, Phrasebook, phrases, sentences
from fedtar_flare.metrics.temporal import directions

Part = Literal["side", "degree", "change"]
PARTS: tuple[Part, ...] = ("side", "degree", "change")
"""What is graded of a finding that both texts state."""

DEGREES: Mapping[str, int] = {
    word: level
    for level, name in enumerate(("small", "moderate", "large"))
    for word in phrases("names")[name][0].split("|")
}
"""Words of degree in three levels: small, moderate and large."""
_SIDES = {"right": "right", "left": "left", "both": "right left", "none": ""}
_SIDE_BOOK: Phrasebook[str] = Phrasebook((p, _SIDES[side]) for side, ps in phrases("sides").items() for p in ps)


@dataclass(frozen=True, slots=True)
class Statement:
    """A finding that a text states as present, or as ``resolved``; what it does not say of it is empty."""

    finding: str
    side: frozenset[str]
    """``right``, ``left`` or both."""
    degree: frozenset[str]
    """Words of degree, as the text has them."""
    change: frozenset[Direction]
    """Direction since the visit before, see :data:`.DIRECTIONS`."""

    @property
    def resolved(self) -> bool:
        return "resolved" in self.change


@dataclass(frozen=True, slots=True)
class Grade:
    """One finding of a generated report against its reference.

    ``side``, ``degree`` and ``change`` are None unless both texts state the finding and the reference says this of it.
    """

    finding: str
    presence: Literal["right", "missed", "invented"]
    side: bool | None
    degree: bool | None
    change: bool | None
    words: Mapping[Part, tuple[str, str]]
    """What reference and generated report say of a part, empty for nothing; parts of which neither says anything are
    left out."""


@lru_cache(maxsize=4096)  # references are read again in every evaluation
def statements(text: str, labeler: RuleLabeler) -> tuple[Statement, ...]:
    """Findings that a text states, in their order; several of one finding where it is said several times.

    Denied and doubted findings are left out; :func:`.qualifiers` says which words belong to a finding.
    """
    found: list[Statement] = []
    for words in sentences(text):
        if mentions := labeler.mentions(words):
            found += _of_sentence(words, mentions, labeler)
    return tuple(found)


def grade(generated: str, reference: str, labeler: RuleLabeler) -> tuple[Grade, ...]:
    """Grades of all findings that either text states: those of the reference in its order, then those invented.

    Two sides of one finding are compared each with itself. A degree or a change is right if all that the generated
    report says of it is in the reference: "small" is right where that has "small to moderate". Degrees have the levels
    of :data:`DEGREES`, and those of the labeler's own words.
    """
    theirs, mine = _by_finding(statements(reference, labeler)), _by_finding(statements(generated, labeler))
    grades = []
    for finding in dict.fromkeys([*theirs, *mine]):
        there, said = theirs.get(finding, []), mine.get(finding, [])
        words = {part: (_words(part, there), _words(part, said)) for part in PARTS}
        grades.append(
            Grade(
                finding,
                "right" if there and said else "missed" if there else "invented",
                set(_all("side", there)) == set(_all("side", said)) if said and _all("side", there) else None,
                _agreed("degree", said, there, labeler) if said else None,
                _agreed("change", said, there, labeler) if said else None,
                {part: both for part, both in words.items() if any(both)},
            )
        )
    return tuple(grades)


def _by_finding(said: Sequence[Statement]) -> dict[str, list[Statement]]:
    found: dict[str, list[Statement]] = {}
    for one in dict.fromkeys(said):
        if not one.resolved:
            found.setdefault(one.finding, []).append(one)
    return found


def _all(part: Part, said: Sequence[Statement]) -> list[str]:
    return list(dict.fromkeys(word for one in said for word in sorted(getattr(one, part))))


def _words(part: Part, said: Sequence[Statement]) -> str:
    words = _all(part, said)
    return "both" if part == "side" and len(words) == 2 else ", ".join(words)


def _agreed(part: Part, said: Sequence[Statement], there: Sequence[Statement], labeler: RuleLabeler) -> bool | None:
    """Whether all that is said of a side is among what is there of it; of all sides where none is in both texts."""

    def of_side(one: Statement, others: Sequence[Statement]) -> list[str]:
        return _all(part, [other for other in others if not (one.side and other.side) or one.side & other.side])

    def same(word: str, other: str) -> bool:
        return word == other or (part == "degree" and _same_degree(word, other, labeler, there[0].finding))

    graded = [one for one in there if getattr(one, part)]
    paired = [one for one in graded if not one.side or any(one.side & other.side for other in said)]
    pairs = [(of_side(one, there), of_side(one, said)) for one in paired] or [(_all(part, there), _all(part, said))]
    right = [bool(mine) and all(any(same(m, t) for t in theirs) for m in mine) for theirs, mine in pairs]
    return all(right) if graded else None


def _same_degree(word: str, other: str, labeler: RuleLabeler, finding: str) -> bool:
    """On the first of the labeler's own scales that has both words, else if they have a level in common."""
    scales = labeler.degrees.get(finding, ())
    for scale in scales:
        if word in scale and other in scale:
            return scale[word] == scale[other]
    mine, theirs = ({scale[one] for scale in scales if one in scale} or {DEGREES[one]} for one in (word, other))
    return bool(mine & theirs)


@cache
def _degree_book(labeler: RuleLabeler) -> Phrasebook[str]:
    """All words of degree, each its own tag; of what looks like one and is none, the tag is empty."""
    own = chain.from_iterable(labeler.degrees.values())
    words = dict.fromkeys([*DEGREES, *chain.from_iterable(own)])
    return Phrasebook([*((phrase, "") for phrase in phrases("degrees")["none"]), *((word, word) for word in words)])


def _of_sentence(words: Sequence[str], mentions: Sequence[Mention], labeler: RuleLabeler) -> list[Statement]:
    sides = qualifiers(words, mentions, [match for match in _SIDE_BOOK.cover(words) if match.tag])
    degrees = qualifiers(words, mentions, [match for match in _degree_book(labeler).cover(words) if match.tag])
    changes = directions(words, mentions, labeler)
    found = []
    for mention, of_side, of_degree, change in zip(mentions, sides, degrees, changes, strict=True):
        if mention.label == "positive" or change == "resolved":
            side = [] if mention.name in labeler.unsided else [one for match in of_side for one in match.tag.split()]
            scales = (*labeler.degrees.get(mention.name, ()), DEGREES)
            degree = _degree(words, [one for one in of_degree if any(one.tag in scale for scale in scales)], mention)
            found.append(Statement(mention.name, frozenset(side), degree, frozenset([change] if change else [])))
    return found


def _degree(words: Sequence[str], matches: Sequence[Match[str]], mention: Mention) -> frozenset[str]:
    """The nearest word, and the one that "to" joins with it."""
    if not matches:
        return frozenset()
    last = nearest(matches, mention)
    return frozenset(
        one.tag for one in matches if one is last or (one.end == last.start - 1 and words[one.end] == "to")
    )
