"""The mean of the sites' LoRA adapters, whose ranks may differ, in three forms (``lora.mean``).

Site k has ``A_k`` (r_k, in) and ``B_k`` (out, r_k), the first ranks of the server's ``A`` and ``B``, and a share c_k.

``factors``: of A and of B, padded with zeros (Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device
Foundation Models", EMNLP 2024). ``product``: ``sum c_k B_k A_k``, and of it the nearest matrix of the job's rank, whose
first ranks are the nearest of theirs (Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous
Tasks and Client Resources", NeurIPS 2024). ``ffa``: of B, A being frozen (Sun et al., "Improving LoRA in
Privacy-preserving Federated Learning", ICLR 2024).

FedTAR's Eq. 7 and Theorem 1 hold for (A, B) with ``factors``, for B and hence for W = B A with ``ffa``. With
``product``, ``W_t = W_{t-1} + alpha_t (Wbar_t - W_{t-1}) + E_t`` with ``E_t`` what the truncation leaves out, and so
``W_T = beta_0 W_0 + sum beta_t Wbar_t + sum_t prod_{y>t} (1 - alpha_y) E_t``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.lora_ranks import factor, lowered, pairs
from fedtar_flare.runtime.aggregation import SpilledUpdates

FORMS = ("factors", "product", "ffa")
Stale = Mapping[str, tuple[int, Tensors]]
"""Of a site that answers n - 1 rounds late, so that it counts 1 / n: n, and what it trained from."""
ROW_NORM = 3**-0.5
"""Length of A's rows after a decomposition: as long as those of LoRA's start are on average."""


def check_form(form: str, aggregation: str) -> None:
    """Refuse (:class:`ConfigError`) a form that is unknown, or in which updates cannot be put together so."""
    if form not in FORMS or (form == "product" and aggregation != "mean"):
        raise ConfigError(f"lora.mean '{form:.20}': products have a mean alone (server.aggregation)")


def frobenius(b: torch.Tensor, a: torch.Tensor) -> float:
    """``||B A||`` of B (out, n) and A (n, in), by small matrices."""
    return float((torch.linalg.qr(b, mode="r").R @ torch.linalg.qr(a.T, mode="r").R.T).norm())


def _layers(
    w: Tensors, updates: SpilledUpdates, shares: Mapping[str, float], stale: Stale | None = None
) -> Iterator[tuple[Any, ...]]:
    """Names of A and B, and each site's A_k and c_k B_k, float64, in the order of ``shares``, layer by layer.

    Of a stale site follows what makes its ``B_k A_k`` a ``W + (B_k A_k - W_before) / n``.
    """
    stale = stale or {}
    for a, b in pairs(w):
        of_a, of_b, downs, ups = updates.of(a), updates.of(b), [], []
        for site, share in shares.items():
            n, before = stale.get(site, (1, w))
            downs.append(before[a].double() + n * of_a[site])
            ups.append(share / n * (before[b].double() + n * of_b[site]))
        for site, (n, before) in stale.items():
            downs += [before[a].double(), w[a].double()]
            ups += [-shares[site] / n * before[b].double(), shares[site] * w[b].double()]
        yield a, b, downs, ups


def gap(w: Tensors, updates: SpilledUpdates, shares: Mapping[str, float]) -> float | None:
    """``||mean(B A) - mean(B) mean(A)|| / ||mean(B A)||`` over all layers; None without LoRA, of nothing, or where not
    all updates are in memory.

    The difference is ``sum c_k (B_k - mean(B)) (A_k - mean(A))``, which is ``sum c_k B_k (A_k - mean(A))``.
    """
    lost = whole = 0.0
    for _, _, downs, ups in _layers(w, updates, shares) if shares and not updates.spilled else ():
        mean = sum(share * one for share, one in zip(shares.values(), downs, strict=True))
        lost += frobenius(torch.cat(ups, 1), torch.cat([one - mean for one in downs])) ** 2
        whole += frobenius(torch.cat(ups, 1), torch.cat(downs)) ** 2
    return math.sqrt(lost / whole) if whole else None


class ProductMean(dict[str, torch.Tensor]):
    """``W + tau (sum c_k B_k A_k - W)`` of each layer as A (R, in) and B (out, R), float64: all factors side by side.

    So all sites' adapters are in memory. ``w`` went down; of tensors that are no factor, the mean is ``mean``.
    """

    def __init__(
        self,
        mean: Tensors,
        w: Tensors,
        updates: SpilledUpdates,
        shares: Mapping[str, float],
        tau: float = 1.0,
        stale: Stale | None = None,
    ):
        super().__init__(mean)
        for a, b, downs, ups in _layers(w, updates, shares, stale):
            self[a] = torch.cat([*downs, w[a].double()])
            self[b] = torch.cat([*(tau * one for one in ups), (1 - tau) * w[b].double()], 1)

    def step(self, w: Tensors, alpha: float = 1.0) -> tuple[dict[str, torch.Tensor], float]:
        """The step of alpha from W, at the rank of w, float32, and the norm of the change; for alpha 0 w itself."""
        if not alpha:
            return dict(w), 0.0
        moved = {name: (w[name].double() + alpha * self[name]).float() for name in w if not factor(name)}
        for a, b in pairs(w):
            up = torch.cat([(1 - alpha) * w[b].double(), alpha * self[b]], 1)
            moved[a], moved[b] = truncated(up, torch.cat([w[a].double(), self[a]]), len(w[a]))
        squares = [float((moved[n].double() - w[n].double()).square().sum()) for n in w if not factor(n)]
        for a, b in pairs(w):
            change = torch.cat([moved[b], -w[b]], 1), torch.cat([moved[a], w[a]])
            squares.append(frobenius(*(one.double() for one in change)) ** 2)
        return moved, math.sqrt(math.fsum(squares))


def truncated(b: torch.Tensor, a: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (rank, in) and B (out, rank), float32, of the nearest matrix of that rank to B A (Eckart and Young).

    Sorted by singular value, so that the first rows and columns are the nearest of every lower rank. A has orthogonal
    rows of length :data:`ROW_NORM`, also where the singular value is zero: what B has not learnt yet it can.
    """
    (q_b, r_b), (q_a, r_a) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    kept = min(rank, len(s))
    found_a, found_b = a.new_zeros(rank, a.shape[1]), b.new_zeros(len(b), rank)
    found_a[:kept] = ROW_NORM * (q_a @ vh.T).T[:kept]
    found_b[:, :kept] = (q_b @ (u * s))[:, :kept] / ROW_NORM
    return found_a.float(), found_b.float()


# ---------------------------------------------------------------------- T numbers
def aligned(
    form: str, rank: int, gradient: Tensors, broadcasts: Sequence[Tensors]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Gradient and broadcasts w_0..w_T, of what a site sees of them, whose inner products are its T numbers.

    With ``product`` they are ``<G, W_t - W_{t-1}>``, G being the gradient in W = B A, since factors of two broadcasts
    come from two decompositions. The gradients in A and B give the part of G along the directions that the rank allows
    at w_T, ``P(G) = U U' G + G V V' - U U' G V V'``; W_t has no other as long as nothing was cut off. ``P(G)`` and each
    W_t are given by ``G V`` under the name of B, and ``U' G (1 - V V')`` under that of A.
    """
    seen = [{n: v for n, v in lowered(w, rank).items() if n in gradient} for w in broadcasts]
    if form != "product":
        return dict(gradient), seen
    found, paths = dict(gradient), [dict(w) for w in seen]
    for a, b in pairs(gradient):
        v, r = torch.linalg.qr(seen[-1][a].double().T)
        u, s, wh = torch.linalg.svd(seen[-1][b].double(), full_matrices=False)
        kept = s > 1e-6 * s.max().clamp(min=1e-30)
        u, s, wh = u[:, kept], s[kept], wh[kept]
        along = gradient[b].double() @ torch.linalg.pinv(r)
        found[b], found[a] = along, _without((wh @ gradient[a].double()) / s[:, None], v)
        for w, path in zip(seen, paths, strict=True):
            up, down = w[b].double(), w[a].double()
            path[b], path[a] = up @ (down @ v), _without((u.T @ up) @ down, v)
    return found, paths


def _without(rows: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows (n, in) without their part in the span of the orthonormal columns of v (in, r)."""
    return rows - (rows @ v) @ v.T
