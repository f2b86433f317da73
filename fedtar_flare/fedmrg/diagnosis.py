"""The diagnosis branch: it reads the findings off the image, and tells the decoder by prompt tokens before the report.

The decoder reads ``[T[y_1] ... T[y_D], BOS, w_1 ... w_n, EOS]``: one of four learned embeddings T per finding, whose
place says which finding it is. In training y is what the report says, at inference what the branch predicts. T is a
tensor of its own, no part of the vocabulary: no text can spell a prompt.

The prompts take the decoder's last positions, and T starts near the mean of the words' embeddings. Between begin token
and report, at the positions of the words, prompts made the shipped start forget how a report begins: before training,
known findings F1 of 16 visits fell from 1.00 to .50, and is .62 here (greedy writing).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.errors import ConfigError
from fedtar_flare.fedmrg.contrast import slice_means
from fedtar_flare.fedmrg.labels import CLASSES, labeler
from fedtar_flare.models.report_generator import ReportGenerator

NOISE = 0.01
"""Standard deviation of T around its start; that of a word's embedding is ten times as large."""


class DiagnosisBranch(nn.Module):
    """A linear head on the encoder's tokens, and the prompts' embeddings T.

    The head reads the mean of the slices' means; of several slices their largest values too, since a small finding is
    in few of them.

    Args:
        findings: D, their number.
        channels: C, of the encoder.
        slices: of an image.
        start: around which T begins, (E,).
        seed: of the initial values; the global random state is neither read nor changed.
    """

    def __init__(self, findings: int, channels: int, slices: int, start: Tensor, seed: int):
        super().__init__()
        self.findings, self.slices = findings, slices
        generator = torch.Generator().manual_seed(seed)
        read = channels * (2 if slices > 1 else 1)
        self.head = nn.utils.skip_init(nn.Linear, read, findings * len(CLASSES))
        noise = torch.randn(len(CLASSES), len(start), generator=generator)
        self.embeddings = nn.Parameter(start + NOISE * noise.to(start.device))
        with torch.no_grad():
            self.head.weight.copy_((torch.rand(self.head.weight.shape, generator=generator) * 2 - 1) / read**0.5)
            self.head.bias.zero_()

    def forward(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Logits (B, D, 4) of tokens (B, S, N, C) and mask (B, S), float32."""
        means = slice_means(tokens, slice_mask)
        read = means.sum(1) / slice_mask.sum(1, keepdim=True).clamp(min=1)
        if self.slices > 1:
            largest = means.masked_fill(~slice_mask[..., None], -torch.inf).amax(1)
            read = torch.cat([read, largest], dim=1)
        logits = F.linear(read, self.head.weight.float(), self.head.bias.float())
        return logits.view(len(tokens), self.findings, len(CLASSES))

    def prompts(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Prompts (B, D, E) of what the branch predicts."""
        return self.prompts_of(self(tokens, slice_mask).argmax(-1))

    def prompts_of(self, classes: Tensor) -> Tensor:
        """Prompts (B, D, E) of classes (B, D)."""
        return F.embedding(classes, self.embeddings)


def diagnosis_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of each report, mean over its D findings, shape (B,)."""
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view(classes.shape).mean(1)


def extend(generator: ReportGenerator, settings: Mapping[str, Any]) -> None:
    """Give a base model its diagnosis branch; none for the labeler ``none``.

    ``settings`` has ``labeler``, ``slices`` and ``seed``. Raises :class:`ConfigError` where the decoder has too few
    positions for prompts and report.
    """
    findings = len(labeler(settings["labeler"]).findings)
    if not findings:
        return
    config = generator.decoder.config
    require_positions(findings, generator.max_length, config.n_positions)
    generator.diagnosis = DiagnosisBranch(
        findings,
        generator.encoder.width,
        settings["slices"],
        generator.decoder.transformer.wte.weight.detach().mean(0),
        settings["seed"],
    )


def require_positions(findings: int, max_length: int, positions: int) -> None:
    """Raise :class:`ConfigError` where prompts and report together are longer than the decoder's positions."""
    if findings + max_length > positions:
        raise ConfigError(
            f"{findings} diagnosis prompts and reports of {max_length} tokens (model.max_length) do not fit in the "
            f"decoder's {positions} positions: set model.max_length to {positions - findings} or less, or "
            "fedmrg.labeler to none"
        )
