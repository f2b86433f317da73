"""All scores of generated reports by name: how each is called, scaled and read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """One score.

    Args:
        name: in records and messages.
        label: for people.
        scale: factor from the raw value to the one that is printed; papers print most scores times 100.
        higher_is_better: False for losses.
        decimals: of the printed value.
        curve: worth a chart over rounds.
    """

    name: str
    label: str
    scale: float = 100.0
    higher_is_better: bool = True
    decimals: int = 1
    curve: bool = False


SCORES = {
    score.name: score
    for score in (
        Score("bleu_1", "BLEU-1"),
        Score("bleu_2", "BLEU-2"),
        Score("bleu_3", "BLEU-3"),
        Score("bleu_4", "BLEU-4", curve=True),
        Score("rouge_l", "ROUGE-L"),
        Score("cider", "CIDEr", curve=True),
        Score("token_loss", "token loss", scale=1.0, higher_is_better=False, decimals=3, curve=True),
        Score("finding_f1", "finding F1", curve=True),
    )
}
"""In the order in which they are shown."""
