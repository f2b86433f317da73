"""FedAvgM: FedAvg with momentum at the server.

Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification" (2019),
Section 4.3: ``v <- beta v + Delta w`` and ``w <- w - v``, where ``Delta w = sum_k n_k / n Delta w_k`` is what the sites
take off their weights. Here an update is what they add, so that v has the other sign and is added.
"""

from collections.abc import Mapping

import torch
from pydantic import Field

from fedtar_flare.core.settings import Settings
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import FedAvgServer
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.runtime.exchange import Answers


class MomentumConfig(Settings):
    """The server's momentum."""

    beta: float = Field(0.9, ge=0, lt=1, description="momentum of the server; 0 is FedAvg")


class FedAvgMServer(FedAvgServer):
    """FedAvgM at the server, whose momentum v is part of the checkpoint."""

    def __init__(self, run):
        super().__init__(run)
        self.v: dict[str, torch.Tensor] = {}

    def merge(self, w: Tensors, aggregate: Tensors, answers: Answers) -> Tensors:
        """``v <- beta v + aggregate``, in float64, and ``w + v``."""
        beta = self.settings.server.beta
        self.v = {name: beta * self.v.get(name, 0.0) + change for name, change in aggregate.items()}
        return super().merge(w, self.v, answers)

    def state(self) -> dict[str, torch.Tensor]:
        """v; nothing before the first exchange."""
        return dict(self.v)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The v that :meth:`state` gave."""
        self.v = dict(state)


METHOD = FEDAVG.derive(
    "fedavgm",
    "FedAvg with server momentum",
    paper="https://arxiv.org/abs/1909.06335",
    server=FedAvgMServer,
    server_settings=MomentumConfig,
)
