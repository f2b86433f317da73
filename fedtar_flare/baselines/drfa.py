"""DRFA: FedAvg with mixing weights that rise for the sites with the largest loss, for the worst-off site's sake.

Deng, Kamani and Mahdavi, "Distributionally Robust Federated Averaging" (NeurIPS 2020), Algorithm 1: minimise over w the
maximum over lambda in the simplex of ``sum_i lambda_i f_i(w)``. Adapted to R rounds of T exchanges that all sites
answer:

- The paper draws sites with probabilities lambda and averages them evenly. Here every site answers and counts by
  lambda_i, which is the expectation of that draw. Where sites are absent, lambda is rescaled over those that answered.
- The paper's round is here the T exchanges of one round; lambda stays the same within it. The snapshot, at a local step
  drawn evenly in the paper, is w as sent down in an exchange drawn evenly from the round's T.
- The loss of the snapshot on a minibatch of site i, for which the paper asks with a message of its own, is what the
  first local update of that exchange gives (``first_loss``): the same quantity, and nothing more travels.
- Then ``lambda <- projection(lambda + lambda_lr * loss)`` onto the simplex (the paper's step is tau * gamma). A site
  without such a loss counts with the mean of the others'.

lambda starts as the sites' shares by ``weighting``, so that with ``lambda_lr=0`` DRFA is FedAvg. A site that joins
later gets its share, and the others' are scaled down.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.errors import ConfigError
from fedtar_flare.flare.aggregation import aggregation_weights
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.flare.tasking import Answers, Tensors

CONTRACT = replace(
    FEDAVG,
    method="drfa",
    title="DRFA on pooled visits",
    server_classes=("fedtar_flare.baselines.drfa.DRFAController",),
    site_classes=("fedtar_flare.baselines.drfa.DRFAExecutor",),
)
_PREFIX = "lambda."


class DRFAController(FedAvgController):
    """DRFA at the server, with lambda in the checkpoint.

    Args:
        lambda_lr: step of lambda in a round.
        args, kwargs: of :class:`MethodController`; FLARE's export finds its parameters by these two names.
    """

    contract = CONTRACT

    def __init__(self, *args: Any, lambda_lr: float = 0.1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not (math.isfinite(lambda_lr) and lambda_lr >= 0):
            raise ConfigError(f"lambda_lr must be 0 or a positive number, not {lambda_lr!r}")
        self.lambda_lr = lambda_lr
        self._mixing: dict[str, float] = {}
        self._losses: dict[str, float] = {}

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """T exchanges weighted by lambda, then a step of lambda along the losses of one of them."""
        self._admit()
        self._losses = {}
        w = super().one_round(w, r)
        if self._losses:
            neutral = math.fsum(self._losses.values()) / len(self._losses)
            moved = [v + self.lambda_lr * self._losses.get(site, neutral) for site, v in self._mixing.items()]
            self._mixing = dict(zip(self._mixing, onto_simplex(moved), strict=True))
        for site, value in self._mixing.items():
            self.scalar(f"lambda/{site}", value, r)
        self.info(f"round {r}: lambda " + " ".join(f"{site} {v:.3f}" for site, v in self._mixing.items()))
        return w

    def train(self, w: Tensors, r: int, t: int) -> tuple[dict[str, torch.Tensor] | None, Answers]:
        """An exchange; that of the snapshot also gives the losses."""
        mean, answers = super().train(w, r, t)
        if t == self.snapshot(r):
            replies = sorted(answers.replies.items())
            self._losses = {s: reply.numbers["first_loss"] for s, reply in replies if "first_loss" in reply.numbers}
        return mean, answers

    def snapshot(self, r: int) -> int:
        """Of which exchange of round r the losses are taken."""
        return random.Random(f"{self.seed}/{r}").randint(1, self.time_steps)

    def shares_of(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Lambda of these sites, rescaled to sum to one; their shares by visits where all of it is 0."""
        total = math.fsum(self._mixing[site] for site in counts)
        if total <= 0:
            return super().shares_of(counts)
        return {site: self._mixing[site] / total for site in sorted(counts)}

    def _admit(self) -> None:
        """Give sites that are new their share of lambda."""
        visits = {site: max(1, sum(self._counts[site]["train"])) for site in self.sites}
        shares = aggregation_weights(visits, self.weighting)
        new = {site: share for site, share in shares.items() if site not in self._mixing}
        left = 1 - math.fsum(new.values()) if self._mixing else 0.0
        self._mixing = dict(sorted(({site: left * v for site, v in self._mixing.items()} | new).items()))

    def method_settings(self) -> dict[str, Any]:
        return {"lambda_lr": self.lambda_lr}

    def method_state(self) -> dict[str, torch.Tensor]:
        """Lambda, by site."""
        return {f"{_PREFIX}{site}": torch.tensor(v, dtype=torch.float64) for site, v in self._mixing.items()}

    def load_method_state(self, state: Tensors) -> None:
        self._mixing = {name.removeprefix(_PREFIX): float(v) for name, v in sorted(state.items())}

    def method_numbers(self) -> dict[str, list[float]]:
        """Lambda in the order of the sites' names."""
        return {"lambda": [round(v, 6) for v in self._mixing.values()]}


def onto_simplex(values: Sequence[float]) -> list[float]:
    """The nearest point (Euclidean) with no negative part and sum 1 (Duchi et al., ICML 2008, Figure 1).

    >>> onto_simplex([0.75, 1.25, -1.0])
    [0.25, 0.75, 0.0]
    """
    ordered = sorted(values, reverse=True)
    heights = [(math.fsum(ordered[:n]) - 1) / n for n in range(1, len(ordered) + 1)]
    threshold = next(h for value, h in zip(reversed(ordered), reversed(heights), strict=True) if value > h)
    parts = [max(0.0, value - threshold) for value in values]
    total = math.fsum(parts)
    return [part / total for part in parts]


class DRFAExecutor(PooledExecutor):
    """DRFA at a site: what FedAvg does."""

    contract = CONTRACT


class DRFARecipe(MethodRecipe):
    """The job of DRFA; arguments as :class:`MethodRecipe`, with ``lambda_lr`` in ``server``."""

    contract = CONTRACT
    controller_class = DRFAController
    executor_class = DRFAExecutor
