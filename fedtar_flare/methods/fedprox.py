"""FedProx: FedAvg with a proximal term in the local loss.

Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), Eq. 2: each site minimises
``F_k(w) + mu / 2 ||w - w^t||^2``, with w^t the weights from the server: its gradient gains ``mu (w - w^t)``.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from torch import Tensor

from fedtar_flare.core.settings import Settings
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedavg import METHOD as FEDAVG


class ProximalConfig(Settings):
    """The proximal term."""

    mu: float = Field(default=0.01, ge=0, description="weight of the proximal term; 0 is FedAvg")


class ProximalLearner(ReportLearner):
    """Adds the gradient of ``mu / 2 ||w - w^t||^2`` (Eq. 2)."""

    def __init__(self, *, proximal: ProximalConfig, **others: Any):
        super().__init__(**others)
        self.mu = proximal.mu

    def after_backward(self, start: Mapping[str, Tensor]) -> None:
        """``grad += mu (w - w^t)`` on the shared part."""
        for name, parameter in self.shared_parameters.items():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start[name].to(parameter.device), alpha=self.mu)


METHOD = FEDAVG.derive(
    "fedprox",
    "FedProx on pooled visits",
    paper="https://arxiv.org/abs/1812.06127",
    learner=ProximalLearner,
    settings={"proximal": ProximalConfig},
)
