"""What the encoder's frozen stages give of an image: it does not change while the adapters learn, so it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.report_generator import ReportGenerator

KEPT_BYTES = 256 << 20
"""Most memory for what is kept."""


class FrozenStages:
    """The encoder's first stages without any parameter that learns, each image seen by them once.

    A study goes through them by itself, so that what they give does not depend on the batch it came in, bit for bit.

    Args:
        generator: with its adapters, whose learning parameters are known by ``requires_grad``.
        limit: bytes that are kept at most; images beyond go through all stages every time.
    """

    def __init__(self, generator: ReportGenerator, limit: int = KEPT_BYTES):
        stages = generator.encoder.stage_modules()
        frozen = takewhile(lambda stage: not any(p.requires_grad for p in stage.parameters()), stages)
        self.depth = len(list(frozen))
        """How many stages are frozen; the last ones learn."""
        self._generator, self._limit = generator, limit
        self._kept: dict[Visit, Tensor] = {}
        self._bytes = 0

    def tokens(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        """The encoder's tokens (B, S, N, C) of the samples' images as they are prepared, padded slices zero below."""
        if not self.depth:
            return self._generator.tokens(images)
        encoder = self._generator.encoder
        below = [self._below(sample.visit, images, i) for i, sample in enumerate(samples)]
        rows = torch.nn.utils.rnn.pad_sequence(below, batch_first=True)
        tokens: Tensor = encoder.run(rows.flatten(0, 1), first=self.depth)
        return tokens.unflatten(0, rows.shape[:2])

    @torch.no_grad()
    def _below(self, visit: Visit, images: ImageBatch, row: int) -> Tensor:
        """What the frozen stages give of one study, (S, ...), without its padding."""
        if (known := self._kept.get(visit)) is not None:
            return known
        encoder, own = self._generator.encoder, images.images[row][images.slice_mask[row]]
        found = encoder.run(encoder.normalised(own), last=self.depth)
        if self._bytes + found.nbytes <= self._limit:
            self._kept[visit] = found
            self._bytes += found.nbytes
        return found
