"""DRFA: FedAvg with mixing weights that rise for the sites with the largest loss, for the sake of the worst of them.

Deng, Kamani and Mahdavi, "Distributionally Robust Federated Averaging" (NeurIPS 2020), Algorithm 1: minimise over w the
maximum over lambda in the simplex of ``sum_i lambda_i f_i(w)``. Adapted to R rounds of T exchanges:

- The paper draws sites with probabilities lambda and averages them evenly. Here every site answers and counts by
  lambda_i, which is the expectation of that draw. Where sites are absent, lambda is rescaled over those that answered.
- The paper's round is here the T exchanges of one round; lambda stays the same within it. The snapshot, at a local step
  drawn evenly in the paper, is w as sent down in an exchange drawn evenly from the round's T.
- The loss of the snapshot on a minibatch of site i, for which the paper asks with a message of its own, is what the
  first local update of that exchange gives: the same quantity, sent in place of the mean over all updates.
- Then ``lambda <- projection(lambda + lambda_lr * loss)`` onto the simplex (the paper's step is tau * gamma). A site
  without such a loss counts with the mean of the others'.

lambda starts as the sites' shares by ``weighting``, so that with ``lambda_lr=0`` DRFA is FedAvg.
"""

import math
import random
from collections.abc import Mapping, Sequence

import torch
from pydantic import Field

from fedtar_flare.core.settings import Settings
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import FedAvgServer
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.runtime.aggregation import site_weights
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.exchange import Answers

_PREFIX = "lambda."


class RobustConfig(Settings):
    """The server's step on the mixing weights."""

    lambda_lr: float = Field(0.1, ge=0, description="step of lambda in a round; 0 is FedAvg")


class DRFAServer(FedAvgServer):
    """DRFA at the server, with lambda (``mixing``, by site) in the checkpoint."""

    def __init__(self, run: FederatedController):
        super().__init__(run)
        self.mixing: dict[str, float] = {}

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """T exchanges weighted by lambda, then a step of lambda along the losses of one of them."""
        # A site that joins gets its share of lambda, and the others' are scaled down.
        visits = {site: max(1, sum(self.run.membership.visits[site]["train"])) for site in self.run.membership.members}
        shares = site_weights(visits, self.run.config.weighting)
        new = {site: share for site, share in shares.items() if site not in self.mixing}
        left = 1 - math.fsum(new.values()) if self.mixing else 0.0
        self.mixing = dict(sorted(({site: left * v for site, v in self.mixing.items()} | new).items()))
        self._losses: dict[str, float] = {}
        self._snapshot = self.snapshot(r)
        w = super().one_round(w, r)
        if self._losses:
            neutral = math.fsum(self._losses.values()) / len(self._losses)
            rate = self.settings.server.lambda_lr
            moved = [v + rate * self._losses.get(site, neutral) for site, v in self.mixing.items()]
            self.mixing = dict(zip(self.mixing, onto_simplex(moved), strict=True))
        for site, value in self.mixing.items():
            self.run.scalar(f"lambda/{site}", value, r)
        self.run.info(f"round {r}: lambda " + " ".join(f"{site} {v:.3f}" for site, v in self.mixing.items()))
        return w

    def after_exchange(self, t: int, answers: Answers) -> None:
        if t == self._snapshot:
            replies = sorted(answers.replies.items())
            self._losses = {s: reply.numbers["train_loss"] for s, reply in replies if "train_loss" in reply.numbers}

    def snapshot(self, r: int) -> int:
        """The exchange of a round whose losses move lambda."""
        return random.Random(f"{self.run.config.seed}/{r}").randint(1, len(self.steps(r)))

    def shares_of(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Lambda of these sites, rescaled to sum to one; where all of them are 0, their shares by visits."""
        total = math.fsum(self.mixing[site] for site in counts)
        if total <= 0:
            return super().shares_of(counts)
        return {site: self.mixing[site] / total for site in sorted(counts)}

    def state(self) -> dict[str, torch.Tensor]:
        return {f"{_PREFIX}{site}": torch.tensor(v, dtype=torch.float64) for site, v in self.mixing.items()}

    def load_state(self, state: Tensors) -> None:
        self.mixing = {name.removeprefix(_PREFIX): float(v) for name, v in sorted(state.items())}

    def numbers(self) -> dict[str, list[float]]:
        return {"lambda": [round(v, 6) for v in self.mixing.values()]}


class DRFALearner(ReportLearner):
    """Reports the loss of the weights that came down, on its first batch."""

    loss_updates = 1


def onto_simplex(values: Sequence[float]) -> list[float]:
    """The nearest point (Euclidean) of the probability simplex (Duchi et al., ICML 2008, Figure 1).

    >>> onto_simplex([0.75, 1.25, -1.0])
    [0.25, 0.75, 0.0]
    """
    ordered = sorted(values, reverse=True)
    heights = [(math.fsum(ordered[:n]) - 1) / n for n in range(1, len(ordered) + 1)]
    threshold = next(h for value, h in zip(reversed(ordered), reversed(heights), strict=True) if value > h)
    parts = [max(0.0, value - threshold) for value in values]
    total = math.fsum(parts)
    return [part / total for part in parts]


METHOD = FEDAVG.derive(
    "drfa",
    "DRFA on pooled visits",
    server=DRFAServer,
    learner=DRFALearner,
    server_settings=RobustConfig,
    paper="https://arxiv.org/abs/2102.12660",
)
