"""Grades of a draft's findings against the reference, in four parts: presence, side, degree and change.

Rules read the texts: findings by a :class:`.RuleLabeler`; side, degree and change by words, each of which qualifies the
findings next to it. Only what the reference says is graded, and measurements ("6 mm") are not. Claims of change are
compared with the report before, too.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Literal, NamedTuple, TypeVar

from fedtar_flare.metrics.labeler import Direction, Mention, RuleLabeler
from fedtar_flare.metrics.sentences import Match, Phrasebook, Tag, phrases, sentences

Known = TypeVar("Known")
DIRECTIONS: tuple[Direction, ...] = ("new", "increased", "decreased", "unchanged", "resolved")

_DIVIDERS = frozenset(
    [",", "and", "but", "while", "whereas", "however", "although", "though", "with", "plus", "(", ")"]
)


def qualifiers(
    words: Sequence[str], mentions: Sequence[Mention], matches: Sequence[Match[Tag]], *, shared: bool = False
) -> list[list[Match[Tag]]]:
    """For each of a sentence's ``mentions``, the ``matches`` that qualify it; all are in order.

    Commas, brackets and conjunctions divide a sentence into pieces, "and" only between two findings. A finding has the
    matches of its own piece; of several findings in a piece, each has the nearest match. Else it has those of the next
    piece if that names no finding ("effusion, unchanged"); else of a piece before, whose match stands before a colon
    ("right lung: consolidation, nodule") or, if ``shared``, before its findings ("increased effusion and atelectasis"),
    or that names none; else of a piece behind, whose match comes last ("effusion and consolidation on the right").
    """
    numbers = _pieces(words, set(map(attrgetter("start"), mentions)))
    by_piece: dict[int, list[Match[Tag]]] = {}
    for match in matches:
        by_piece.setdefault(numbers[match.start], []).append(match)
    spans: dict[int, list[tuple[int, int]]] = {}  # words of the findings of a piece; two classes may share them
    for mention in mentions:
        of_piece = spans.setdefault(numbers[mention.start], [])
        if not of_piece or mention.start >= of_piece[-1][1]:
            of_piece.append((mention.start, mention.end))
    order, of_mentions = sorted(by_piece), []
    colon = words.index(":") if ":" in words else -1
    for mention in mentions:
        piece = numbers[mention.start]
        position = bisect_left(order, piece)
        before = order[position - 1] if position else -1
        after = order[position] if position < len(order) else -1
        chosen: list[Match[Tag]] = []
        if piece in by_piece:
            chosen = by_piece[piece]
            chosen = chosen if len(spans[piece]) == 1 else [nearest(chosen, mention)]
        elif after == piece + 1 and after not in spans:
            chosen = by_piece[after]
        elif before >= 0 and before not in spans:
            chosen = by_piece[before]
        elif before >= 0 and by_piece[before][-1].end <= (spans[before][0][0] if shared else colon):
            chosen = by_piece[before][-1:]
        elif after >= 0 and (after not in spans or by_piece[after][0].start >= spans[after][-1][1]):
            chosen = by_piece[after]
        of_mentions.append(chosen)
    return of_mentions


def nearest(matches: Sequence[Match[Tag]], mention: Mention) -> Match[Tag]:
    """The match nearest to the mention; of two as near, the one before."""
    i = bisect_left(matches, mention.start, key=attrgetter("start"))
    if i in (0, len(matches)):
        return matches[min(i, len(matches) - 1)]
    before, after = matches[i - 1], matches[i]
    apart = max(before.start - mention.end, mention.start - before.end)
    return before if apart <= max(after.start - mention.end, mention.start - after.end) else after


def _pieces(words: Sequence[str], findings: set[int]) -> list[int]:
    """The number of each word's piece; ``findings`` begin at these words."""
    starts = [0] + [i for i, word in enumerate(words) if i and word in _DIVIDERS and words[i - 1] not in _DIVIDERS]
    numbers: list[int] = []
    named = True
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(words)], strict=True)):
        names = not findings.isdisjoint(range(start, end))
        goes_on = words[start] == "and" and numbers and not (named and names)
        numbers += [numbers[-1] if goes_on else number] * (end - start)
        named = names or (bool(goes_on) and named)
    return numbers


class FindingChange(NamedTuple):
    """A finding, and how it changed since the visit before."""

    finding: str
    direction: Direction


@lru_cache(maxsize=4096)
def finding_changes(text: str, labeler: RuleLabeler) -> frozenset[FindingChange]:
    """Read the changes of findings since the visit before; of findings that are denied or doubted none but the end."""
    return frozenset(FindingChange(s.finding, change) for s in statements(text, labeler) for change in s.change)


def directions(words: Sequence[str], mentions: Sequence[Mention], labeler: RuleLabeler) -> list[Direction | None]:
    """How each of a sentence's ``mentions`` changed, by the nearest of its :func:`qualifiers`; None without any."""
    mentioned: set[int] = set()  # the words of mentions do not qualify them: "heart size has increased"
    for mention in mentions:
        mentioned.update(range(mention.start, mention.end))
    matches = []
    for match in _book(labeler).cover(words):
        if match.tag is not None and not mentioned.issuperset(range(match.start, match.end)):
            matches.append(match)
    stronger = [match for match in matches if not words[match.start].startswith("persist")]
    if stronger and len(mentions) == 1:  # "persists, but is smaller"
        matches = stronger
    near = qualifiers(words, mentions, matches, shared=True)
    return [nearest(of, mention).tag if of else None for of, mention in zip(near, mentions, strict=True)]


@cache
def _book(labeler: RuleLabeler) -> Phrasebook[Direction | None]:
    """The phrases of all reports, and further ones of the labeler's."""
    known = [(p, direction) for direction in DIRECTIONS for p in phrases("changes")[direction]]
    return Phrasebook([*labeler.changes.items(), *known, *dict.fromkeys(phrases("changes")["none"]).items()])


def later_visits(visits: Iterable[tuple[str, float, str, Known]]) -> Iterator[tuple[str, Known, str]]:
    """Of ``visits`` (patient, time, report, and what is known of it) those with a visit before, and its report.

    Of two visits at one time neither came before the other.
    """
    by_patient: dict[str, list[tuple[str, float, str, Known]]] = defaultdict(list)
    for visit in visits:
        by_patient[visit[0]].append(visit)
    for patient, of_patient in by_patient.items():
        before = None
        for _, at_once in groupby(sorted(of_patient, key=itemgetter(1, 2)), key=itemgetter(1)):
            rows = [*at_once]
            if before is not None:
                yield from ((patient, known, before) for *_, known in rows)
            before = rows[-1][2]


def claims(visits: Iterable[tuple[str, float, str, str]], labeler: RuleLabeler) -> list[tuple[str, str, bool]]:
    """Claims of change in ``visits`` (patient, time, report, draft): patient, finding, and whether the report before
    contradicts.
    """
    verdicts = []
    for patient, draft, before in later_visits(visits):
        for claim in contrary_claims(draft, before, labeler):
            verdicts.append((patient, *claim))
    return verdicts


def contrary_claims(text: str, before: str, labeler: RuleLabeler) -> list[tuple[str, bool]]:
    """The findings of which a text claims a change, and whether the report ``before`` contradicts.

    A finding that is unchanged, increased, decreased or resolved contradicts a report that denies or does not mention
    it; a new one contradicts a report that states it. Two sides of a finding are two findings, where both texts name
    them. A doubtful mention contradicts nothing.
    """
    labels, earlier, verdicts = labeler(before), _by_finding(before, labeler), []
    claimed = [(s.finding, s.side, change) for s in statements(text, labeler) for change in s.change]
    for finding, side, change in dict.fromkeys(claimed):
        stated = any(not (side and s.side) or side & s.side for s in earlier[finding])
        verdicts.append((finding, stated if change == "new" else not stated and labels[finding] != "uncertain"))
    return verdicts


Part = Literal["side", "degree", "change"]
PARTS: tuple[Part, ...] = ("side", "degree", "change")
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
    """A finding that a text states as present or resolved: sides, words of degree and change, as far as stated."""

    finding: str
    side: frozenset[str]
    degree: frozenset[str]
    change: frozenset[Direction]

    @property
    def resolved(self) -> bool:
        return "resolved" in self.change


@dataclass(frozen=True, slots=True)
class Grade:
    """A finding of a draft against its reference: whether each part is right, None where it is not graded; and the
    words.
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
    stated: list[Statement] = []
    for words in sentences(text):
        if mentions := labeler.mentions(words):
            stated += _of_sentence(words, mentions, labeler)
    return tuple(stated)


def grade(draft: str, reference: str, labeler: RuleLabeler) -> tuple[Grade, ...]:
    """Grade all findings that either text states; two sides of a finding are compared each with itself.

    A degree or a change is right if all the draft's words for it agree with the reference: "small" is right where that
    has "small to moderate".
    """
    in_reference, in_draft = _by_finding(reference, labeler), _by_finding(draft, labeler)
    grades = []
    for finding in dict.fromkeys([*in_reference, *in_draft]):
        true, drafted = in_reference[finding], in_draft[finding]
        words = {part: both for part in PARTS if any(both := (_text(part, true), _text(part, drafted)))}
        true_side, draft_side = set(_words("side", true)), set(_words("side", drafted))
        grades.append(
            Grade(
                finding,
                presence="right" if true and drafted else "missed" if true else "invented",
                side=true_side == draft_side if drafted and true_side else None,
                degree=_agreed("degree", drafted, true, labeler) if drafted else None,
                change=_agreed("change", drafted, true, labeler) if drafted else None,
                words=words,
            )
        )
    return tuple(grades)


def marks(grades: Iterable[Grade], part: Part) -> list[bool]:
    """Whether a part is right, of the findings for which it is graded."""
    return [mark for g in grades if (mark := getattr(g, part)) is not None]


def _by_finding(text: str, labeler: RuleLabeler) -> dict[str, list[Statement]]:
    """Statements of a text by finding, without those of findings that are gone."""
    by_finding: dict[str, list[Statement]] = defaultdict(list)
    for statement in dict.fromkeys(statements(text, labeler)):
        if not statement.resolved:
            by_finding[statement.finding].append(statement)
    return by_finding


def _words(part: Part, statements: Sequence[Statement]) -> list[str]:
    """The words of a part in all statements, each once."""
    return list(dict.fromkeys(word for statement in statements for word in sorted(getattr(statement, part))))


def _text(part: Part, statements: Sequence[Statement]) -> str:
    words = _words(part, statements)
    return "both" if part == "side" and len(words) == 2 else ", ".join(words)


def _agreed(part: Part, drafted: Sequence[Statement], true: Sequence[Statement], labeler: RuleLabeler) -> bool | None:
    """Whether the draft's words for a side agree with the reference's; over all sides where no side is in both."""
    graded = [statement for statement in true if getattr(statement, part)]
    if not graded:
        return None

    def of_side(stated: Statement, others: Sequence[Statement]) -> list[str]:
        return _words(part, [o for o in others if not (stated.side and o.side) or stated.side & o.side])

    def same(word: str, other: str) -> bool:
        return word == other or (part == "degree" and _same_degree(word, other, labeler, true[0].finding))

    paired = [s for s in graded if not s.side or any(s.side & other.side for other in drafted)]
    pairs = [(of_side(s, true), of_side(s, drafted)) for s in paired] or [(_words(part, true), _words(part, drafted))]
    return all(mine and all(any(same(m, t) for t in theirs) for m in mine) for theirs, mine in pairs)


def level_of(statement: Statement, labeler: RuleLabeler) -> int | None:
    """The highest level, 0 (small) to 2 (large), of a statement's words of degree; None without a clear one."""
    levels = [_levels(word, statement.finding, labeler) for word in statement.degree]
    return max((level for of_word in levels for level in of_word if len(of_word) == 1), default=None)


def _levels(word: str, finding: str, labeler: RuleLabeler) -> set[int]:
    return {scale[word] for scale in labeler.degrees.get(finding, ()) if word in scale} or {DEGREES[word]}


def _same_degree(word: str, other: str, labeler: RuleLabeler, finding: str) -> bool:
    """Compare on the first of the labeler's own scales that has both words, else whether they share a level."""
    for scale in labeler.degrees.get(finding, ()):
        if word in scale and other in scale:
            return scale[word] == scale[other]
    return bool(_levels(word, finding, labeler) & _levels(other, finding, labeler))


@cache
def _degree_book(labeler: RuleLabeler) -> Phrasebook[str]:
    """All words of degree, each its own tag; phrases that only look like one have an empty tag."""
    scales = chain.from_iterable(labeler.degrees.values())
    words = dict.fromkeys([*DEGREES, *chain.from_iterable(scales)])
    return Phrasebook([*dict.fromkeys(phrases("degrees")["none"], "").items(), *zip(words, words, strict=True)])


def _of_sentence(words: Sequence[str], mentions: Sequence[Mention], labeler: RuleLabeler) -> list[Statement]:
    sides = qualifiers(words, mentions, [match for match in _SIDE_BOOK.cover(words) if match.tag])
    degrees = qualifiers(words, mentions, [match for match in _degree_book(labeler).cover(words) if match.tag])
    changes = directions(words, mentions, labeler)
    stated = []
    for mention, of_side, of_degree, change in zip(mentions, sides, degrees, changes, strict=True):
        if mention.label == "positive" or change == "resolved":
            side = [] if mention.name in labeler.unsided else " ".join([match.tag for match in of_side]).split()
            known = {*DEGREES}.union(*labeler.degrees.get(mention.name, ()))
            degree: list[str] = []
            if matches := [match for match in of_degree if match.tag in known]:
                at = nearest(matches, mention)  # and the word that "to" joins with it
                degree = [m.tag for m in matches if m is at or words[min(m.end, at.end) : max(m[0], at[0])] == ["to"]]
            since_before = frozenset([change] if change else [])
            stated.append(Statement(mention.name, frozenset(side), frozenset(degree), since_before))
    return stated
