"""Learners of FedMRG on one synthetic hospital, for the tests of this folder."""

import pytest
import torch
from learners import fedmrg_learner


@pytest.fixture
def learner_of(cohort):
    """A learner with these settings of the method; ``exchange`` and ``training`` are those of every learner."""

    def make(training=None, **settings):
        torch.set_num_threads(1)
        return fedmrg_learner(cohort, **{"local_steps": 2, "max_grad_norm": 0.0, **(training or {})}, **settings)

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
