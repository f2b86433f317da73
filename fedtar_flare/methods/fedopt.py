"""FedAdam and FedYogi: FedAvg whose server takes the mean update for the gradient of an adaptive optimiser.

Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), Algorithm 2; Delta is the mean of the sites' differences::

    m <- beta1 m + (1 - beta1) Delta
    v <- beta2 v + (1 - beta2) Delta^2                      (FedAdam)
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)          (FedYogi)
    w <- w + server_lr m / (sqrt(v) + tau)

m starts at 0 and v at tau^2, the smallest value that the paper allows. As in the paper, the bias of m and v is not
corrected. ``torch.optim.Adam``, which FLARE's own FedOpt uses, divides m by 1 - beta1^t and v by 1 - beta2^t and starts
v at 0. The mean is weighted by ``weighting`` (the paper's is uniform); the local optimiser is AdamW, as always here.
"""

import torch
from pydantic import Field

from fedtar_flare.core.files import without_prefix
from fedtar_flare.core.settings import Settings
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import FedAvgServer
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.exchange import Answers


class AdaptiveConfig(Settings):
    """The server's optimiser."""

    server_lr: float = Field(1e-2, gt=0, description="the paper's eta")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of m")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of v")
    tau: float = Field(1e-3, gt=0, description="degree of adaptivity")


class FedAdamServer(FedAvgServer):
    """FedAdam at the server, with m and v (float64, by tensor name) in the checkpoint."""

    def __init__(self, run: FederatedController):
        super().__init__(run)
        self.m: dict[str, torch.Tensor] = {}
        self.v: dict[str, torch.Tensor] = {}

    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """The second moment after an exchange."""
        beta2 = self.settings.server.beta2
        return beta2 * v + (1 - beta2) * square

    def merge(self, w: Tensors, aggregate: Tensors, answers: Answers) -> Tensors:
        """One step of the server's optimiser (Algorithm 2)."""
        config, merged = self.settings.server, {}
        for name in sorted(w):
            delta = aggregate[name]
            m = self.m.get(name, torch.zeros_like(delta))
            v = self.v.get(name, torch.full_like(delta, config.tau**2))
            self.m[name] = m = config.beta1 * m + (1 - config.beta1) * delta
            self.v[name] = v = self.second_moment(v, delta.square())
            merged[name] = (w[name].double() + config.server_lr * m / (v.sqrt() + config.tau)).float()
        return merged

    def state(self) -> dict[str, torch.Tensor]:
        return {f"m.{n}": value for n, value in self.m.items()} | {f"v.{n}": value for n, value in self.v.items()}

    def load_state(self, state: Tensors) -> None:
        self.m, self.v = without_prefix(state, "m."), without_prefix(state, "v.")


class FedYogiServer(FedAdamServer):
    """FedYogi at the server."""

    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return v - (1 - self.settings.server.beta2) * square * torch.sign(v - square)


FEDADAM = FEDAVG.derive(
    "fedadam",
    "FedAdam on pooled visits",
    server=FedAdamServer,
    server_settings=AdaptiveConfig,
    paper="https://arxiv.org/abs/2003.00295",
)
FEDYOGI = FEDADAM.derive("fedyogi", "FedYogi on pooled visits", server=FedYogiServer)
