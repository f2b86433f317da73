"""Grades of a draft's findings against the reference, in four parts: presence, side, degree and change.

Rules read the texts: findings by a :class:`.RuleLabeler`, change by :mod:`.qualifiers`, side and degree by the words
here. Only what the reference says is graded, and measurements ("6 mm") are not.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Literal

from fedtar_flare.metrics.labeler import Direction, Mention, RuleLabeler
from fedtar_flare.metrics.qualifiers import directions, nearest, qualifiers
from fedtar_flare.metrics.sentences import Match, Phrasebook, phrases, sentences

Part = Literal["side", "degree", "change"]
PARTS: tuple[Part, ...] = ("side", "degree", "change")
"""Graded parts of a finding that both texts state."""

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
    """A finding that a text states as present or as resolved; parts that it does not mention are empty.

    Attributes
    ----------
    finding : str
    side : frozenset of str
        ``right``, ``left`` or both.
    degree : frozenset of str
        Words of degree in the text.
    change : frozenset of Direction
        Since the visit before.
    """

    finding: str
    side: frozenset[str]
    degree: frozenset[str]
    change: frozenset[Direction]

    @property
    def resolved(self) -> bool:
        """Whether the finding is gone."""
        return "resolved" in self.change


@dataclass(frozen=True, slots=True)
class Grade:
    """A finding of a draft against its reference.

    Attributes
    ----------
    finding, presence : str, {"right", "missed", "invented"}
    side, degree, change : bool, optional
        Whether this part is right; None unless both texts state the finding and the reference gives the part.
    words : mapping of str to tuple of str
        By part that either text gives, the words of reference and draft; empty for none.
    """

    finding: str
    presence: Literal["right", "missed", "invented"]
    side: bool | None
    degree: bool | None
    change: bool | None
    words: Mapping[Part, tuple[str, str]]


@lru_cache(maxsize=4096)  # references are read again in every evaluation
def statements(text: str, labeler: RuleLabeler) -> tuple[Statement, ...]:
    """Read the findings that a text states; those that it denies or doubts are left out."""
    found: list[Statement] = []
    for words in sentences(text):
        if mentions := labeler.mentions(words):
            found += _of_sentence(words, mentions, labeler)
    return tuple(found)


def grade(draft: str, reference: str, labeler: RuleLabeler) -> tuple[Grade, ...]:
    """Grade all findings that either text states.

    Two sides of a finding are compared each with itself. A degree or a change is right if all the draft's words for it
    agree with the reference: "small" is right where that has "small to moderate". Degrees have the levels of
    :data:`DEGREES`, and those of the labeler's own words.
    """
    in_reference, in_draft = _by_finding(reference, labeler), _by_finding(draft, labeler)
    grades = []
    for finding in dict.fromkeys([*in_reference, *in_draft]):
        true, said = in_reference[finding], in_draft[finding]
        words, sides = dict[Part, tuple[str, str]](), (set(_words("side", true)), set(_words("side", said)))
        for part in PARTS:
            both = _text(part, true), _text(part, said)
            if any(both):
                words[part] = both
        grades.append(
            Grade(
                finding,
                presence="right" if true and said else "missed" if true else "invented",
                side=sides[0] == sides[1] if said and sides[0] else None,
                degree=_agreed("degree", said, true, labeler) if said else None,
                change=_agreed("change", said, true, labeler) if said else None,
                words=words,
            )
        )
    return tuple(grades)


def _by_finding(text: str, labeler: RuleLabeler) -> dict[str, list[Statement]]:
    """Statements of a text by finding, without those of findings that are gone."""
    found: dict[str, list[Statement]] = defaultdict(list)
    for one in dict.fromkeys(statements(text, labeler)):
        if not one.resolved:
            found[one.finding].append(one)
    return found


def _words(part: Part, said: Sequence[Statement]) -> list[str]:
    """The words of a part in all statements, each once."""
    words: dict[str, None] = {}
    for one in said:
        words.update(dict.fromkeys(sorted(getattr(one, part))))
    return list(words)


def _text(part: Part, said: Sequence[Statement]) -> str:
    words = _words(part, said)
    return "both" if part == "side" and len(words) == 2 else ", ".join(words)


def _agreed(part: Part, said: Sequence[Statement], true: Sequence[Statement], labeler: RuleLabeler) -> bool | None:
    """Whether the draft's words for a side agree with the reference's; over all sides where no side is in both."""
    graded = [one for one in true if getattr(one, part)]
    if not graded:
        return None

    def of_side(one: Statement, others: Sequence[Statement]) -> list[str]:
        return _words(part, [other for other in others if not (one.side and other.side) or one.side & other.side])

    def same(word: str, other: str) -> bool:
        return word == other or (part == "degree" and _same_degree(word, other, labeler, true[0].finding))

    paired = [one for one in graded if not one.side or any(one.side & other.side for other in said)]
    pairs = [(of_side(one, true), of_side(one, said)) for one in paired] or [(_words(part, true), _words(part, said))]
    return all(mine and all(any(same(m, t) for t in theirs) for m in mine) for theirs, mine in pairs)


def _same_degree(word: str, other: str, labeler: RuleLabeler, finding: str) -> bool:
    """Compare on the first of the labeler's own scales that has both words, else whether they share a level."""
    scales = labeler.degrees.get(finding, ())
    for scale in scales:
        if word in scale and other in scale:
            return scale[word] == scale[other]
    levels = [{scale[one] for scale in scales if one in scale} or {DEGREES[one]} for one in (word, other)]
    return bool(levels[0] & levels[1])


@cache
def _degree_book(labeler: RuleLabeler) -> Phrasebook[str]:
    """All words of degree, each its own tag; phrases that only look like one have an empty tag."""
    own = chain.from_iterable(labeler.degrees.values())
    words = dict.fromkeys([*DEGREES, *chain.from_iterable(own)])
    return Phrasebook([*dict.fromkeys(phrases("degrees")["none"], "").items(), *zip(words, words, strict=True)])


def _of_sentence(words: Sequence[str], mentions: Sequence[Mention], labeler: RuleLabeler) -> list[Statement]:
    sides = qualifiers(words, mentions, [match for match in _SIDE_BOOK.cover(words) if match.tag])
    degrees = qualifiers(words, mentions, [match for match in _degree_book(labeler).cover(words) if match.tag])
    changes = directions(words, mentions, labeler)
    found = []
    for mention, of_side, of_degree, change in zip(mentions, sides, degrees, changes, strict=True):
        if mention.label == "positive" or change == "resolved":
            side = [] if mention.name in labeler.unsided else " ".join([match.tag for match in of_side]).split()
            known = {*DEGREES}.union(*labeler.degrees.get(mention.name, ()))
            degree = _degree(words, [match for match in of_degree if match.tag in known], mention)
            found.append(Statement(mention.name, frozenset(side), degree, frozenset([change] if change else [])))
    return found


def _degree(words: Sequence[str], matches: Sequence[Match[str]], mention: Mention) -> frozenset[str]:
    """The nearest word, and the word that "to" joins with it."""
    if not matches:
        return frozenset()
    last = nearest(matches, mention)
    return frozenset(
        [one.tag for one in matches if one is last or (one.end == last.start - 1 and words[one.end] == "to")]
    )
