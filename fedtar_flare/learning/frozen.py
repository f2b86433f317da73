"""Outputs of the encoder's frozen stages for each image, kept in memory and, for the next process, on disk."""

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtar_flare.core.files import checksum
from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.imaging import cache
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.report_generator import ReportGenerator

KEPT_BYTES = 256 << 20
"""Most memory for these outputs."""


class FrozenStages:
    """The encoder's first stages without any parameter that learns (``requires_grad``); each image passes through once.

    A study passes through them by itself, so that the result does not depend on its batch, bit for bit. At most
    ``limit`` bytes are kept in memory.
    """

    def __init__(self, generator: ReportGenerator, limit: int = KEPT_BYTES):
        stages = generator.stage_modules()
        frozen = takewhile(lambda stage: not any(p.requires_grad for p in stage.parameters()), stages)
        self.depth = len(list(frozen))
        """How many stages are frozen; the last ones learn."""
        self._generator, self._limit = generator, limit
        self._kept: dict[tuple[Visit, Path | None], Tensor] = {}  # a changed image has another prepared file
        self._bytes = 0

    def tokens(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        """Tokens (B, S, N, C) of the samples' prepared images; padded slices are zero after the frozen stages."""
        if not self.depth:
            return self._generator.tokens(images)
        encoder = self._generator.encoder
        below = [self._below(sample, images, i) for i, sample in enumerate(samples)]
        rows = torch.nn.utils.rnn.pad_sequence(below, batch_first=True)
        tokens: Tensor = encoder.run(rows.flatten(0, 1), first=self.depth)
        return tokens.unflatten(0, rows.shape[:2])

    @torch.no_grad()
    def _below(self, sample: Sample, images: ImageBatch, row: int) -> Tensor:
        """Output of the frozen stages for one study, (S, ...), without padding."""
        key = sample.visit, sample.prepared
        if (known := self._kept.get(key)) is not None:
            return known
        found = self._from_disk(sample, images, row)
        if self._bytes + found.nbytes <= self._limit:
            self._kept[key] = found
            self._bytes += found.nbytes
        return found

    def _from_disk(self, sample: Sample, images: ImageBatch, row: int) -> Tensor:
        own = images.images[row][images.slice_mask[row]]
        encoder, on_cpu = self._generator.encoder, own.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        file = cache.computed_path(sample.prepared, self._kind) if sample.prepared is not None and on_cpu else None
        stored = cache.load_computed(file) if file is not None else None
        if stored is not None and stored.dtype == "float32" and len(stored) == len(own):
            return torch.from_numpy(stored)
        found: Tensor = encoder.run(encoder.normalised(own), last=self.depth)
        if file is not None:
            cache.store_computed(file, found.numpy())
        return found

    @cached_property
    def _kind(self) -> str:
        """Digest of what the output depends on besides the image: weights, scaling, torch's version and threads."""
        encoder = self._generator.encoder
        state = nn.ModuleList(encoder.stage_modules()[: self.depth]).state_dict()
        scaled = {"scale": encoder.pixel_scale, "shift": encoder.pixel_shift}
        return f"{checksum({**state, **scaled})[:16]}-{torch.__version__.split('+')[0]}-{torch.get_num_threads()}"
