"""What reports say of change: change words, (finding, direction) pairs, and contradictions between visits."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

from fedtar_flare.metrics.clinical import finding_f1
from fedtar_flare.metrics.labeler import Direction, Label, Mention, RuleLabeler
from fedtar_flare.metrics.pairs import require_pairs
from fedtar_flare.metrics.sentences import Match, Phrasebook, Tag, listed, sentences

DIRECTIONS: tuple[Direction, ...] = ("new", "increased", "decreased", "unchanged", "resolved")

_WORDS: dict[Direction | None, str] = {
    "new": """
        new, newly, development of, interval development, has|have developed, has|have appeared, now present,
        interval appearance, new onset, has|have newly, not present before|previously, not seen before|previously""",
    "increased": """
        increased, increase, increases, increasing, larger, enlarging, bigger, worse, worsened, worsening, progressed,
        progression, progressive, progressing, grown, growing, growth, more extensive, more pronounced than, greater,
        has|have enlarged, deteriorated, deterioration""",
    "decreased": """
        decreased, decrease, decreases, decreasing, smaller, improved, improving, improvement, improves, less extensive,
        less pronounced, lessened, reduced, reduction, regressed, regression, regressing, diminished, diminishing,
        resolving, partial resolution, partially resolved, partially cleared, shrunk, clearing,
        incompletely resolved""",
    "unchanged": """
        unchanged, stable, stability, static, no _ change, no _ changes, no _ difference, without _ change, not changed,
        not _ changed, not increased, not decreased, not improved, not worsened, not resolved, not _ resolved,
        no _ increase, no _ decrease, no _ improvement, no _ worsening, no _ progression, no _ regression, similar,
        persistent, persists, persisting, persist, constant, not cleared, as before, as previously, the same,
        not progressed, not regressed, not grown""",
    "resolved": """
        resolved, resolution, has|have cleared, cleared, disappeared, no longer, gone, vanished,
        not present|seen any more""",
    None: """
        no new, without new, nothing new, increased density, increase in density, density increase*,
        increased _ density,
        increases in density, increased thickness, increase in thickness, thickness increase*, increased aeration,
        increased signal, size increase of, increase in _ thickness, increased _ marking*, increased lucency,
        stable chest, right|left greater|larger than,
        increased cardiothoracic""",
}
_PHRASES = [(phrase, way) for way, table in _WORDS.items() for phrase in listed(table)]
_BOOK: Phrasebook[Direction | None] = Phrasebook(_PHRASES)
_DIVIDERS = frozenset(
    [",", "and", "but", "while", "whereas", "however", "although", "though", "with", "plus", "(", ")"]
)


class FindingChange(NamedTuple):
    """A finding, and how it changed since the visit before."""

    finding: str
    direction: Direction


class VisitReport(NamedTuple):
    """Reference and generated report of one visit; ``order`` sorts a patient's visits in time."""

    patient: str
    order: float
    reference: str
    generated: str


class Contradiction(NamedTuple):
    """A report claims ``change`` though the patient's report before it, at ``before``, labels the finding ``label``."""

    patient: str
    before: float
    order: float
    change: FindingChange
    label: Label


def change_words(text: str) -> Counter[Direction]:
    """In how many sentences a report names each direction of change; "no new" names none, "no change" is unchanged."""
    named: Counter[Direction] = Counter()
    for words in sentences(text):
        named.update({way for _, _, way in _BOOK.cover(words) if way is not None})
    return named


def change_word_f1(references: Sequence[str], hypotheses: Sequence[str]) -> list[float]:
    """F1 of each report's change words, counted per sentence; 1 where neither text has any."""
    require_pairs(references, hypotheses)
    scores = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        there, named = change_words(reference), change_words(hypothesis)
        total = there.total() + named.total()
        scores.append(2 * (there & named).total() / total if total else 1.0)
    return scores


@lru_cache(maxsize=4096)
def finding_changes(text: str, labeler: RuleLabeler) -> frozenset[FindingChange]:
    """Findings of which a report says how they changed, in the classes of ``labeler``.

    See :func:`directions`.
    """
    found = set()
    for words in sentences(text):
        if mentions := labeler.mentions(words):
            ways = directions(words, mentions, labeler)
            found |= {FindingChange(one.name, way) for one, way in zip(mentions, ways, strict=True) if way}
    return frozenset(found)


def pieces(words: Sequence[str]) -> list[int]:
    """Of each word of a sentence the number of its piece: commas, brackets and conjunctions begin one."""
    numbers: list[int] = []
    for i, word in enumerate(words):
        begins = word in _DIVIDERS and not (i and words[i - 1] in _DIVIDERS)
        numbers.append((numbers[-1] if numbers else 0) + begins)
    return numbers


def directions(words: Sequence[str], mentions: Sequence[Mention], labeler: RuleLabeler) -> list[Direction | None]:
    """How each of a sentence's ``mentions`` changed; None for those of which it does not say so.

    A finding takes the direction of its own piece (:func:`pieces`), the nearest one; else of the next piece if that
    names no finding ("effusion, unchanged"); else one before, that precedes all findings of its piece ("increased
    effusion and atelectasis"); else one behind, that follows them ("effusion and atelectasis have increased").
    """
    numbers = pieces(words)
    by_piece: dict[int, list[Match[Direction | None]]] = {}
    for way in _book(labeler).cover(words):
        if way.tag is not None:
            by_piece.setdefault(numbers[way.start], []).append(way)
    spans: dict[int, tuple[int, int]] = {}  # from the first finding of a piece to the last
    for mention in mentions:
        piece = numbers[mention.start]
        spans[piece] = (spans.get(piece, mention)[0], mention.end)
    order = sorted(by_piece)
    found = []
    for mention in mentions:
        own = numbers[mention.start]
        place = bisect_left(order, own)  # of the first piece with a direction that does not come before
        before = by_piece[order[place - 1]][-1] if place else None
        after = by_piece[order[place]][0] if place < len(order) else None
        chosen = None
        if own in by_piece:
            chosen = nearest(by_piece[own], mention.start, mention.end)
        elif after and own + 1 in by_piece and own + 1 not in spans:
            chosen = after
        elif before and before.start < spans.get(numbers[before.start], (before.end, 0))[0]:
            chosen = before
        elif after and after.start >= spans.get(numbers[after.start], (0, 0))[1]:
            chosen = after
        found.append(chosen.tag if chosen else None)
    return found


@cache
def _book(labeler: RuleLabeler) -> Phrasebook[Direction | None]:
    return Phrasebook([*labeler.changes.items(), *_PHRASES]) if labeler.changes else _BOOK


def nearest(matches: Sequence[Match[Tag]], start: int, end: int) -> Match[Tag]:
    """The one nearest to ``words[start:end]``, of those of a sentence in order; of two as near, the one before."""
    i = bisect_left(matches, start, key=lambda match: match.start)
    return min(matches[max(0, i - 1) : i + 1], key=lambda match: max(match.start - end, start - match.end))


def finding_change_f1(
    truth: Sequence[AbstractSet[tuple[str, str]]], predicted: Sequence[AbstractSet[tuple[str, str]]]
) -> dict[str, float | None]:
    """``finding_change_`` ``precision``, ``recall``, ``f1`` and ``f1_example`` of (finding, direction) pairs.

    They are those of :func:`.finding_f1`.
    """
    sides = [[{"\t".join(pair) for pair in one} for one in side] for side in (truth, predicted)]
    return {name.replace("finding_", "finding_change_"): value for name, value in finding_f1(*sides).items()}


def contradictions(
    rows: Sequence[VisitReport], labeler: RuleLabeler, *, references: bool = False
) -> tuple[list[Contradiction], int]:
    """Claims of change in generated reports that the same patient's generated report before contradicts.

    Unchanged, increased, decreased or resolved contradicts a report that denies the finding or does not mention it; new
    contradicts one that states it. A doubtful mention contradicts nothing. With ``references`` the references are
    compared instead: their share is what is natural, as real reports also leave things out. The second result is how
    many claims there were in reports that have one before them.
    """
    by_patient: dict[str, list[VisitReport]] = {}
    for row in rows:
        by_patient.setdefault(row.patient, []).append(row)
    found, claims = [], 0
    for patient, visits in by_patient.items():
        visits = sorted(visits, key=lambda row: row.order)
        for earlier, later in pairwise(visits):
            texts = (earlier.reference, later.reference) if references else (earlier.generated, later.generated)
            labels = labeler(texts[0])
            for change in sorted(finding_changes(texts[1], labeler)):
                claims += 1
                label = labels[change.finding]
                if label in (("positive",) if change.direction == "new" else ("negative", "blank")):
                    found.append(Contradiction(patient, earlier.order, later.order, change, label))
    return found, claims


def claimants(rows: Sequence[VisitReport], labeler: RuleLabeler, *, references: bool = False) -> set[str]:
    """Patients whose reports, generated or ``references``, claim a change that one before could contradict."""
    first: dict[str, VisitReport] = {}
    for row in sorted(rows, key=lambda row: row.order):
        first.setdefault(row.patient, row)
    return {
        row.patient
        for row in rows
        if row is not first[row.patient] and finding_changes(row.reference if references else row.generated, labeler)
    }
