"""Learners of the baselines: how they differ from :class:`ReportLearner`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedtar_flare.fedtar.learner import PatientLearner
from fedtar_flare.learning.learner import ReportLearner
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
