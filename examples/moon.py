"""MOON: a site's representations are drawn to the global model's and away from those of its own previous model.

Li et al., "Model-Contrastive Federated Learning" (CVPR 2021), Eqs. 3 and 4. Adapted: the representation z of a visit is
the mean, over its report's tokens, of the decoder's last hidden states (the paper's is of an image, behind a projection
head); only what travels differs between the three models; a site's first task has no previous model and trains on the
report losses alone. The losses in the record are the sum (Eq. 4). An update runs three forward passes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch.nn.functional import cosine_similarity, softplus

from fedtar_flare.core.settings import Settings
from fedtar_flare.data.cohort import Sample
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.learning.learner import ReportLearner, Trained
from fedtar_flare.methods.fedavg import METHOD as FEDAVG

PREFIX = "previous."


class ContrastiveConfig(Settings):
    """The model-contrastive loss."""

    mu: float = Field(1.0, ge=0, description="weight of the model-contrastive loss; 0 is FedAvg")
    temperature: float = Field(0.5, gt=0, description="tau, by which similarities are divided")


class ContrastiveLearner(ReportLearner):
    """Adds the model-contrastive loss; other arguments than ``moon`` as :class:`.ReportLearner`."""

    def __init__(self, *, moon: ContrastiveConfig, **others: Any):
        super().__init__(**others)
        self.mu, self.tau = moon.mu, moon.temperature
        self.received, self.previous = {}, {}  # w^t and w_i^{t-1}

    def extend(self, generator: Any) -> None:
        """Adds nothing; the model must have a decoder that gives its hidden states."""
        generator.require_parts("MOON")

    def represented(
        self, samples: Sequence[Sample], images: ImageBatch, weights: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Report losses (B,) and z (B, E), of the model or, without a gradient, with other shared weights."""
        losses, states, written = self.losses_and_states(samples, images, weights)
        return losses, (states.float() * written[..., None]).sum(1) / written.sum(1, keepdim=True)

    def training_losses(self, samples: Sequence[Sample], images: ImageBatch, seed: str) -> torch.Tensor:
        """``l_sup + mu l_con`` (Eq. 4), ``l_con = -log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau}))`` (Eq. 3)."""
        if not self.previous:
            return super().training_losses(samples, images, seed)
        others = [self.represented(samples, images, weights)[1] for weights in (self.received, self.previous)]
        losses, z = self.represented(samples, images)
        s_g, s_p = (cosine_similarity(z, other) for other in others)
        return losses + self.mu * softplus((s_p - s_g) / self.tau)

    def train(self, *arguments: Any, **named: Any) -> Trained:
        """As of the base; the weights that came down are w^t, and what it ends with is the next previous model."""
        self.received = self.shared()
        trained = super().train(*arguments, **named)
        self.previous = self.shared()
        return trained

    def private(self) -> dict[str, torch.Tensor]:
        """What the base keeps, and the site's previous model."""
        return super().private() | {PREFIX + name: value for name, value in self.previous.items()}

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        """What :meth:`private` gave."""
        self.previous = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
        super().load_private(state)


METHOD = FEDAVG.derive(
    "moon",
    "MOON on pooled visits",
    paper="https://arxiv.org/abs/2103.16257",
    learner=ContrastiveLearner,
    settings={"moon": ContrastiveConfig},
)
