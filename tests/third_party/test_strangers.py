"""Two methods that were written by the page on adding one: FedDyn and MOON, each a module by itself."""

import feddyn
import learners
import moon
import pytest
import torch

from fedtar_flare.testing import FunctionFederation, QuadraticSite, check_method, last_checkpoint, random_pair

ALPHA, MU, TAU = 0.25, 0.7, 0.4


@pytest.fixture
def announced(announce):
    """The methods, announced in this process."""
    return {method.name: announce(method) for method in (feddyn.METHOD, moon.METHOD)}


def three_sites(absent=None):
    """Three sites with known losses; one may have no visits in the first of two exchanges."""
    targets = {n: [None if n == absent else random_pair(n), random_pair(10 + n)] for n in (1, 2, 3)}
    named = {f"site-{n}": (both, n) for n, both in targets.items()}
    return {name: QuadraticSite(name, both, samples=n, validation=random_pair(9)) for name, (both, n) in named.items()}


def updates_at(sites, w, t):
    """The update of each site that has visits at an exchange."""
    names, there = sorted(w), [site for site in sites.values() if site.targets[t] is not None]
    return [{name: -0.5 * (w[name] - site.targets[t][n]) for n, name in enumerate(names)} for site in there]


def close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("absent", [None, 3])
def test_the_server_of_feddyn_counts_every_site_the_same_and_divides_h_by_all(announced, tmp_path, absent):
    sites = three_sites(absent)
    w = {name: value.double() for name, value in sites["site-1"].start().items()}
    h = dict.fromkeys(w, 0.0)
    for t in (0, 1, 0, 1):
        sent = updates_at(sites, w, t)
        for name in w:
            total = sum(update[name] for update in sent)
            h[name] = h[name] - ALPHA * total / 3
            w[name] = w[name] + total / len(sent) - h[name] / ALPHA
    settings = {"num_rounds": 2, "time_steps": 2, "feddyn": {"alpha": ALPHA}}
    (federation := FunctionFederation(tmp_path, sites, "feddyn", **settings)).run()
    last = last_checkpoint(federation)
    close(last.weights, w)
    close(last.method, h)


def moved(weights, seed):
    """Weights near others."""
    draw = torch.Generator().manual_seed(seed)
    return {name: value + 0.1 * torch.randn(value.shape, generator=draw) for name, value in weights.items()}


def test_feddyn_adds_the_gradient_of_its_penalty_and_keeps_h_at_the_site(cohort):
    learner = learners.learner_of(cohort, feddyn.DynamicLearner, feddyn=feddyn.DynamicConfig(alpha=ALPHA))
    start = learner.shared()
    h = {name: value - start[name] for name, value in moved(start, 1).items()}
    learner.load_private({f"h_k.{name}": value for name, value in h.items()})
    learner.load_shared(moved(start, 2))
    _, plain = learners.gradients(learner, cohort.samples("train", 1)[:4])
    learner.after_backward(start)
    theta = learner.shared_parameters
    penalty = sum((-h[name] * w + ALPHA / 2 * (w - start[name]) ** 2).sum() for name, w in theta.items())
    of_penalty = torch.autograd.grad(penalty, list(theta.values()))
    found = torch.cat([w.grad.flatten() for w in theta.values()])
    torch.testing.assert_close(found, plain + torch.cat([part.flatten() for part in of_penalty]))

    update = learner.train(1, 0, updates=1).update
    kept = learner.private()
    assert set(kept) == {f"h_k.{name}" for name in start}
    for name in start:
        torch.testing.assert_close(kept[f"h_k.{name}"], h[name] - ALPHA * update[name])


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
    torch.testing.assert_close(found, torch.cat([part.flatten() for part in gradient]), rtol=1e-4, atol=1e-6)
    assert all(torch.equal(value, local[name]) for name, value in learner.shared().items())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["feddyn", "moon"])
def test_it_keeps_to_its_contract_is_resumed_to_the_bit_and_stops_when_aborted(announced, method, tmp_path, home):
    check_method(method, tmp_path)
