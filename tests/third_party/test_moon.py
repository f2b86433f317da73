"""A method that was written by the page on adding one: MOON, a module by itself."""

import learners
import moon
import pytest
import torch

from fedtar_flare.testing import check_method

MU, TAU = 0.7, 0.4


@pytest.fixture
def announced(announce):
    """The method, announced in this process."""
    return announce(moon.METHOD)


def moved(weights, seed):
    """Weights near others."""
    draw = torch.Generator().manual_seed(seed)
    return {name: value + 0.1 * torch.randn(value.shape, generator=draw) for name, value in weights.items()}


def test_the_loss_of_moon_and_its_gradient_are_those_of_equations_3_and_4(cohort):
    samples = cohort.samples("train", 1)[:4]
    learner = learners.learner_of(cohort, moon.ContrastiveLearner, moon=moon.ContrastiveConfig(mu=MU, temperature=TAU))
    received = learner.shared()
    images = learner.images(samples)  # there is no previous model yet
    torch.testing.assert_close(learner.training_losses(samples, images, "seed"), learner.report_losses(samples, images))
    learner.train(1, 0, updates=1)
    assert all(torch.equal(learner.private()[f"previous.{name}"], value) for name, value in learner.shared().items())
    previous, local = moved(received, 1), moved(received, 2)
    learner.load_private({f"previous.{name}": value for name, value in previous.items()})
    learner.received = received
    learner.load_shared(local)

    other = learners.learner_of(cohort)
    ids, labels = other.tokenizer.batch([sample.visit.report for sample in samples])

    def z_of(weights):
        other.load_shared(weights)
        _, states = other.generator.decode(*other.generator.memory(images, other.generator.encoded(images)), ids)
        lengths = (labels >= 0).sum(1)
        return torch.stack([row[:length].mean(0) for row, length in zip(states, lengths, strict=True)])

    z_glob, z_prev, z = z_of(received).detach(), z_of(previous).detach(), z_of(local)
    e_g, e_p = ((torch.cosine_similarity(z, z_) / TAU).exp() for z_ in (z_glob, z_prev))
    expected = other.report_losses(samples, images) - MU * (e_g / (e_g + e_p)).log()
    losses = learner.training_losses(samples, images, "seed")
    torch.testing.assert_close(losses, expected)
    gradient = torch.autograd.grad(expected.mean(), list(other.shared_parameters.values()))
    _, found = learners.gradients(learner, samples)
    torch.testing.assert_close(found, torch.cat([part.flatten() for part in gradient]), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, local[name]) for name, value in learner.shared().items())


@pytest.mark.slow
def test_it_keeps_to_its_contract_is_resumed_to_the_bit_and_stops_when_aborted(announced, tmp_path, home):
    check_method(announced.name, tmp_path)
