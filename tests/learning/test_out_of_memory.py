"""A GPU that runs out of memory, injected on the CPU: the work goes on in smaller parts, with the same result."""

import pytest
import torch
from learners import MODEL

from fedtar_flare.core.errors import DataError
from fedtar_flare.learning.learner import ReportLearner


class SmallMemory(ReportLearner):
    """Runs out of memory with more than so many reports at once, in the loss or (``late``) only when it writes."""

    most, late = 10**6, False

    def report_losses(self, samples, images, personal=True, **told):
        self._require(samples, self.late)
        return super().report_losses(samples, images, personal, **told)

    def generate(self, samples, images, personal=True):
        self._require(samples, False)
        return super().generate(samples, images, personal)

    def _require(self, samples, spared):
        self.sizes = [*getattr(self, "sizes", []), len(samples)]
        if len(samples) > self.most and not spared:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")


@pytest.fixture
def small(learner_of):
    def make(most=10**6, late=False):
        learner = learner_of(SmallMemory, local_steps=2, batch_size=5)
        learner.most, learner.late = most, late
        return learner

    return make


def test_training_goes_on_in_halves_and_learns_the_same(small):
    whole, halved = small(), small(most=2)
    expected, found = whole.train(1, 3), halved.train(1, 3)
    assert halved.sizes[:4] == [5, 2, 2, 1] and max(halved.sizes[1:]) == 2, "halved once, and remembered"
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, value in expected.update.items():
        torch.testing.assert_close(found.update[name], value, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(halved.validate().loss, whole.validate().loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("late", [False, True])
def test_evaluation_goes_on_in_halves_and_scores_the_same(small, late):
    whole, halved = small().evaluate(1), (learner := small(3, late)).evaluate(1)
    assert max(learner.sizes) > 3 >= learner.sizes[-1]
    assert halved.texts == whole.texts and halved.samples == whole.samples
    for mine, other in zip(halved.rows, whole.rows, strict=True):
        assert mine["token_loss"] == pytest.approx(other["token_loss"], rel=1e-5)
        assert {**mine, "token_loss": 0} == {**other, "token_loss": 0}


def test_one_report_that_does_not_fit_is_said(small):
    with pytest.raises(DataError, match="does not hold one report") as caught:
        small(most=0).evaluate(1)
    assert caught.value.reason == "out-of-memory"


def test_what_an_evaluation_reads_once_is_not_kept(small, cohort):
    learner, calls = small(), []
    encoder = learner.generator.encoder
    encoder.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    samples = cohort.samples("test")
    learner.evaluate(1)
    assert sum(calls) == len(samples) * MODEL.slices, "losses and texts share one reading of each image"
    images = learner.images(samples[:2])
    before = learner.report_losses(samples[:2], images)
    images.images = 255 - images.images
    assert not torch.equal(learner.report_losses(samples[:2], images), before)
