"""Temporal residual aggregation, as a pure tensor function (FedTAR, Eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fedtar_flare.errors import ExchangeError

Tensors = Mapping[str, torch.Tensor]


def residual_step(w: Tensors, mean: Tensors, alpha: float) -> tuple[dict[str, torch.Tensor], float]:
    """Eq. 7: ``w_t = w_{t-1} + alpha_t (wbar_t - w_{t-1})``, in float64, rounded once to float32.

    Args:
        w: w_{t-1}, the float32 master.
        mean: ``wbar_t - w_{t-1}``, by the same names and shapes.
        alpha: alpha_t in [0, 1].

    Returns:
        w_t (float32) and ``||w_t - w_{t-1}||``. The norm is measured on the master, so it is alpha_t times that of the
        mean (Theorem 2) up to float32's rounding. Where the two differ clearly, alpha_t times the mean is close to the
        resolution of float32 beside w, and part of it is lost.

    Raises:
        ExchangeError: names the tensor that is not finite after the step.
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
