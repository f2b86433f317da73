"""Contrast of visits: two views of a visit agree, other patients' visits and other hospitals' rows do not (Eq. 3).

With unit features u_i and v_i of two views of visit i, and A(i) the features of all visits of *other patients* in the
batch, both views, and all rows of the bank::

    l_i = -u_i . v_i / tau + log sum_{z in A(i)} exp(u_i . z / tau)

As printed, A(i) leaves out the positive v_i, so that l_i may be negative. Visits of the same patient are left out,
which the paper does not say: a stable patient's visits would be torn apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.learning.diagnosis import slice_means
from fedtar_flare.learning.training import parts

See = Callable[[Sequence[Sample], bool], Tensor]
"""Unit features (B, C) of samples: of the training images, or (True) of their second view."""


def features(tokens: Tensor, slice_mask: Tensor) -> Tensor:
    """Unit features (B, C), float32: the mean of the tokens (B, S, N, C) over N and the slices of the mask (B, S)."""
    return unit(slice_means(tokens, slice_mask).sum(1) / slice_mask.sum(1, keepdim=True).clamp(min=1))


def unit(vectors: Tensor) -> Tensor:
    """Rows of norm 1; a row of zeros stays one."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def contrast_losses(
    u: Tensor,
    v: Tensor,
    patients: Tensor,
    bank: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """``l_i`` of each visit (Eq. 3).

    Parameters
    ----------
    u, v : Tensor, (N, C)
        Unit features of the two views.
    patients : Tensor, (N,)
        Equal numbers for visits of one patient.
    bank : Tensor, (M, C)
        Unit rows of other hospitals; M may be 0.
    temperature : float
        tau.

    Returns
    -------
    Tensor, (N,)
        0 where A(i) is empty.
    """
    others = patients[:, None] != patients[None, :]
    allowed = torch.cat([others, others, others.new_ones(len(u), len(bank))], dim=1)
    scores = u @ torch.cat([u, v, bank.to(u)]).T / temperature
    some = allowed.any(1)
    # a row without any negative would be a logarithm of zero, whose gradient is not a number
    scores = scores.masked_fill(~allowed & some[:, None], -torch.inf)
    losses = torch.logsumexp(scores, dim=1) - (u * v).sum(1) / temperature
    return torch.where(some, losses, torch.zeros_like(losses))


class BatchContrast:
    """Contrast of each visit of a part of the batch against the whole of it.

    Where the batch comes in parts, the features of all of it are made without a graph, and each part adds
    ``<u, dL/du> + <v, dL/dv>``: the exact gradient, under the loss's own value.

    Parameters
    ----------
    batch : sequence of Sample
        All of the local update.
    see : See
        The encoder as it is during this update.
    losses
        Of features u, v (N, C) and patients (N,), as :func:`contrast_losses`.
    size : int
        Samples that memory holds at once, for the features without a graph.
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
