"""Parts that a method adds to a report generator: one that prompts the decoder, and one that chooses a text by it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fedtar_flare.imaging.batch import PriorBatch

__all__ = ["Encoded", "Place"]

Place = Literal["last", "begin", "memory", "text", "none"]
"""Of the prompts of a prompter: a part with ``place`` and ``prompts(seen)``, embeddings (B, D, E) for the decoder.

``begin``: before the report, at the begin token's position, whose weight in the decoder's attention they share;
``last``: before the report, at the decoder's last positions, with a weight of their own; ``memory``: among the image's
tokens; ``text``: in words (a vision-language model); ``none``: the decoder reads none.
"""


class Encoded(NamedTuple):
    """What the encoder gives of B images, and what is shown of the visits before."""

    tokens: Tensor  # (B, S, N, C)
    slice_mask: Tensor  # (B, S)
    prior: PriorBatch | None = None
    prior_tokens: Tensor | None = None  # (B, S', N, C), of the images before


class Choice(Protocol):
    """Chooses among the beams of a report whose likeliest one does not say what the decoder was prompted with."""

    @property
    def candidates(self) -> int:
        """How many beams."""

    def prompted_findings(self, seen: Encoded) -> Sequence[Any]:
        """What the decoder is prompted with for each of the B images."""

    def count_differences(self, text: str, prompted: Any) -> int:
        """In how much a text differs from what was prompted; 0 in nothing."""

    def complete(self, text: str, prompted: Any) -> str:
        """The text, with what it leaves out of what was prompted added."""
