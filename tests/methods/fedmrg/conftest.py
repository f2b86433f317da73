"""One synthetic hospital and the learners on it, for the tests of this folder."""

import pytest
import torch

from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.methods.fedmrg.config import FedMRGConfig
from fedtar_flare.methods.fedmrg.dual_adapter import decoder_targets
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.models.config import preset

MODEL = preset("tiny", max_length=24, num_beams=1)
EXCHANGED = (r"(?:encoder|pooling|projection|diagnosis)\..+",)


@pytest.fixture
def learner_of(cohort):
    """A learner with these settings of the method; ``exchange`` and ``training`` are those of every learner."""

    def make(model=MODEL, exchange=EXCHANGED, training=None, kind=FedMRGLearner, **fedmrg):
        torch.set_num_threads(1)
        return kind(
            model=model.replace(lora_targets=decoder_targets(model.lora_targets)),
            lora=LoRAConfig(exchange=exchange),
            training=TrainingConfig(**{"local_steps": 2, "batch_size": 4, "max_grad_norm": 0.0, **(training or {})}),
            cohort=cohort,
            seed=0,
            fedmrg=FedMRGConfig(**fedmrg),
        )

    return make


@pytest.fixture
def shaken():
    """Moves every trained parameter of a learner off its start, where half of all gradients vanish."""

    def shake(learner, size=0.05):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in learner.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator))
        return learner

    return shake
