"""Learners of the baselines: how they differ from :class:`ReportLearner`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedtar_flare.baselines.control import PREFIX
from fedtar_flare.data.cohort import Sample
from fedtar_flare.fedtar.learner import PatientLearner
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import Trained, Validated
from fedtar_flare.models.adapters.lora import shared_parameters, swapped_weights


class ProximalLearner(ReportLearner):
    """Adds the gradient of ``mu / 2 ||w - w^t||^2`` (FedProx, Eq. 2)."""

    def __init__(self, *, mu: float, **settings: Any):
        super().__init__(**settings)
        self.mu = mu

    def after_backward(self, start: Mapping[str, torch.Tensor]) -> None:
        """``grad += mu (w - w^t)`` on the shared part."""
        for name, parameter in shared_parameters(self.model, self.adapter).items():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start[name].to(parameter.device), alpha=self.mu)


class LocalLearner(ReportLearner):
    """Keeps the adapter at the site as private state; it begins with the common start of the handshake."""

    def private(self) -> dict[str, torch.Tensor]:
        return super().private() | self.shared()

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the site's own adapter ."""
        super().load_private(state)
        self.load_shared({name: state[name] for name in shared_parameters(self.model, self.adapter)})


class LocalPatientLearner(LocalLearner, PatientLearner):
    """Keeps the adapter and the patient part at the site."""


class FineTuneLearner(ReportLearner):
    """Keeps an adapter of the site's own, which acts in the shared one's place when reports are scored or written.

    It is never trained further and never validated: both are of the shared adapter.
    """

    tuned: Mapping[str, torch.Tensor] | None = None

    @property
    def has_personal_part(self) -> bool:
        return self.tuned is not None

    def context(self, samples: Sequence[Sample], personal: bool) -> AbstractContextManager[Any]:
        return swapped_weights(self.model, self.tuned) if personal and self.tuned is not None else nullcontext()

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        self.tuned = None
        return super().train(*args, **kwargs)

    def validate(self) -> Validated | None:
        self.tuned = None
        return super().validate()

    def fine_tune(self, seed: int, updates: int | None) -> None:
        """Train on the site's visits of all steps, keep the outcome aside, and restore the shared adapter."""
        start = self.shared()
        self.train(None, seed, updates=updates)
        self.tuned = self.shared()
        self.load_shared(start)

    def private(self) -> dict[str, torch.Tensor]:
        return dict(self.tuned or {})

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        self.tuned = state or None


class ScaffoldLearner(ReportLearner):
    """Adds c - c_i to every gradient and keeps c_i, the mean of the last task's gradients (see the module)."""

    def __init__(self, *, optimizer: str, **settings: Any):
        super().__init__(**settings)
        self._sgd = optimizer == "sgd"
        self._common: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}
        self._sum: dict[str, torch.Tensor] = {}
        self._batches = 0

    def shared_optimizer(self, parameters: Sequence[nn.Parameter], epochs: float) -> torch.optim.Optimizer:
        if not self._sgd:
            return super().shared_optimizer(parameters, epochs)
        rate = self.rate * self.training.lr
        return torch.optim.SGD(parameters, lr=rate, weight_decay=self.training.weight_decay)

    def load_shared(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Also takes c, which comes down with the weights of a training task."""
        self._common = {name.removeprefix(PREFIX): v for name, v in weights.items() if name.startswith(PREFIX)}
        super().load_shared({name: v for name, v in weights.items() if not name.startswith(PREFIX)})

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        """The update holds the change of c_i too."""
        self._sum, self._batches = {}, 0
        trained = super().train(*args, **kwargs)
        control = {name: value / self._batches for name, value in self._sum.items()}
        change = {f"{PREFIX}{name}": value - self._own_of(name, value) for name, value in control.items()}
        self._own = control
        return replace(trained, update=trained.update | change)

    def after_backward(self, start: Mapping[str, torch.Tensor]) -> None:
        """``grad += c - c_i``; a batch whose gradient is not finite will be skipped and does not count."""
        parameters = shared_parameters(self.model, self.adapter)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
            return
        self._batches += 1
        for name, gradient in gradients.items():
            seen = gradient.detach().float().cpu().clone()
            correction = self._common[name] - self._own_of(name, seen)
            self._sum[name] = self._sum[name] + seen if name in self._sum else seen
            parameters[name].grad = gradient + correction.to(gradient)

    def private(self) -> dict[str, torch.Tensor]:
        """c_i."""
        return {f"{PREFIX}{name}": value for name, value in self._own.items()}

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        self._own = {name.removeprefix(PREFIX): value for name, value in state.items()}

    def _own_of(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self._own.get(name, torch.zeros_like(like))
