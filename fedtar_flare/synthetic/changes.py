"""What the synthetic cohort's texts say of findings beyond presence: change since the visit before, side, degree."""

from __future__ import annotations

import re
from functools import cache

from fedtar_flare.metrics.labeler import Direction, Observation, RuleLabeler
from fedtar_flare.metrics.temporal import FindingChange
from fedtar_flare.synthetic.course import PlannedVisit
from fedtar_flare.synthetic.reports import Change
from fedtar_flare.synthetic.styles import GENERIC, STYLES
from fedtar_flare.synthetic.vocabulary import KIND, SIDED, affirmed, sentences_of, stated_in

_DIRECTIONS: dict[Change, Direction] = {"new": "new", "larger": "increased", "smaller": "decreased"}
_WORDINGS = (GENERIC, *(wording for style in STYLES for wording in style))
_WORDS: dict[str, Direction] = {
    words.strip(" ,()").lower(): direction
    for wording in _WORDINGS
    for words, direction in zip(wording.changes.split("|"), _DIRECTIONS.values(), strict=True)
}
# the longest first: "previously larger" is smaller now
_CHANGE = re.compile(rf"\b({'|'.join(sorted(map(re.escape, _WORDS), key=len, reverse=True))})\b")
_RESOLVED = re.compile(r"\b(?:no longer|not (?:present|seen) any more|resolved|resolution|cleared|disappeared|gone)\b")


def planted_changes(visit: PlannedVisit) -> frozenset[FindingChange]:
    """True changes since the visit before, of which the reports speak: no style has a word for a stable finding."""
    changed = {
        FindingChange(name, _DIRECTIONS[state.change])
        for name, state in visit.findings.items()
        if state.change in _DIRECTIONS
    }
    return frozenset(changed | {FindingChange(name, "resolved") for name in visit.resolved})


def changes_in(text: str) -> frozenset[FindingChange]:
    """Changes that a text states, by rules; in any site's style, the generic one, or a mixture. Never fails."""
    found: set[FindingChange] = set()
    for sentence in sentences_of(text):
        if _RESOLVED.search(sentence):
            found |= {FindingChange(name, "resolved") for name in stated_in(sentence)}
        elif change := _CHANGE.search(affirmed(sentence)):
            found |= {FindingChange(name, _WORDS[change[1]]) for name in stated_in(affirmed(sentence))}
    return frozenset(found)


@cache
def kind_labeler() -> RuleLabeler:
    """The labeler of the cohort's kinds of finding, without their side, that knows all styles' words; for grades."""
    scales = {
        kind: tuple({word: level for level, word in enumerate(wording.sizes[kind].split("|"))} for wording in _WORDINGS)
        for kind in KIND
    }
    return RuleLabeler(
        [Observation(kind, one["phrases"], ignore=one.get("ignore", "")) for kind, one in KIND.items()],
        unsided=KIND.keys() - SIDED,
        degrees=scales,
        changes=_WORDS,
    )
