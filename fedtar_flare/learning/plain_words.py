"""Plain sentences for findings that a report leaves out ("There is right pneumothorax.")."""

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet

_SIDES = {"right", "left"}
_ENDS = re.compile(r"(?<=[.;!])\s+|\n+")


def sentences(report: str) -> list[str]:
    """The report's sentences, without separators."""
    return [sentence.strip() for sentence in _ENDS.split(report) if sentence.strip()]


def plain_sentence(finding: str) -> str:
    """A sentence that states a finding; underscores or spaces separate the name's words, and the side is last."""
    words = _words(finding)
    if words[-1] in _SIDES:
        words = [words[-1], *words[:-1]]
    return f"There is {' '.join(words)}."


def means_no_finding(finding: str) -> bool:
    """Whether a finding's name is that of "no finding"."""
    return finding.lower().replace("_", " ") == "no finding"


def names(sentence: str, finding: str) -> bool:
    """Whether a sentence has all words of the finding's name but the side."""
    return set(_words(finding)) - _SIDES <= set(_words(sentence))


def add_plain_sentence(text: str, finding: str, number: int, stated: Callable[[str], AbstractSet[int]]) -> str:
    """Replace the sentences that name a finding without stating any by a plain sentence at the end.

    The text is unchanged where the result would not state the finding ``number`` and its earlier findings, and nothing
    else; ``stated`` gives the numbers of the findings that a text states.
    """
    kept = [sentence for sentence in sentences(text) if stated(sentence) or not names(sentence, finding)]
    longer = " ".join([*kept, plain_sentence(finding)])
    return longer if stated(longer) == stated(text) | {number} else text


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))
