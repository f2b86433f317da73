"""The contrast of a local update's whole batch (Eq. 3), where memory holds only parts of it at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.learning.training import parts

See = Callable[[Sequence[Sample], bool], Tensor]
"""Unit features (B, C) of samples: of the training images, or (True) of their second view."""


class BatchContrast:
    """Contrast of each visit of a part of the batch against the whole of it.

    Where the batch comes in parts, the features of all of it are made without a graph, and each part adds
    ``<u, dL/du> + <v, dL/dv>``: the exact gradient, under the loss's own value.

    Args:
        batch: all samples of the local update.
        see: the encoder as it is during this update.
        losses: of features u, v (N, C) and patients (N,), see :func:`~fedtar_flare.fedmrg.contrast.contrast_losses`.
        size: samples that memory holds at once, for the features without a graph.
    """

    def __init__(
        self, batch: Sequence[Sample], see: See, losses: Callable[[Tensor, Tensor, Tensor], Tensor], size: int
    ):
        self._batch, self._see, self._losses, self._size = batch, see, losses, size
        self._of: dict[Visit, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, samples: Sequence[Sample], u: Tensor) -> Tensor:
        """Loss (B,) of a part of the batch, with features u (B, C) of its training images."""
        v = self._see(samples, True)
        if len(samples) == len(self._batch):
            return self._losses(u, v, patients_of(samples, u.device))
        if not self._of:
            self._of = self._gradients()
        losses, du, dv = (torch.stack(rows) for rows in zip(*(self._of[s.visit] for s in samples), strict=True))
        linear = (u * du).sum(1) + (v * dv).sum(1)
        return linear - linear.detach() + losses

    def _gradients(self) -> dict[Visit, tuple[Tensor, Tensor, Tensor]]:
        """Loss of each visit of the batch, and the gradient of their sum in both of its features."""
        with torch.no_grad():
            found = [
                torch.cat([self._see(part, second) for part in parts(self._batch, self._size)])
                for second in (False, True)
            ]
        u, v = (features.requires_grad_() for features in found)
        with torch.enable_grad():
            losses = self._losses(u, v, patients_of(self._batch, u.device))
            du, dv = torch.autograd.grad(losses.sum(), (u, v))
        rows = zip(losses.detach(), du, dv, strict=True)
        return {sample.visit: row for sample, row in zip(self._batch, rows, strict=True)}


def patients_of(samples: Sequence[Sample], device: torch.device) -> Tensor:
    """(N,), equal numbers for visits of one patient."""
    names = [sample.visit.patient_id for sample in samples]
    return torch.tensor([names.index(name) for name in names], device=device)
