"""Findings in plain sentences, for reports that have no better words for them ("There is right pneumothorax.")."""

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet

_SIDES = {"right", "left"}
_ENDS = re.compile(r"(?<=[.;!])\s+|\n+")


def sentences(report: str) -> list[str]:
    """The report's sentences as they are written, without what separates them."""
    return [sentence.strip() for sentence in _ENDS.split(report) if sentence.strip()]


def plain_sentence(finding: str) -> str:
    """A sentence that states a finding of this name, and nothing else of it.

    The name's words are apart by underscores or spaces, the side last.
    """
    words = _words(finding)
    if words[-1] in _SIDES:
        words = [words[-1], *words[:-1]]
    return f"There is {' '.join(words)}."


def means_no_finding(finding: str) -> bool:
    """Whether a finding of this name says that there is none."""
    return finding.lower().replace("_", " ") == "no finding"


def names(sentence: str, finding: str) -> bool:
    """Whether all words of the finding's name, but for the side, are in the sentence."""
    return set(_words(finding)) - _SIDES <= set(_words(sentence))


def add_plain_sentence(text: str, finding: str, number: int, found: Callable[[str], AbstractSet[int]]) -> str:
    """The text with a plain sentence of the finding at its end, in place of those that name it and state nothing.

    It stays as it is where it would then not state the finding ``number`` and what it stated, and nothing else;
    ``found`` gives the numbers of the findings that a text states.
    """
    kept = [sentence for sentence in sentences(text) if found(sentence) or not names(sentence, finding)]
    longer = " ".join([*kept, plain_sentence(finding)])
    return longer if found(longer) == found(text) | {number} else text


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))
