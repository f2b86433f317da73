"""Learners of FedMRG on one synthetic hospital, for the tests of this folder."""

import pytest
from learners import fedmrg_learner


@pytest.fixture
def learner_of(cohort):
    """A learner with these settings of the method; ``exchange`` and ``training`` are those of every learner."""

    def make(training=None, **settings):
        return fedmrg_learner(cohort, **{"local_steps": 2, "max_grad_norm": 0.0, **(training or {})}, **settings)

    return make
