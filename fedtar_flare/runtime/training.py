"""One training step at the server: what each site's update goes through, and the aggregate of all.

Where sites make as many of their updates as time allows (``training.seconds``), normalised averaging: Wang et al.,
"Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova, NeurIPS 2020), Eq. 10:
``tau sum_k c_k (w_k - w) / tau_k`` with ``tau = sum_k c_k tau_k``. Weighted by c_k as they are, the sum would be that
of an objective in which a site counts by c_k tau_k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.globs import matches
from fedtar_flare.protocol.exchange import WIRE_DTYPES, Tensors, check_update_size, euclidean_norm
from fedtar_flare.protocol.lora_ranks import padded, sent_shapes
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.protocol.tasks import TRAIN
from fedtar_flare.runtime.aggregation import SpilledUpdates
from fedtar_flare.runtime.lora_mean import ProductMean, lora_gap


class TrainingStep:
    """The updates of one training task of round r.

    ``run`` is the controller, ``weights`` are those that the aggregate is added to, ``down`` those and the method's
    further tensors.
    """

    def __init__(self, run: Any, weights: Tensors, down: Tensors, r: int):
        self.run, self.weights, self.down, self.r = run, weights, down, r
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._averaged, by_rows = set[str](), []
        for name, value in down.items():
            self.shapes[name] = tuple(value.shape)
            if not run.contract.is_collected(name):
                self._averaged.add(name)
                if value.dim() and matches(name, run.contract.by_rows):
                    by_rows.append(name)
        self.updates = SpilledUpdates(run.results.folder / "updates", self._averaged, by_rows)
        self.norm: float | None = None
        """Euclidean norm of the aggregate (of the mean of factors, where products are averaged)."""
        self.lora_gap: float | None = None
        """What the mean of LoRA factors loses of that of products (:func:`lora_gap`)."""
        self.work: dict[str, float] = {}
        """tau_k in (0, 1], the share of its planned updates that a site made."""
        self.late: dict[str, tuple[int, Tensors]] = {}
        """Sites that answer n - 1 rounds late, so that they count 1 / n: n, and what they trained from."""

    def accept(self, site: str, reply: Reply, update: Tensors, sent: Tensors | None = None) -> None:
        """Check and store the update of a site; ``sent`` is what it trained from, if not what this round sent down.

        Raises :class:`ExchangeError`, which refuses it.
        """
        run, membership, sent = self.run, self.run.membership, self.down if sent is None else sent
        if not run.contract.shares:
            return

        # 1. It has the names and shapes that were agreed on, at the site's own rank.
        agreed = sent_shapes(self.shapes, membership.lora_ranks[site], frozen_a=membership.lora_mean == "ffa")
        dtype = membership.schema.dtype_up
        run.wire_contract.check_tensors(TRAIN, update, agreed, sends="difference", dtypes={dtype: WIRE_DTYPES[dtype]})

        # 2. Rows that the contract keeps apart by site go to the method.
        averaged, rows = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, value in update.items():
            (averaged if name in self._averaged else rows)[name] = value.float()

        # 3. An update of less work counts as if it were whole; a late one counts less, and is not larger than others.
        work, rounds = work_of(reply.numbers), 1 + self.r - reply.round
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
        # 2. What the mean of factors loses, and the mean of products in its place.
        products = self.run.membership.lora_mean == "product"
        if not (products and self.late):  # late products are made from other weights
            self.lora_gap = lora_gap(self.weights, self.updates, shares)
        if products:
            aggregate = ProductMean(aggregate, self.weights, self.updates, shares, tau, self.late)
        return aggregate


def work_of(numbers: Mapping[str, float]) -> float:
    """tau_k in (0, 1], the share of its planned updates that a site says it made; 1 where it does not say.

    Raises :class:`ExchangeError` for more than were planned.
    """
    made, planned = numbers.get("updates", 1.0), numbers.get("planned_updates", 1.0)
    if made > planned:
        raise ExchangeError(f"it says that it made {made:g} of {planned:g} planned updates")
    return made / planned


def scaled(tensors: Tensors, names: Iterable[str], factor: float) -> dict[str, torch.Tensor]:
    """The tensors, those of ``names`` times a factor."""
    result = dict(tensors)
    for name in names if factor != 1 else ():
        if name in tensors:
            result[name] = tensors[name] * factor
    return result
