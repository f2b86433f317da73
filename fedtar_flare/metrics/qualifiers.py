"""Which finding of a sentence a word of side, degree or change belongs to, and what reports say of change."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import NamedTuple

from fedtar_flare.metrics.labeler import Direction, Mention, RuleLabeler
from fedtar_flare.metrics.sentences import Match, Phrasebook, Tag, phrases, sentences

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
    order, found = sorted(by_piece), []
    colon = words.index(":") if ":" in words else -1
    for mention in mentions:
        own = numbers[mention.start]
        position = bisect_left(order, own)
        before = order[position - 1] if position else -1
        after = order[position] if position < len(order) else -1
        chosen: list[Match[Tag]] = []
        if own in by_piece:
            chosen = by_piece[own]
            chosen = chosen if len(spans[own]) == 1 else [nearest(chosen, mention)]
        elif after == own + 1 and after not in spans:
            chosen = by_piece[after]
        elif before >= 0 and before not in spans:
            chosen = by_piece[before]
        elif before >= 0 and by_piece[before][-1].end <= (spans[before][0][0] if shared else colon):
            chosen = by_piece[before][-1:]
        elif after >= 0 and (after not in spans or by_piece[after][0].start >= spans[after][-1][1]):
            chosen = by_piece[after]
        found.append(chosen)
    return found


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


_PHRASES: list[tuple[str, Direction | None]] = [
    (phrase, direction) for direction in (*DIRECTIONS, None) for phrase in phrases("changes")[direction or "none"]
]
_BOOK: Phrasebook[Direction | None] = Phrasebook(_PHRASES)


class FindingChange(NamedTuple):
    """A finding, and how it changed since the visit before.

    Attributes
    ----------
    finding, direction : str
    """

    finding: str
    direction: Direction


@lru_cache(maxsize=4096)
def finding_changes(text: str, labeler: RuleLabeler) -> frozenset[FindingChange]:
    """Read the changes of findings since the visit before."""
    found = set()
    for words in sentences(text):
        if mentions := labeler.mentions(words):
            for mention, direction in zip(mentions, directions(words, mentions, labeler), strict=True):
                if direction:
                    found.add(FindingChange(mention.name, direction))
    return frozenset(found)


def directions(words: Sequence[str], mentions: Sequence[Mention], labeler: RuleLabeler) -> list[Direction | None]:
    """How each of a sentence's ``mentions`` changed, by the nearest of its :func:`qualifiers`; None without any."""
    own: set[int] = set()  # a mention's own words do not qualify it: "heart size has increased"
    for mention in mentions:
        own.update(range(mention.start, mention.end))
    matches = []
    for match in _book(labeler).cover(words):
        if match.tag is not None and not own.issuperset(range(match.start, match.end)):
            matches.append(match)
    found = qualifiers(words, mentions, matches, shared=True)
    return [nearest(near, mention).tag if near else None for near, mention in zip(found, mentions, strict=True)]


@cache
def _book(labeler: RuleLabeler) -> Phrasebook[Direction | None]:
    return Phrasebook([*labeler.changes.items(), *_PHRASES]) if labeler.changes else _BOOK


def claims(visits: Iterable[tuple[str, float, str]], labeler: RuleLabeler) -> list[tuple[str, bool]]:
    """Claims of change in ``visits`` (patient, time, report): the patient, and whether the report before contradicts.

    A finding that is unchanged, increased, decreased or resolved contradicts a report that denies or does not mention
    it; a new one contradicts a report that states it. A doubtful mention contradicts nothing.
    """
    by_patient: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for patient, time, text in visits:
        by_patient[patient].append((time, text))
    found = []
    for patient, reports in by_patient.items():
        for (_, before), (_, text) in pairwise(sorted(reports, key=itemgetter(0))):
            labels = labeler(before)
            for finding, direction in finding_changes(text, labeler):
                contrary = ("positive",) if direction == "new" else ("negative", "blank")
                found.append((patient, labels[finding] in contrary))
    return found
