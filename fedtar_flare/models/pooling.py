"""From the tokens of a visit's slices to the memory that the decoder attends to."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

WAVELENGTHS_MM = (16.0, 1024.0)  # shortest and longest of the position features
FREQUENCIES = 8


class SliceAttentionPooling(nn.Module):
    """Learned queries read each slice, and the slice's position along the body is added to what they find.

    A slice gives ``queries`` memory tokens, softmax(q . norm(x)) of its own tokens, whatever the other slices and their
    number. Positions are in millimetres (sines and cosines, then a linear map): thick and thin slices share one scale.
    """

    def __init__(self, width: int, queries: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.position = nn.Linear(2 * FREQUENCIES, width)
        short, long = WAVELENGTHS_MM
        wavelengths = torch.logspace(math.log2(short), math.log2(long), FREQUENCIES, base=2)
        self.register_buffer("angular_frequency", 2 * math.pi / wavelengths, persistent=False)
        self.angular_frequency: Tensor

    def forward(self, tokens: Tensor, position_mm: Tensor) -> Tensor:
        """Memory (B, S * queries, C) of tokens (B, S, N, C) at positions (B, S) in millimetres."""
        x = self.norm(tokens)
        scores = torch.einsum("qc,bsnc->bsqn", self.queries, x) * x.shape[-1] ** -0.5
        found = scores.softmax(-1).to(x.dtype) @ x
        angles = position_mm[..., None] * self.angular_frequency
        position = self.position(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return (found + position.unsqueeze(2)).flatten(1, 2)


class NoPooling(nn.Module):
    """The paper's form: every token of the one radiograph goes to the decoder unchanged."""

    def forward(self, tokens: Tensor, position_mm: Tensor) -> Tensor:
        """Memory (B, S * N, C) of tokens (B, S, N, C)."""
        return tokens.flatten(1, 2)
