"""Interfaces of what a method adds to a report generator: a prompter, and a choice among beams."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fedtar_flare.imaging.batch import PriorBatch

PromptPosition = Literal["last", "begin", "memory", "text", "none"]
"""Where a prompter, a module with ``position`` and ``prompts(encoded)``, puts its embeddings (B, D, E) for the decoder.

``begin``: before the report, at the begin token's position, whose weight in the decoder's attention they share;
``last``: before the report, at the decoder's last positions, with a weight of their own; ``memory``: among the image's
tokens; ``text``: in words (a vision-language model); ``none``: nowhere."""


class Encoded(NamedTuple):
    """What the encoder gives of B visits, and what is shown of the visits before them."""

    tokens: Tensor
    """(B, S, N, C)."""
    slice_mask: Tensor
    """(B, S), False at padding."""
    prior: PriorBatch | None = None
    """The visits before."""
    prior_tokens: Tensor | None = None
    """(B, S', N, C) of the images before."""


class Choice(Protocol):
    """Chooses another beam where the likeliest one does not state the findings that the decoder was prompted with."""

    @property
    def candidates(self) -> int:
        """Number of beams."""

    def prompted_findings(self, seen: Encoded) -> Sequence[Any]:
        """Findings that the decoder is prompted with, for each of B visits."""

    def count_differences(self, text: str, prompted: Any) -> int:
        """In how many findings a text differs from the prompt."""

    def complete(self, text: str, prompted: Any) -> str:
        """The text, with a sentence for each prompted finding that it leaves out."""
