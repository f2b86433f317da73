"""Contrast of visits: two views of a visit agree, other patients' visits and other hospitals' rows do not (Eq. 3).

With unit features u_i and v_i of two views of visit i, and A(i) the features of all visits of *other patients* in the
batch, both views, and all rows of the bank::

    l_i = -u_i . v_i / tau + log sum_{z in A(i)} exp(u_i . z / tau)

As printed, A(i) leaves out the positive v_i (``decoupled``, so l_i may be negative); ``infonce`` adds it. Visits of the
same patient are left out, which the paper does not say: a stable patient's visits would be torn apart.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedtar_flare.learning.diagnosis import slice_means

Denominator = Literal["decoupled", "infonce"]


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
    denominator: Denominator = "decoupled",
) -> Tensor:
    """``l_i`` of each of the N visits, shape (N,); 0 where A(i) is empty.

    Args:
        u, v: unit features (N, C) of the two views.
        patients: (N,), equal numbers for visits of one patient.
        bank: unit rows (M, C) of other hospitals; M may be 0.
    """
    others = patients[:, None] != patients[None, :]
    against_v = others | torch.eye(len(u), dtype=torch.bool, device=u.device) if denominator == "infonce" else others
    allowed = torch.cat([others, against_v, others.new_ones(len(u), len(bank))], dim=1)
    scores = u @ torch.cat([u, v, bank.to(u)]).T / temperature
    some = allowed.any(1)
    # a row without any negative would be a logarithm of zero, whose gradient is not a number
    scores = scores.masked_fill(~allowed & some[:, None], -torch.inf)
    losses = torch.logsumexp(scores, dim=1) - (u * v).sum(1) / temperature
    return torch.where(some, losses, torch.zeros_like(losses))
