"""Learners of the baselines: how they differ from :class:`ReportLearner`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fedtar_flare.data.cohort import Sample
from fedtar_flare.fedtar.learner import PatientLearner
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import Trained, Validated
from fedtar_flare.models.adapters.lora import shared_parameters


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
    """Keeps the adapter at the site as private state; what the server sends is only the common start."""

    def private(self) -> dict[str, torch.Tensor]:
        return super().private() | self.shared()

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the site's own adapter in place of the server's."""
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
        return self._with(self.tuned) if personal and self.tuned is not None else nullcontext()

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

    @contextmanager
    def _with(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        shared = self.shared()
        self.load_shared(weights)
        try:
            yield
        finally:
            self.load_shared(shared)
