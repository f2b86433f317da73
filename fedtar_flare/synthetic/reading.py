"""What a text of the synthetic cohort says of its findings, by the rules of :mod:`fedtar_flare.metrics`.

It may be in any site's style, the generic one, or a mixture; an unreadable text says nothing.
"""

from functools import cache

from fedtar_flare.metrics.grades import Statement, statements
from fedtar_flare.metrics.labeler import Direction, Observation, RuleLabeler
from fedtar_flare.metrics.sentences import sentences
from fedtar_flare.metrics.temporal import FindingChange
from fedtar_flare.synthetic.course import PlannedVisit
from fedtar_flare.synthetic.reports import Change
from fedtar_flare.synthetic.styles import GENERIC, STYLES
from fedtar_flare.synthetic.vocabulary import KIND, SIDED, ids

_DIRECTIONS: dict[Change, Direction] = {"new": "new", "larger": "increased", "smaller": "decreased"}
_WORDINGS = (GENERIC, *(wording for style in STYLES for wording in style))


@cache
def kind_labeler() -> RuleLabeler:
    """The labeler of the kinds of finding, whatever their side; it knows the words of all styles."""
    words = {
        word.strip(" ,()").lower(): direction
        for wording in _WORDINGS
        for word, direction in zip(wording.changes.split("|"), _DIRECTIONS.values(), strict=True)
    }
    scales = {
        kind: tuple({word: level for level, word in enumerate(wording.sizes[kind].split("|"))} for wording in _WORDINGS)
        for kind in KIND
    }
    observations = [Observation(kind, one["phrases"], ignore=one.get("ignore", "")) for kind, one in KIND.items()]
    return RuleLabeler(observations, unsided=KIND.keys() - SIDED, degrees=scales, changes=words)


def findings_in(text: str) -> frozenset[str]:
    """Findings that a text states as present now; a sided one whose side is not said is left out."""
    return frozenset(name for one in statements(text, kind_labeler()) if not one.resolved for name in _ids(one))


def denied_in(text: str) -> frozenset[str]:
    """Findings of which a text says that they are not there, both sides of a sided one, unless it states them too."""
    labeler = kind_labeler()
    kinds = {one.finding for one in statements(text, labeler) if one.resolved}
    kinds |= {one.name for words in sentences(text) for one in labeler.mentions(words) if one.label == "negative"}
    return frozenset(ids(sorted(kinds))) - findings_in(text)


def changes_in(text: str) -> frozenset[FindingChange]:
    """Changes since the visit before that a text states."""
    return frozenset(
        FindingChange(name, way) for one in statements(text, kind_labeler()) for name in _ids(one) for way in one.change
    )


def planted_changes(visit: PlannedVisit) -> frozenset[FindingChange]:
    """True changes since the visit before, of which the reports speak: no style has a word for a stable finding."""
    changed = {
        FindingChange(name, _DIRECTIONS[state.change])
        for name, state in visit.findings.items()
        if state.change in _DIRECTIONS
    }
    return frozenset(changed | {FindingChange(name, "resolved") for name in visit.resolved})


def _ids(one: Statement) -> list[str]:
    return [f"{one.finding}_{side}" for side in one.side] if one.finding in SIDED else [one.finding]
