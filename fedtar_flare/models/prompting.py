"""Parts that a method adds to a report generator: one that tells the decoder, and one that chooses a text by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from fedtar_flare.imaging.batch import PriorBatch

Place = Literal["last", "begin", "memory"]


class Prompter(Protocol):
    """A part that a method adds: reads the image's tokens and tells the decoder, by embeddings.

    ``place`` of the prompts: ``begin``, before the report, at the begin token's position, whose weight in the decoder's
    attention they share; ``last``, before the report, at the decoder's last positions, with a weight of their own; or
    ``memory``, among the image's tokens.
    """

    place: Place

    def prompts(
        self,
        tokens: Tensor,
        slice_mask: Tensor,
        prior: PriorBatch | None = None,
        prior_tokens: Tensor | None = None,
    ) -> Tensor:
        """Embeddings (B, D, E) that the decoder reads; of tokens (B, S, N, C) and mask (B, S).

        ``prior``: what is shown of the visits before; ``prior_tokens`` (B, S', N, C): those of its images.
        """


class Choice(Protocol):
    """Chooses among the beams of a report whose likeliest one does not say what the decoder was told."""

    @property
    def candidates(self) -> int:
        """How many beams."""

    def told(
        self,
        tokens: Tensor,
        slice_mask: Tensor,
        prior: PriorBatch | None = None,
        prior_tokens: Tensor | None = None,
    ) -> Sequence[Any]:
        """What the decoder was told of each of the B images; arguments as of :class:`Prompter`."""

    def differing(self, text: str, told: Any) -> int:
        """In how much a text differs from what was told; 0 in nothing."""

    def completed(self, text: str, told: Any) -> str:
        """The text, where it leaves out what was told with that added; else as it is."""
