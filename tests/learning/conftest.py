"""Sites and the learners on them."""

from functools import partial

import learners
import pytest

from fedtar_flare.data.cells import Timeline
from fedtar_flare.imaging.pipeline import prepare_cohort
from fedtar_flare.synthetic.cohort import synthetic_cohort


@pytest.fixture
def learner_of(cohort):
    """A learner of a class with these settings, on the patients of ``cohort``."""
    return partial(learners.learner_of, cohort)


@pytest.fixture(scope="session")
def cohort_of(home):
    """Four patients of three visits, prepared, who show this of their visits before."""

    def make(prior, priors=1):
        timeline = Timeline(3, prior=prior, priors=priors)
        made = synthetic_cohort("site-1", folder=home / "few", patients=4, timeline=timeline, seed=0)
        return prepare_cohort(made, learners.MODEL, home / "prepared")

    return make
