"""Temporal residual aggregation, as pure tensor functions (FedTAR, Eq. 7 and Theorem 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fedtar_flare.errors import ConfigError, ExchangeError

Tensors = Mapping[str, torch.Tensor]


def residual_step(w: Tensors, mean: Tensors, alpha: float) -> tuple[dict[str, torch.Tensor], float, float]:
    """Eq. 7: ``w_t = w_{t-1} + alpha_t (wbar_t - w_{t-1})``, in float64, rounded once to float32.

    Args:
        w: w_{t-1}, the float32 master.
        mean: ``wbar_t - w_{t-1}``, by the same names and shapes.
        alpha: alpha_t in [0, 1], else ConfigError.

    Returns:
        w_t (float32), ``||w_t - w_{t-1}||`` and ``||wbar_t - w_{t-1}||``. The first norm is measured on the master, so
        it is alpha_t times the second (Theorem 2) up to float32's rounding. Where the two differ clearly, alpha_t times
        the update is close to the resolution of float32 beside w, and part of it is lost.

    Raises:
        ExchangeError: names the tensor that is missing, unknown, of another shape, no float32 master, or not finite
            after the step.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"alpha_t = {alpha} is not within [0, 1]")
    if not w or set(w) != set(mean):
        raise ExchangeError(f"the mean update has other tensors than the weights: {sorted(set(w) ^ set(mean))[:3]}")
    moved: dict[str, torch.Tensor] = {}
    residual_squares, update_squares = [], []
    for name in sorted(w):
        if w[name].dtype != torch.float32:
            raise ExchangeError(f"tensor '{name}' of the master is {w[name].dtype}, not torch.float32")
        if w[name].shape != mean[name].shape:
            raise ExchangeError(
                f"tensor '{name}' has shape {tuple(w[name].shape)} in the weights, {tuple(mean[name].shape)} in the "
                "mean update"
            )
        before, difference = w[name].double(), mean[name].double()
        moved[name] = (before + alpha * difference).float()
        residual_squares.append(float((moved[name].double() - before).square().sum()))
        update_squares.append(float(difference.square().sum()))
        if not math.isfinite(residual_squares[-1] + update_squares[-1]):
            raise ExchangeError(f"tensor '{name}' has values that are not finite after the step")
    return moved, math.sqrt(math.fsum(residual_squares)), math.sqrt(math.fsum(update_squares))


def telescoped_weights(alphas: Sequence[float], taken: Sequence[bool]) -> list[float]:
    """Theorem 1: ``w_T = beta_0 w_0 + sum_x beta_x wbar_x`` with betas that are non-negative and sum to one.

    Takes alpha_1..alpha_T in [0, 1] and as many marks of the steps that anybody answered (else ConfigError): a skipped
    step has beta 0, and products run over the steps taken. Returns beta_0..beta_T.
    """
    if len(alphas) != len(taken):
        raise ConfigError(f"{len(alphas)} alphas but {len(taken)} marks of steps taken")
    for t, alpha in enumerate(alphas, start=1):
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha_{t} = {alpha} is not within [0, 1]")
    betas = [0.0] * (len(alphas) + 1)
    rest = 1.0
    for t in range(len(alphas), 0, -1):
        if taken[t - 1]:
            betas[t] = alphas[t - 1] * rest
            rest *= 1.0 - alphas[t - 1]
    betas[0] = rest
    return betas
