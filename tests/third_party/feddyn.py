"""FedDyn: local losses whose linear term follows what a site learnt before, so that all sites share a stationary point.

Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021), Algorithm 1. Site k minimises
``L_k(theta) - <h_k, theta> + alpha / 2 ||theta - theta^{t-1}||^2`` and then sets ``h_k <- h_k - alpha (theta_k -
theta^{t-1})``; h_k is the paper's ``grad L_k(theta_k^{t-1})`` and stays at the site. Here the minimum is approached by
the job's optimiser (AdamW on clipped gradients), where the paper takes SGD steps; an exchange is a round of the paper.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field

from fedtar_flare.core.settings import Settings
from fedtar_flare.learning.learner import ReportLearner, Trained
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import FedAvgServer
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.runtime.exchange import Answers

PREFIX = "h_k."


class DynamicConfig(Settings):
    """The dynamic regularisation, at the server and at the sites."""

    alpha: float = Field(0.01, gt=0, le=10, description="weight of the dynamic regularisation")


class FedDynServer(FedAvgServer):
    """FedDyn at the server, whose state h is part of the checkpoint."""

    def __init__(self, run):
        super().__init__(run)
        self.h: dict[str, torch.Tensor] = {}

    def shares_of(self, counts: Mapping[str, int]) -> dict[str, float]:
        """``1 / |P_t|``: every site counts the same."""
        return {site: 1 / len(counts) for site in counts}

    def merge(self, w: Tensors, aggregate: Tensors, answers: Answers) -> Tensors:
        """``h <- h - alpha / m sum_k (theta_k - theta^{t-1})``, and ``theta^t = mean_k theta_k - h / alpha``."""
        alpha = self.settings.feddyn.alpha
        part = len(answers.replies) / len(self.run.membership.members)  # |P_t| / m
        self.h = {name: self.h.get(name, 0.0) - alpha * part * mean for name, mean in aggregate.items()}
        return super().merge(w, {name: mean - self.h[name] / alpha for name, mean in aggregate.items()}, answers)

    def state(self) -> dict[str, torch.Tensor]:
        """h; nothing before the first exchange."""
        return dict(self.h)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The h that :meth:`state` gave."""
        self.h = dict(state)


class DynamicLearner(ReportLearner):
    """Adds the gradient of the dynamic regularisation; other arguments than ``feddyn`` as :class:`.ReportLearner`."""

    def __init__(self, *, feddyn: DynamicConfig, **others: Any):
        super().__init__(**others)
        self.alpha = feddyn.alpha
        self.h: dict[str, torch.Tensor] = {}

    def after_backward(self, start: Mapping[str, torch.Tensor]) -> None:
        """``grad += alpha (theta - theta^{t-1}) - h_k``."""
        for name, parameter in self.shared_parameters.items():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start[name].to(parameter.device), alpha=self.alpha)
                if name in self.h:
                    parameter.grad.sub_(self.h[name].to(parameter.device))

    def train(self, *arguments: Any, **named: Any) -> Trained:
        """As of the base, after which ``h_k <- h_k - alpha (theta_k - theta^{t-1})``."""
        trained = super().train(*arguments, **named)
        self.h = {name: self.h.get(name, 0.0) - self.alpha * change for name, change in trained.update.items()}
        return trained

    def private(self) -> dict[str, torch.Tensor]:
        """What the base keeps, and h_k."""
        return super().private() | {PREFIX + name: value for name, value in self.h.items()}

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        """What :meth:`private` gave."""
        self.h = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
        super().load_private(state)


METHOD = FEDAVG.derive(
    "feddyn",
    "FedDyn on pooled visits",
    paper="https://arxiv.org/abs/2111.04263",
    server=FedDynServer,
    learner=DynamicLearner,
    settings={"feddyn": DynamicConfig},
    server_groups=("feddyn",),
)
