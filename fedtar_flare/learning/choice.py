"""Of a report's beams, one that says what the decoder was told.

A decoder does not always write the findings that its prompts name. Its beams differ in them, and the labeler that made
the prompts of training can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FindingsChoice:
    """A :class:`~fedtar_flare.models.report_generator.Choice` by the findings that the head reads off the image.

    Args:
        branch: logits (B, D, K) of the findings' classes, of tokens (B, S, N, C) and mask (B, S).
        label: number of the class of each of the D findings in a text.
        candidates: beams to choose from.
    """

    branch: Callable[[Tensor, Tensor], Tensor]
    label: Callable[[str], tuple[int, ...]]
    candidates: int

    def told(self, tokens: Tensor, slice_mask: Tensor) -> list[list[int]]:
        """Class of each finding, D numbers for each of B images, of tokens (B, S, N, C) and mask (B, S)."""
        found: list[list[int]] = self.branch(tokens, slice_mask).argmax(-1).tolist()
        return found

    def differing(self, text: str, told: Sequence[int]) -> int:
        """Findings that are in another class in the text."""
        return sum(said != was_told for said, was_told in zip(self.label(text), told, strict=True))
