"""FedProx: FedAvg with a proximal term in the local loss.

Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), Eq. 2: each site minimises
``F_k(w) + mu / 2 ||w - w^t||^2``, with w^t the weights that the server sent; so ``mu (w - w^t)`` is added to the
gradient of the shared adapter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.settings import Settings, build
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.learning.learner import ReportLearner

CONTRACT = replace(
    FEDAVG,
    method="fedprox",
    title="FedProx on pooled visits",
    server_classes=("fedtar_flare.baselines.fedprox.FedProxController",),
    site_classes=("fedtar_flare.baselines.fedprox.FedProxExecutor",),
)


class ProximalConfig(Settings):
    """The proximal term."""

    mu: float = Field(default=0.01, ge=0, description="weight of the proximal term; 0 is FedAvg")


class FedProxController(FedAvgController):
    """FedProx at the server: what FedAvg does."""

    contract = CONTRACT


class FedProxExecutor(PooledExecutor):
    """FedProx at a site; takes ``proximal`` (``ProximalConfig``) beside the arguments of :class:`ReportExecutor`."""

    contract = CONTRACT

    # FLARE's export finds the parameters of the base by the names args and kwargs
    def __init__(self, *args: Any, proximal: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.proximal = proximal
        self.proximal_config = build(ProximalConfig, proximal, "proximal")

    def method_settings(self) -> tuple[Any, ...]:
        """mu."""
        return (self.proximal_config,)

    def learner_class(self) -> type[ReportLearner]:
        """A learner with the proximal term."""
        from fedtar_flare.baselines.learners import ProximalLearner

        return ProximalLearner

    def learner_settings(self, header: TaskHeader, state: SiteState) -> dict[str, Any]:
        """mu."""
        return {"mu": self.proximal_config.mu}


class FedProxRecipe(MethodRecipe):
    """The job of FedProx; beside the arguments of :class:`MethodRecipe` it takes ``proximal``."""

    contract = CONTRACT
    controller_class = FedProxController
    executor_class = FedProxExecutor
    own_groups = ("proximal",)
