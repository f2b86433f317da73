"""The memory that the decoder attends to: features of the present image's slices, and of the visit before."""

import math

import torch
from torch import Tensor, nn

WAVELENGTHS_MM = (16.0, 1024.0)  # shortest and longest of the position features
FREQUENCIES = 8
KINDS = ("image", "report")
KIND_SIZE, TIME_SIZE = 1.0, 0.3


class SliceAttentionPooling(nn.Module):
    """Learned queries attend to each slice; the slice's position along the body is added to the result.

    A slice gives ``queries`` memory tokens, softmax(q . norm(x)) of its own tokens, independent of the other slices.
    Positions are in millimetres (sines and cosines, then a linear map): thick and thin slices share one scale.
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


class PriorMarks(nn.Module):
    """Marks features of the visit before with their kind and with the days between, by fixed codes without any weight.

    The codes depend on the width alone, so all sites have the same, outside of the model's state; the decoder's
    adapters learn to use them. Their root mean square is ``KIND_SIZE`` and ``TIME_SIZE`` times that of the present
    features.
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
        """Mark features (B, M, E) of ``kind`` with the days (B,) between, by codes of the size (B,)."""
        angles = torch.log2(1 + days)[:, None] * self.frequencies
        time = torch.cat([angles.sin(), angles.cos()], dim=1) @ self.times
        code = KIND_SIZE * self.kinds[KINDS.index(kind)] + TIME_SIZE * time
        return features + (size[:, None] * code)[:, None].to(features.dtype)


def root_mean_square(features: Tensor, mask: Tensor) -> Tensor:
    """Root mean square (B,), float32, of each sample's features (B, M, E) where the mask (B, M) is True."""
    squares = features.detach().float().square().mean(-1) * mask
    return (squares.sum(1) / mask.sum(1).clamp(min=1)).sqrt()
