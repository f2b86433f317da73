"""One training step at the server: what each site's update goes through, and the aggregate of all.

The mean of the sites' LoRA adapters, whose ranks may differ, has three forms (``lora.mean``). Site k has ``A_k``
(r_k, in) and ``B_k`` (out, r_k), the first ranks of the server's ``A`` and ``B``, and a share c_k.

``factors``: of A and of B, padded with zeros (Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device
Foundation Models", EMNLP 2024). ``product``: ``sum c_k B_k A_k``, and of it the nearest matrix of the job's rank, whose
first ranks are the nearest of theirs (Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous
Tasks and Client Resources", NeurIPS 2024). ``ffa``: of B, A being frozen (Sun et al., "Improving LoRA in
Privacy-preserving Federated Learning", ICLR 2024).

FedTAR's Eq. 7 and Theorem 1 hold for (A, B) with ``factors``, for B and hence for W = B A with ``ffa``. With
``product``, ``W_t = W_{t-1} + alpha_t (Wbar_t - W_{t-1}) + E_t`` with ``E_t`` what the truncation leaves out, and so
``W_T = beta_0 W_0 + sum beta_t Wbar_t + sum_t prod_{y>t} (1 - alpha_y) E_t``.

Where sites make as many of their updates as time allows (``training.seconds``), normalised averaging: Wang et al.,
"Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova, NeurIPS 2020), Eq. 10:
``tau sum_k c_k (w_k - w) / tau_k`` with ``tau = sum_k c_k tau_k``. Weighted by c_k as they are, the sum would be that
of an objective in which a site counts by c_k tau_k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import matches
from fedtar_flare.protocol.contract import TRAIN
from fedtar_flare.protocol.exchange import (
    Tensors,
    check_tensors,
    check_update_size,
    euclidean_norm,
    factor,
    lowered,
    padded,
    pairs,
    sent_shapes,
)
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.runtime.aggregation import SpilledUpdates

FORMS = ("factors", "product", "ffa")
ROW_NORM = 3**-0.5
"""Norm of A's rows after a decomposition: the mean norm of LoRA's initial rows."""


class TrainingStep:
    """The updates of a training task of round r, which sent ``down`` the ``weights`` and the method's tensors."""

    def __init__(self, run: Any, weights: Tensors, down: Tensors, r: int):
        self.run, self.weights, self.down, self.r = run, weights, down, r
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._averaged, by_rows = set[str](), []
        collected = [names for group in run.contract.groups if group.form == "collected" for names in group.names]
        for name, value in down.items():
            self.shapes[name] = tuple(value.shape)
            if not matches(name, collected):
                self._averaged.add(name)
                if value.dim() and matches(name, run.contract.by_rows):
                    by_rows.append(name)
        self.updates = SpilledUpdates(run.results.folder / "updates", self._averaged, by_rows)
        self.norm: float | None = None
        """Euclidean norm of the aggregate (of the mean of factors, where products are averaged)."""
        self.work: dict[str, float] = {}
        """tau_k in (0, 1], the share of its planned updates that a site made."""
        self.late: dict[str, tuple[int, Tensors]] = {}
        """Sites that answer n - 1 rounds late, so that they count 1 / n: n, and what they trained from."""

    def accept(self, site: str, reply: Reply, update: Tensors, sent: Tensors | None = None) -> None:
        """Check and store the update of a site; ``sent`` is what it trained from, if not what this round sent down."""
        run, membership, sent = self.run, self.run.membership, self.down if sent is None else sent
        if not run.contract.shares:
            return

        # 1. It has the names and shapes that were agreed on, at the site's own rank.
        agreed = sent_shapes(self.shapes, membership.lora_ranks[site], frozen_a=membership.lora_mean == "ffa")
        check_tensors(run.wire_contract, TRAIN, update, agreed, sends="difference")

        # 2. Rows that the contract keeps apart by site go to the method.
        averaged, rows = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, value in update.items():
            (averaged if name in self._averaged else rows)[name] = value.float()

        # 3. An update of less work counts as if it were whole; a late one counts less, and is not larger than others.
        made, planned = reply.numbers.get("updates", 1.0), reply.numbers.get("planned_updates", 1.0)
        if made > planned:
            raise ExchangeError(f"it says that it made {made:g} of {planned:g} planned updates")
        work, rounds = made / planned, 1 + self.r - reply.round
        if (factor := 1 / (work * rounds)) != 1:
            averaged = scaled(averaged, self.weights, factor)
        check_update_size(averaged, self.weights, run.config.update_norm_limit)
        if rows:
            run.strategy.collect(site, rows)

        # 4. Factors of a lower rank are filled up to the job's.
        if agreed != self.shapes:
            averaged = padded(averaged, {name: sent[name] / rounds for name in self._averaged})
        self.updates.add(site, averaged)
        self.work[site] = work
        if rounds > 1:
            self.late[site] = rounds, sent

    def aggregate(self, shares: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """The sites' updates as one, float64, given their shares, of which there are some."""
        # 1. The method's aggregate, as long as the work that the sites did on average.
        aggregate, tau = self.run.strategy.aggregate(self.updates, shares), 1.0
        if min(self.work.values()) < 1:
            tau = math.fsum(shares[site] * self.work[site] for site in shares)
            aggregate = scaled(aggregate, self.weights, tau)
        self.norm = euclidean_norm({name: aggregate[name] for name in self.weights})
        # 2. The mean of products in place of that of factors.
        if self.run.membership.lora_mean == "product":
            aggregate = ProductMean(aggregate, self, shares, tau)
        return aggregate


def scaled(tensors: Tensors, names: Iterable[str], factor: float) -> dict[str, torch.Tensor]:
    """The tensors, those of ``names`` times a factor."""
    chosen = set(names) if factor != 1 else set()
    return {name: value * factor if name in chosen else value for name, value in tensors.items()}


# ---------------------------------------------------------------------- the mean of LoRA adapters
def check_form(form: str, aggregation: str) -> None:
    """Check that a form of the mean exists, and that an aggregation can be combined with it."""
    if form not in FORMS or (form == "product" and aggregation != "mean"):
        raise ConfigError(f"lora.mean '{form:.20}': products can only be averaged (server.aggregation 'mean')")


class ProductMean(dict[str, torch.Tensor]):
    """``W + tau (sum c_k B_k A_k - W)`` of each layer as A (R, in) and B (out, R), float64: all factors side by side.

    So all sites' adapters are in memory. Tensors that are no factor are those of ``mean``; ``tau`` is the mean share of
    their planned updates that the sites made.
    """

    def __init__(self, mean: Tensors, training: TrainingStep, shares: Mapping[str, float], tau: float):
        super().__init__(mean)
        weights, late, updates = training.weights, training.late, training.updates
        for a, b in pairs(weights):
            # 1. Each site's A_k and c_k B_k, in the order of the shares.
            updates_a, updates_b, downs, ups = updates.each(a), updates.each(b), [], []
            for site, share in shares.items():
                n, sent = late.get(site, (1, weights))
                downs.append(sent[a].double() + n * updates_a[site])
                ups.append(share / n * (sent[b].double() + n * updates_b[site]))
            # 2. What makes a late site's B_k A_k a W + (B_k A_k - W_sent) / n.
            for site, (n, sent) in late.items():
                downs += [sent[a].double(), weights[a].double()]
                ups += [-shares[site] / n * sent[b].double(), shares[site] * weights[b].double()]
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
            up, down = torch.cat([moved[b], -weights[b]], 1).double(), torch.cat([moved[a], weights[a]]).double()
            small = torch.linalg.qr(up, mode="r").R @ torch.linalg.qr(down.T, mode="r").R.T  # as long as up @ down
            squares.append(float(small.norm()) ** 2)
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
