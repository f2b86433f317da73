"""What the decoder attends to of the visit before, beside the present image's features."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

FREQUENCIES = 8
KINDS = ("image", "report")
KIND_SIZE, TIME_SIZE = 1.0, 0.3


class PriorMarks(nn.Module):
    """Marks features of the visit before with their kind and with the days between, by fixed codes without any weight.

    The codes depend on the width alone, so they are equal at all sites, and are no part of the model's state: the
    decoder's own adapters learn to read them. Their root mean square is ``KIND_SIZE`` and ``TIME_SIZE`` times that of
    the present image's features.
    """

    def __init__(self, width: int):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("kinds", torch.randn(len(KINDS), width, generator=generator), persistent=False)
        angles = torch.randn(2 * FREQUENCIES, width, generator=generator) / math.sqrt(FREQUENCIES)
        self.register_buffer("times", angles, persistent=False)
        frequencies = 2 * math.pi / torch.logspace(2, 5, FREQUENCIES, base=2)  # per doubling of the days
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.kinds: Tensor
        self.times: Tensor
        self.frequencies: Tensor

    def forward(self, features: Tensor, kind: str, days: Tensor, size: Tensor) -> Tensor:
        """Marked features (B, M, E), given those of ``kind``, the days (B,) between and the size (B,) of the codes."""
        angles = torch.log2(1 + days)[:, None] * self.frequencies
        time = torch.cat([angles.sin(), angles.cos()], dim=1) @ self.times
        code = KIND_SIZE * self.kinds[KINDS.index(kind)] + TIME_SIZE * time
        return features + (size[:, None] * code)[:, None].to(features.dtype)


def root_mean_square(features: Tensor, mask: Tensor) -> Tensor:
    """Of each sample's features (B, M, E) where the mask (B, M) is True; (B,), float32."""
    squares = features.detach().float().square().mean(-1) * mask
    return (squares.sum(1) / mask.sum(1).clamp(min=1)).sqrt()
