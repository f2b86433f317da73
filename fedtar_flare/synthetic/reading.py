"""Findings that a report of the synthetic cohort states in any style, by the rules of :mod:`fedtar_flare.metrics`."""

from functools import cache

from fedtar_flare.metrics.grades import FindingChange, Statement, statements
from fedtar_flare.metrics.labeler import Direction, Observation, RuleLabeler
from fedtar_flare.metrics.sentences import sentences
from fedtar_flare.synthetic.course import PlannedVisit
from fedtar_flare.synthetic.reports import GENERIC, STYLES, Change
from fedtar_flare.synthetic.vocabulary import KIND, SIDED, ids

_DIRECTIONS: dict[Change, Direction] = {"new": "new", "larger": "increased", "smaller": "decreased"}
_WORDINGS = (GENERIC, *(wording for style in STYLES for wording in style))


@cache
def kind_labeler() -> RuleLabeler:
    """The labeler of the kinds of finding, whatever their side, by the words of all styles."""
    words: dict[str, Direction] = {}
    scales: dict[str, list[dict[str, int]]] = {kind: [] for kind in KIND}
    for wording in _WORDINGS:
        changes = [word.strip(" ,()").lower() for word in wording.changes.split("|")]
        words |= zip(changes, _DIRECTIONS.values(), strict=True)
        for kind, levels in scales.items():
            levels.append(dict(zip(wording.sizes[kind].split("|"), range(3), strict=True)))
    observations = [Observation(kind, entry["phrases"], ignore=entry.get("ignore", "")) for kind, entry in KIND.items()]
    return RuleLabeler(observations, unsided=KIND.keys() - SIDED, degrees=scales, changes=words)


def findings_in(text: str) -> frozenset[str]:
    """Findings that a text states as present now."""
    return frozenset(name for s in statements(text, kind_labeler()) if not s.resolved for name in names_of(s))


def denied_in(text: str) -> frozenset[str]:
    """Findings that a text states as absent."""
    labeler = kind_labeler()
    kinds = {statement.finding for statement in statements(text, labeler) if statement.resolved}
    kinds |= {m.name for words in sentences(text) for m in labeler.mentions(words) if m.label == "negative"}
    return frozenset(ids(sorted(kinds))) - findings_in(text)


def changes_in(text: str) -> frozenset[FindingChange]:
    """Changes since the previous visit that a text states."""
    found = statements(text, kind_labeler())
    return frozenset(FindingChange(name, way) for s in found for name in names_of(s) for way in s.change)


def planted_changes(visit: PlannedVisit) -> frozenset[FindingChange]:
    """True changes since the previous visit that reports describe; no style has a word for a stable finding."""
    ways: dict[str, Direction] = dict.fromkeys(visit.resolved, "resolved")
    ways |= {name: _DIRECTIONS[state.change] for name, state in visit.findings.items() if state.change in _DIRECTIONS}
    return frozenset(FindingChange(name, way) for name, way in ways.items())


def names_of(statement: Statement) -> list[str]:
    """Ids of the findings that a statement is about."""
    kind = statement.finding
    return [f"{kind}_{side}" for side in statement.side] if kind in SIDED else [kind]
