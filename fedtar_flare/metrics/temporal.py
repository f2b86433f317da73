"""What reports say of change: change words, (finding, direction) pairs, and contradictions between visits."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from fedtar_flare.metrics.clinical import finding_f1
from fedtar_flare.metrics.labeler import Label, RuleLabeler
from fedtar_flare.metrics.pairs import require_pairs
from fedtar_flare.metrics.sentences import Match, Phrasebook, listed, sentences

Direction = Literal["new", "increased", "decreased", "unchanged", "resolved"]
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
        resolved, resolution, has|have cleared, cleared, disappeared, no longer, gone, vanished""",
    None: """
        no new, without new, nothing new, increased density, increase in density, density increase*,
        increased _ density,
        increases in density, increased thickness, increase in thickness, thickness increase*, increased aeration,
        increased signal, size increase of, increase in _ thickness, increased _ marking*, increased lucency,
        stable chest,
        increased cardiothoracic""",
}
_BOOK: Phrasebook[Direction | None] = Phrasebook((p, way) for way, table in _WORDS.items() for p in listed(table))
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

    Within a sentence, commas and conjunctions divide pieces. A finding takes the direction of its own piece, the
    nearest one; else of the next piece if that names no finding ("effusion, unchanged"); else of the piece before
    ("increased effusion and atelectasis"); else of the next ("effusion and atelectasis have increased").
    """
    found = set()
    for words in sentences(text):
        ways = [match for match in _BOOK.cover(words) if match.tag is not None]
        if ways:
            found |= _of_sentence(words, ways, labeler)
    return frozenset(found)


def _of_sentence(
    words: Sequence[str], ways: Sequence[Match[Direction | None]], labeler: RuleLabeler
) -> set[FindingChange]:
    piece_of, piece = [], 0
    for word in words:
        piece += word in _DIVIDERS
        piece_of.append(piece)
    by_piece: dict[int, list[Match[Direction | None]]] = {}
    for way in ways:
        by_piece.setdefault(piece_of[way.start], []).append(way)
    mentions = labeler.mentions(words)
    with_finding = {piece_of[mention.start] for mention in mentions}
    pieces = sorted(by_piece)
    found = set()
    for mention in mentions:
        own = piece_of[mention.start]
        place = bisect_left(pieces, own)  # of the first piece with a direction that does not come before
        if own in by_piece:
            chosen = _nearest(by_piece[own], mention.start, mention.end)
        elif own + 1 in by_piece and own + 1 not in with_finding:
            chosen = by_piece[own + 1][0]
        elif place:
            chosen = by_piece[pieces[place - 1]][-1]
        else:
            chosen = by_piece[pieces[0]][0]
        if chosen.tag is not None:
            found.add(FindingChange(mention.name, chosen.tag))
    return found


def _nearest(ways: Sequence[Match[Direction | None]], start: int, end: int) -> Match[Direction | None]:
    """The direction nearest to ``words[start:end]``; of two as near, the one before."""
    i = bisect_left(ways, start, key=lambda way: way.start)
    return min(ways[max(0, i - 1) : i + 1], key=lambda way: max(way.start - end, start - way.end))


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


def claimants(rows: Sequence[VisitReport], labeler: RuleLabeler) -> set[str]:
    """Patients whose generated reports make a claim of change that one before could contradict."""
    first: dict[str, VisitReport] = {}
    for row in sorted(rows, key=lambda row: row.order):
        first.setdefault(row.patient, row)
    return {row.patient for row in rows if row is not first[row.patient] and finding_changes(row.generated, labeler)}
