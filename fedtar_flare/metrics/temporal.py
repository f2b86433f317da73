"""What reports say of change: (finding, direction) pairs, and contradictions between visits."""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

from fedtar_flare.metrics.labeler import Direction, Mention, RuleLabeler
from fedtar_flare.metrics.qualifiers import nearest, qualifiers
from fedtar_flare.metrics.sentences import Phrasebook, phrases, sentences

DIRECTIONS: tuple[Direction, ...] = ("new", "increased", "decreased", "unchanged", "resolved")

_PHRASES: list[tuple[str, Direction | None]] = [
    (phrase, way) for way in (*DIRECTIONS, None) for phrase in phrases("changes")[way or "none"]
]
_BOOK: Phrasebook[Direction | None] = Phrasebook(_PHRASES)


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


def directions(words: Sequence[str], mentions: Sequence[Mention], labeler: RuleLabeler) -> list[Direction | None]:
    """How each of a sentence's ``mentions`` changed, by the nearest of its :func:`.qualifiers`; None for no word."""
    own = {i for mention in mentions for i in range(mention.start, mention.end)}  # "heart size has increased"
    ways = [way for way in _book(labeler).cover(words) if way.tag is not None and not own.issuperset(range(*way[:2]))]
    found = qualifiers(words, mentions, ways, shared=True)
    return [nearest(near, mention).tag if near else None for near, mention in zip(found, mentions, strict=True)]


@cache
def _book(labeler: RuleLabeler) -> Phrasebook[Direction | None]:
    return Phrasebook([*labeler.changes.items(), *_PHRASES]) if labeler.changes else _BOOK


def claims(rows: Sequence[VisitReport], labeler: RuleLabeler, *, references: bool = False) -> list[tuple[str, bool]]:
    """Claims of change in generated reports with one of the same patient before: the patient, and if that contradicts.

    Unchanged, increased, decreased or resolved contradicts a report that denies the finding or does not mention it; new
    contradicts one that states it. A doubtful mention contradicts nothing. With ``references`` the references are
    compared instead: their share is what is natural, as real reports also leave things out.
    """
    by_patient: dict[str, list[VisitReport]] = {}
    for row in rows:
        by_patient.setdefault(row.patient, []).append(row)
    found = []
    for patient, visits in by_patient.items():
        for earlier, later in pairwise(sorted(visits, key=lambda row: row.order)):
            before, text = (row.reference if references else row.generated for row in (earlier, later))
            labels = labeler(before)
            for change in finding_changes(text, labeler):
                contrary = ("positive",) if change.direction == "new" else ("negative", "blank")
                found.append((patient, labels[change.finding] in contrary))
    return found
