"""The findings of the synthetic cohort, and how they are read back from a text.

An id is a kind, and a side for those that have one (``effusion_right``, ``emphysema``). What a kind is, how it takes
its course and whether the shipped warm start has seen it, is in ``findings.yaml`` and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtar_flare.files import read_yaml

KIND: Mapping[str, Any] = read_yaml(Path(__file__).with_name("findings.yaml"), "kinds of finding")
"""Kind to its entry in the file."""
KINDS = tuple(KIND)
KNOWN_KINDS = tuple(kind for kind, one in KIND.items() if one.get("known"))
NEW_KINDS = tuple(kind for kind in KINDS if kind not in KNOWN_KINDS)
SIDED = frozenset(kind for kind, one in KIND.items() if one.get("sided"))


def _ids(kinds: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for kind in kinds for name in ((f"{kind}_right", f"{kind}_left") if kind in SIDED else (kind,)))


KNOWN_FINDINGS, NEW_FINDINGS = _ids(KNOWN_KINDS), _ids(NEW_KINDS)
FINDINGS = KNOWN_FINDINGS + NEW_FINDINGS
"""Every finding id, in a fixed order."""
SIZES = ("small", "moderate", "large")
"""Names of size 1, 2 and 3."""

_TERMS = {kind: re.compile(one["term"]) for kind, one in KIND.items()}
_SIDES = frozenset({"right", "left"})
_SIDE = re.compile(r"\b(right|left|bilateral|both)\b")
_SENTENCE = re.compile(r"[.;\n]+|\b(?:but|however|while|whereas)\b")
_PIECE = re.compile(r",|\band\b|\bor\b|\bplus\b")
# said of the whole sentence, whatever stands before or after
_DENIES_ALL = re.compile(r"\b(?:none|nil|absent|not|no longer|resolved|resolution|cleared|disappeared|gone)\b")
# denies what follows it
_DENIES_REST = re.compile(r"\b(?:no|without|free of|negative for|absence of)\b")
_NOT_A_DENIAL = re.compile(r"\b(?:no|without) (?:\w+ )?change\b")


def kind_of(finding: str) -> str:
    """Kind of a finding: its id without the side."""
    return finding.removesuffix("_right").removesuffix("_left")


def side_of(finding: str) -> str:
    """``right``, ``left``, or empty for a finding without a side."""
    return finding[len(kind_of(finding)) + 1 :]


def findings_in(text: str) -> frozenset[str]:
    """Findings that a text states as present now, by rules; in any site's style, the generic one, or a mixture.

    Negated and resolved findings are left out, and so is a sided finding whose side is not said. Never fails: an
    unreadable text has no findings.
    """
    found: set[str] = set()
    for sentence in sentences_of(text):
        found |= stated_in(affirmed(sentence))
    return frozenset(found)


def denied_in(text: str) -> frozenset[str]:
    """Findings of which a text says that they are not there, both sides of a sided one, unless it states them too."""
    kinds: set[str] = set()
    for sentence in sentences_of(text):
        left = affirmed(sentence)
        kinds |= {kind for kind, term in _TERMS.items() if term.search(sentence) and not term.search(left)}
    return frozenset(_ids(sorted(kinds))) - findings_in(text)


def sentences_of(text: str) -> list[str]:
    """Clauses of a text in lower case, ended by a mark or by ``but`` and its like."""
    return _SENTENCE.split(_NOT_A_DENIAL.sub("unchanged", " ".join(text.lower().split())))


def affirmed(sentence: str) -> str:
    """What a sentence does not deny."""
    return "" if _DENIES_ALL.search(sentence) else _DENIES_REST.split(sentence, maxsplit=1)[0]


def stated_in(sentence: str) -> set[str]:
    """Findings of a sentence without negation.

    A side belongs to the finding in its own piece (pieces end at commas and conjunctions); a finding without one
    takes the next piece's, else the one before ("effusion and consolidation on the right").
    """
    found: set[str] = set()
    waiting: list[str] = []  # sided findings that have no side yet
    last_kinds: list[str] = []
    last_sides: set[str] = set()
    pending: set[str] = set()  # sides that came before their finding ("right and left effusions")
    for piece in _PIECE.split(sentence):
        kinds = [kind for kind, term in _TERMS.items() if term.search(piece)]
        sides = {side for word in _SIDE.findall(piece) for side in (_SIDES & {word} or _SIDES)}
        found |= {kind for kind in kinds if kind not in SIDED}
        sided = [kind for kind in kinds if kind in SIDED]
        if sides:
            found |= {f"{kind}_{side}" for kind in waiting for side in sides}
            if waiting and not sided:
                last_kinds, last_sides = waiting, sides
            elif not kinds:
                pending |= sides
            waiting = []
        if sided:
            if sides or pending:
                last_kinds, last_sides = sided, sides | pending
                found |= {f"{kind}_{side}" for kind in sided for side in last_sides}
                pending = set()
            else:
                waiting = waiting + sided
    found |= {f"{kind}_{side}" for kind in waiting for side in last_sides}
    found |= {f"{kind}_{side}" for kind in last_kinds for side in pending}  # "nodules in the right and left lung"
    return found
