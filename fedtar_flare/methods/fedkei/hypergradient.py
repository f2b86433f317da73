"""The inner steps at a site and the gradient in the cluster centres through them (Eq. 6, 9).

With centres C (d, K) and batches s = 0..S-1::

    alpha_{s+1} = alpha_s - eta_in C^T g_s        g_s = grad L_s(C alpha_s)
    G = (d theta' / d C)^T v                      theta' = C alpha_S,  v = grad L(theta')

Adapter and head have their own C and alpha (C is block-diagonal) and meet in the loss: everything here is by kind.
Theta may have an origin: the callers' gradients know it, this file does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtar_flare.methods.fedkei.mixing import Kind

Vectors = Mapping[Kind, Tensor]
"""By kind, a vector (d,), a matrix (d, K) or weights (K,)."""

Gradient = Callable[[int, Vectors], Vectors]
"""grad L_s(theta) of batch s at theta (d,)."""


@dataclass(frozen=True)
class InnerPath:
    """What the inner steps gave: ``alphas`` 0..S of weights (K,), and the sum of the g_s (d,), both by kind."""

    alphas: tuple[Vectors, ...]
    gradient_sum: Vectors

    @property
    def last(self) -> Vectors:
        """alpha' = alpha_S."""
        return self.alphas[-1]


def inner_steps(centres: Vectors, alpha: Vectors, gradient: Gradient, steps: int, eta_in: float) -> InnerPath:
    """S steps of Eq. 6 from ``alpha``, one batch each.

    Parameters
    ----------
    centres : by kind, (d, K)
        C less the origin.
    alpha : by kind, (K,)
    gradient
        Gives g_s (d,) of batch s at theta (d,), both less the origin.
    steps : int
        S.
    eta_in : float
        Step size.
    """
    path, total = [dict(alpha)], {kind: torch.zeros_like(c[:, 0]) for kind, c in centres.items()}
    for s in range(steps):
        g = gradient(s, combined(centres, path[-1]))
        path.append({kind: path[-1][kind] - eta_in * (centres[kind].T @ g[kind]) for kind in centres})
        for kind in centres:
            total[kind] += g[kind]
    return InnerPath(tuple(path), total)


def combined(centres: Vectors, alpha: Vectors) -> Vectors:
    """``theta = C alpha`` (Eq. 5), less the origin."""
    return {kind: centres[kind] @ alpha[kind] for kind in centres}


def direct(alpha: Vectors, v: Vectors) -> dict[Kind, Tensor]:
    """Variant C: no inner step, ``G = v alpha0^T`` with v at ``C alpha0``."""
    return {kind: torch.outer(v[kind], alpha[kind]) for kind in v}


def first_order(centres: Vectors, path: InnerPath, v: Vectors, eta_in: float) -> dict[Kind, Tensor]:
    """Eq. 9 without second derivatives: ``G = v alpha'^T - eta_in (sum_s g_s)(C^T v)^T``, (d, K) by kind.

    Parameters
    ----------
    centres : by kind, (d, K)
        As for :func:`inner_steps`, whose result ``path`` is.
    v : by kind, (d,)
        Gradient of the outer loss at ``C alpha'``.
    """
    return {
        kind: torch.outer(v[kind], path.last[kind])
        - eta_in * torch.outer(path.gradient_sum[kind], centres[kind].T @ v[kind])
        for kind in centres
    }
