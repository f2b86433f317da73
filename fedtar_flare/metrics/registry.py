"""Every score that an evaluation computes: its name in records, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Score:
    """One score.

    Args:
        name: in records and messages, where values are raw.
        label: for people.
        scale: what a raw value is multiplied by where it is shown; papers print shares times 100.
        better: whether ``higher`` or ``lower`` values are better.
        decimals: of the shown value.
        curve: whether it is drawn over the rounds; the others stand in tables alone.
    """

    name: str
    label: str
    scale: float = 100.0
    better: Literal["higher", "lower"] = "higher"
    decimals: int = 1
    curve: bool = False


SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Score("bleu_1", "BLEU-1"),
        Score("bleu_2", "BLEU-2"),
        Score("bleu_3", "BLEU-3"),
        Score("bleu_4", "BLEU-4", curve=True),
        Score("rouge_l", "ROUGE-L"),
        Score("cider", "CIDEr", curve=True),
        Score("token_loss", "token loss", scale=1.0, better="lower", decimals=3, curve=True),
        Score("finding_f1", "finding F1", curve=True),
    )
}
"""By name, in the order of tables. A cell holds those that could be computed: finding F1 needs a known truth."""
CURVES = tuple(score.name for score in SCORES.values() if score.curve)


def scale_note(times: str = "×") -> str:
    """Which scores are shown times 100, as a sentence.

    >>> scale_note()
    'All scores but token loss are × 100.'
    """
    return f"All scores but {', '.join(score.label for score in SCORES.values() if score.scale == 1)} are {times} 100."
