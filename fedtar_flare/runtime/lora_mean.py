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

import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.lora_ranks import factor, lowered, pairs
from fedtar_flare.runtime.aggregation import SpilledUpdates

FORMS = ("factors", "product", "ffa")
Late = Mapping[str, tuple[int, Tensors]]
"""Sites that answer n - 1 rounds late, so that they count 1 / n: n, and the weights that they trained from."""
ROW_NORM = 3**-0.5
"""Norm of A's rows after a decomposition: the mean norm of LoRA's initial rows."""


def check_form(form: str, aggregation: str) -> None:
    """Check that a form of the mean exists, and that an aggregation can be combined with it."""
    if form not in FORMS or (form == "product" and aggregation != "mean"):
        raise ConfigError(f"lora.mean '{form:.20}': products can only be averaged (server.aggregation 'mean')")


def lora_gap(weights: Tensors, updates: SpilledUpdates, shares: Mapping[str, float]) -> float | None:
    """``||mean(B A) - mean(B) mean(A)|| / ||mean(B A)||`` over all layers.

    None without LoRA or shares, or where not all updates are in memory. The difference is
    ``sum c_k (B_k - mean(B)) (A_k - mean(A))``, which is ``sum c_k B_k (A_k - mean(A))``.
    """
    lost = whole = 0.0
    for _, _, downs, ups in _layers(weights, updates, shares, {}) if shares and not updates.spilled else ():
        mean = torch.zeros_like(downs[0])
        for share, down in zip(shares.values(), downs, strict=True):
            mean += share * down
        up, down = torch.cat(ups, 1), torch.cat(downs)
        lost += _frobenius(up, down - mean.repeat(len(downs), 1)) ** 2
        whole += _frobenius(up, down) ** 2
    return math.sqrt(lost / whole) if whole else None


def _layers(
    weights: Tensors, updates: SpilledUpdates, shares: Mapping[str, float], late: Late
) -> Iterator[tuple[str, str, list[torch.Tensor], list[torch.Tensor]]]:
    """Names of A and B, and each site's A_k and c_k B_k, float64, in the order of ``shares``, layer by layer.

    Those of a late site are followed by what makes its ``B_k A_k`` a ``W + (B_k A_k - W_sent) / n``.
    """
    for a, b in pairs(weights):
        updates_a, updates_b, downs, ups = updates.each(a), updates.each(b), [], []
        for site, share in shares.items():
            n, sent = late.get(site, (1, weights))
            downs.append(sent[a].double() + n * updates_a[site])
            ups.append(share / n * (sent[b].double() + n * updates_b[site]))
        for site, (n, sent) in late.items():
            downs += [sent[a].double(), weights[a].double()]
            ups += [-shares[site] / n * sent[b].double(), shares[site] * weights[b].double()]
        yield a, b, downs, ups


def _frobenius(b: torch.Tensor, a: torch.Tensor) -> float:
    """``||B A||`` of B (out, n) and A (n, in), by small matrices."""
    return float((torch.linalg.qr(b, mode="r").R @ torch.linalg.qr(a.T, mode="r").R.T).norm())


class ProductMean(dict[str, torch.Tensor]):
    """``W + tau (sum c_k B_k A_k - W)`` of each layer as A (R, in) and B (out, R), float64: all factors side by side.

    So all sites' adapters are in memory.

    Parameters
    ----------
    mean : mapping of str to Tensor
        Mean of the updates, of which tensors that are no factor are taken.
    weights : mapping of str to Tensor
        What the sites trained from.
    updates : SpilledUpdates
    shares : mapping of str to float
        c_k by site.
    tau : float
        Mean share of the sites' planned updates that they made.
    late : mapping of str to (int, mapping of str to Tensor)
        Sites that answer n - 1 rounds late: n, and the weights that they trained from.
    """

    def __init__(
        self,
        mean: Tensors,
        weights: Tensors,
        updates: SpilledUpdates,
        shares: Mapping[str, float],
        tau: float,
        late: Late,
    ):
        super().__init__(mean)
        for a, b, downs, ups in _layers(weights, updates, shares, late):
            self[a] = torch.cat([*downs, weights[a].double()])
            self[b] = torch.cat([*(tau * up for up in ups), (1 - tau) * weights[b].double()], 1)

    def step(self, weights: Tensors, alpha: float = 1.0) -> tuple[dict[str, torch.Tensor], float]:
        """Take a step from the weights towards the mean."""
        if not alpha:
            return dict(weights), 0.0
        moved = {n: (weights[n].double() + alpha * self[n]).float() for n in weights if not factor(n)}
        for a, b in pairs(weights):
            up = torch.cat([(1 - alpha) * weights[b].double(), alpha * self[b]], 1)
            moved[a], moved[b] = truncated(up, torch.cat([weights[a].double(), self[a]]), len(weights[a]))
        squares = [float((moved[n].double() - weights[n].double()).square().sum()) for n in weights if not factor(n)]
        for a, b in pairs(weights):
            change = torch.cat([moved[b], -weights[b]], 1), torch.cat([moved[a], weights[a]])
            squares.append(_frobenius(*(one.double() for one in change)) ** 2)
        return moved, math.sqrt(math.fsum(squares))


def truncated(b: torch.Tensor, a: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (rank, in) and B (out, rank), float32, of the nearest matrix of that rank to B A (Eckart and Young).

    Sorted by singular value, so that the first rows and columns are the nearest of every lower rank. A has orthogonal
    rows of norm :data:`ROW_NORM`, also where the singular value is zero, so that what B has not learnt it still can.
    """
    (q_b, r_b), (q_a, r_a) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    number = min(rank, len(s))
    low_a, low_b = a.new_zeros(rank, a.shape[1]), b.new_zeros(len(b), rank)
    low_a[:number] = ROW_NORM * (q_a @ vh.T).T[:number]
    low_b[:, :number] = (q_b @ (u * s))[:, :number] / ROW_NORM
    return low_a.float(), low_b.float()


# ---------------------------------------------------------------------- T numbers
def aligned(
    form: str, rank: int, gradient: Tensors, broadcasts: Sequence[Tensors]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Bring a site's gradient and the broadcasts into the form in which their inner products are its T numbers.

    With ``product`` these are ``<G, W_t - W_{t-1}>``, G being the gradient in W = B A, since factors of two broadcasts
    come from two decompositions. The gradients in A and B give the part of G along the directions that the rank allows
    at w_T, ``P(G) = U U' G + G V V' - U U' G V V'``; W_t has no other as long as nothing was cut off. ``P(G)`` and each
    W_t are given by ``G V`` under the name of B, and ``U' G (1 - V V')`` under that of A.
    """
    seen = [{n: v for n, v in lowered(w, rank).items() if n in gradient} for w in broadcasts]
    if form != "product":
        return dict(gradient), seen
    projected, paths = dict(gradient), [dict(w) for w in seen]
    for a, b in pairs(gradient):
        v, r = torch.linalg.qr(seen[-1][a].double().T)
        u, s, wh = torch.linalg.svd(seen[-1][b].double(), full_matrices=False)
        learnt = s > 1e-6 * s.max().clamp(min=1e-30)  # B's directions that are not zero
        u, s, wh = u[:, learnt], s[learnt], wh[learnt]
        along = gradient[b].double() @ torch.linalg.pinv(r)
        projected[b], projected[a] = along, _without((wh @ gradient[a].double()) / s[:, None], v)
        for w, path in zip(seen, paths, strict=True):
            up, down = w[b].double(), w[a].double()
            path[b], path[a] = up @ (down @ v), _without((u.T @ up) @ down, v)
    return projected, paths


def _without(rows: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows (n, in) without their part in the span of the orthonormal columns of v (in, r)."""
    return rows - (rows @ v) @ v.T
