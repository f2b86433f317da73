"""Tokens of images that a frozen encoder has seen: it sees none of them twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.models.report_generator import ReportGenerator

KEPT_BYTES = 2**28
"""Most memory for them."""


class KeptTokens:
    """Tokens (S, N, C) by visit, up to :data:`KEPT_BYTES`; for images without random changes."""

    def __init__(self) -> None:
        self._seen: dict[Visit, Tensor] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def of(self, samples: Sequence[Sample], slices: int, read: Callable[[], Tensor]) -> Tensor:
        """Tokens (B, S, N, C) of the samples, without gradient.

        Args:
            slices: S of this batch. A visit that was padded to another number of slices before is read anew.
            read: gives the tokens of the whole batch.
        """
        kept = [self._seen.get(sample.visit) for sample in samples]
        if all(row is not None and row.shape[0] == slices for row in kept):
            return torch.stack(cast(list[Tensor], kept))
        tokens = read().detach()
        if (len(self._seen) + len(samples)) * tokens[0].nbytes <= KEPT_BYTES:
            self._seen |= {sample.visit: row for sample, row in zip(samples, tokens, strict=True)}
        return tokens


class KeepingLearner(ReportLearner):
    """A learner that keeps what a frozen encoder has seen; arguments as :class:`ReportLearner`."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._kept = KeptTokens()

    @property
    def _base(self) -> ReportGenerator:
        return cast(ReportGenerator, self.model.get_base_model())

    def report_losses(
        self, samples: Sequence[Sample], images: ImageBatch, personal: bool = True, focus: float = 0.0
    ) -> Tensor:
        """As :meth:`ReportLearner.report_losses`, of kept tokens."""
        ids, labels = (part.to(self.device) for part in self.tokenizer.batch([s.visit.report for s in samples]))
        with self._computing(samples, personal):
            return self._base(images, ids, labels, focus, tokens=self._tokens(samples, images))

    @torch.no_grad()
    def generate(self, samples: Sequence[Sample], images: ImageBatch, personal: bool = True) -> list[str]:
        """As :meth:`ReportLearner.generate`, likewise."""
        with self._computing(samples, personal):
            ids = self._base.generate(images, tokens=self._tokens(samples, images))
        return [self.tokenizer.decode(row) for row in ids.tolist()]

    def _tokens(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        """The encoder's tokens of the samples; those of an encoder that does not learn are kept, up to a limit."""
        if self._encoder_learns or self.training.augment:
            return self._base.tokens(images)
        return self._kept.of(samples, images.images.shape[1], lambda: self._base.tokens(images))

    @property
    def _encoder_learns(self) -> bool:
        return any(parameter.requires_grad for parameter in self._base.encoder.parameters())

    @contextmanager
    def _autocasting(self) -> Iterator[None]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            yield
