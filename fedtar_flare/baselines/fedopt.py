"""FedAdam and FedYogi: FedAvg whose server takes the mean update for the gradient of an adaptive optimiser.

Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), Algorithm 2; Delta is the mean of the sites' differences::

    m <- beta1 m + (1 - beta1) Delta
    v <- beta2 v + (1 - beta2) Delta^2                      (FedAdam)
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)          (FedYogi)
    w <- w + server_lr m / (sqrt(v) + tau)

m starts at 0 and v at tau^2, the least that the paper allows. As in the paper, the bias of m and v is not corrected.
``torch.optim.Adam``, which FLARE's own FedOpt steps, divides m by 1 - beta1^t and v by 1 - beta2^t and starts v at 0.
The mean is weighted by ``weighting`` (the paper's is uniform); the local optimiser is AdamW, as in every method here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch

from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.errors import ConfigError
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.flare.tasking import Answers, Tensors

FEDADAM = replace(
    FEDAVG,
    method="fedadam",
    title="FedAdam on pooled visits",
    server_classes=("fedtar_flare.baselines.fedopt.FedAdamController",),
    site_classes=("fedtar_flare.baselines.fedopt.FedAdamExecutor",),
)
FEDYOGI = replace(
    FEDAVG,
    method="fedyogi",
    title="FedYogi on pooled visits",
    server_classes=("fedtar_flare.baselines.fedopt.FedYogiController",),
    site_classes=("fedtar_flare.baselines.fedopt.FedYogiExecutor",),
)


class AdaptiveController(FedAvgController):
    """FedAvg with an adaptive optimiser at the server, whose m and v (float64) are in the checkpoint.

    Args:
        server_lr: the paper's eta.
        beta1, beta2: decay of m and v, in [0, 1).
        tau: degree of adaptivity, above 0.
        args, kwargs: of :class:`MethodController`; FLARE's export finds its parameters by these two names.

    Raises:
        ConfigError: a value is not allowed.
    """

    def __init__(
        self,
        *args: Any,
        server_lr: float = 1e-2,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        for name, value in (("server_lr", server_lr), ("tau", tau)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number, not {value!r}")
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= value < 1:
                raise ConfigError(f"{name} must be from 0 to below 1, not {value!r}")
        self.server_lr, self.beta1, self.beta2, self.tau = server_lr, beta1, beta2, tau
        self._m: dict[str, torch.Tensor] = {}
        self._v: dict[str, torch.Tensor] = {}

    @abstractmethod
    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """v after an exchange, given Delta^2."""

    def merge(self, w: Tensors, mean: Tensors, answers: Answers) -> Tensors:
        """One step of the server's optimiser."""
        merged = {}
        for name in sorted(w):
            delta = mean[name]
            m = self._m.get(name, torch.zeros_like(delta))
            v = self._v.get(name, torch.full_like(delta, self.tau**2))
            self._m[name] = m = self.beta1 * m + (1 - self.beta1) * delta
            self._v[name] = v = self.second_moment(v, delta.square())
            merged[name] = (w[name].double() + self.server_lr * m / (v.sqrt() + self.tau)).float()
        return merged

    def method_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("server_lr", "beta1", "beta2", "tau")}

    def method_state(self) -> dict[str, torch.Tensor]:
        """m and v."""
        return {f"m.{n}": value for n, value in self._m.items()} | {f"v.{n}": value for n, value in self._v.items()}

    def load_method_state(self, state: Tensors) -> None:
        self._m, self._v = (
            {name.removeprefix(key): value for name, value in state.items() if name.startswith(key)}
            for key in ("m.", "v.")
        )


class FedAdamController(AdaptiveController):
    """FedAdam at the server; arguments as :class:`AdaptiveController`."""

    contract = FEDADAM

    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


class FedYogiController(AdaptiveController):
    """FedYogi at the server; arguments as :class:`AdaptiveController`."""

    contract = FEDYOGI

    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


class FedAdamExecutor(PooledExecutor):
    """FedAdam at a site: what FedAvg does."""

    contract = FEDADAM


class FedYogiExecutor(PooledExecutor):
    """FedYogi at a site: what FedAvg does."""

    contract = FEDYOGI


class FedAdamRecipe(MethodRecipe):
    """The job of FedAdam; arguments as :class:`MethodRecipe`, with the optimiser's in ``server``."""

    contract = FEDADAM
    controller_class = FedAdamController
    executor_class = FedAdamExecutor


class FedYogiRecipe(MethodRecipe):
    """The job of FedYogi; arguments as :class:`MethodRecipe`, with the optimiser's in ``server``."""

    contract = FEDYOGI
    controller_class = FedYogiController
    executor_class = FedYogiExecutor
