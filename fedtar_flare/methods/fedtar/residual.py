"""Temporal residual aggregation, as a pure tensor function (FedTAR, Eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fedtar_flare.errors import ExchangeError

Tensors = Mapping[str, torch.Tensor]


def residual_step(w: Tensors, mean: Tensors, alpha: float) -> tuple[dict[str, torch.Tensor], float]:
    """One residual step of the server: ``w_t = w_{t-1} + alpha_t (wbar_t - w_{t-1})``, in float64.

    Parameters
    ----------
    w : mapping of str to Tensor, float32
        The master w_{t-1}.
    mean : mapping of str to Tensor
        ``wbar_t - w_{t-1}`` (Eq. 6), by the same names and shapes.
    alpha : float
        alpha_t, in [0, 1].

    Returns
    -------
    dict of str to Tensor, float32
        w_t, rounded once.
    float
        ``||w_t - w_{t-1}||`` of the master: alpha_t times that of the mean (Theorem 2) up to float32's rounding. Where
        the two differ clearly, part of the step is lost.

    Raises
    ------
    ExchangeError
        Names the tensor that is not finite after the step.

    References
    ----------
    FedTAR, Eq. 7.
    """
    moved: dict[str, torch.Tensor] = {}
    squares = []
    for name in sorted(w):
        before = w[name].double()
        moved[name] = (before + alpha * mean[name].double()).float()
        squares.append(float((moved[name].double() - before).square().sum()))
        if not math.isfinite(squares[-1]):
            raise ExchangeError(f"tensor '{name}' has values that are not finite after the step")
    return moved, math.sqrt(math.fsum(squares))
