"""What methods of other packages can do without a line of this one being changed, and what they cannot."""

import json
from pathlib import Path

import learners
import moon
import pytest
import torch
import yaml
from batches import near
from command import failing

from fedtar_flare import registry
from fedtar_flare.runtime.checkpoint import load
from fedtar_flare.testing import FunctionFederation, QuadraticSite, check_method, random_pair

SETTINGS = ("--method", "fedmedian", "--preset", "tiny", "-r", "2", "--time-steps", "1", "--patients", "12")
SETTINGS += ("--set", "server.step_size=0.5", "--set", "training.local_steps=2", "--set", "training.batch_size=4")


def test_it_is_listed_with_its_package_and_refused_by_name_where_it_is_not_installed(command):
    (one,) = [one for one in json.loads(command("methods", "--json")) if one["name"] == "fedmedian"]
    assert one["package"] == "fedmedian 0.1.0" and one["paper"].startswith("https://")
    assert "fedmedian" not in registry.names()
    assert "method 'fedmedian' is unknown" in failing("simulate", "--method", "fedmedian")


@pytest.mark.parametrize("hospitals", [3, 4])
def test_a_round_adds_the_median_of_the_updates(installed, announce, monkeypatch, tmp_path, hospitals):
    monkeypatch.syspath_prepend(str(installed))
    import fedmedian

    announce(fedmedian.METHOD)
    sites = [QuadraticSite(f"site-{n}", [random_pair(n)], validation=random_pair(9)) for n in range(hospitals)]
    start = sites[0].start()
    named = {site.name: site for site in sites}
    run = FunctionFederation(tmp_path, named, "fedmedian", num_rounds=1, time_steps=1, step_size=0.5)
    run.run()
    assert not run.panics
    after = load(run.results_folder / "checkpoint" / "best.safetensors").weights
    for place, name in enumerate(sorted(start)):
        updates = torch.stack([-0.5 * (start[name] - site.targets[0][place]) for site in sites]).double()
        ordered = updates.sort(0).values
        middle = (ordered[(hospitals - 1) // 2] + ordered[hospitals // 2]) / 2
        torch.testing.assert_close(after[name], (start[name].double() + 0.5 * middle).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_it_is_simulated_shown_on_the_page_and_compared(command, tmp_path):
    out = command("simulate", *SETTINGS, "-n", "2", "-w", tmp_path / "ws", "--json")
    page = json.loads(out.strip().splitlines()[-1])["report"]
    text = Path(page).read_text()
    assert "Coordinate-wise median of updates" in text and "norm of the median" in text
    settings = {"preset": "tiny", "num_rounds": 1, "time_steps": 1, "data": {"synthetic_patients": 12}}
    settings["training"] = {"local_steps": 2, "batch_size": 4}
    arms = {"fedavg": {"method": "fedavg"}, "median": {"method": "fedmedian", "label": "coordinate-wise median"}}
    suite = {"name": "try", "sites": ["site-1", "site-2"], "outside": [], "settings": settings, "arms": arms}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    command("compare", tmp_path / "suite.yaml", "-o", tmp_path / "out")
    assert "coordinate-wise median" in (tmp_path / "out" / "comparison.html").read_text()


MU, TAU = 0.7, 0.4


def test_the_loss_of_moon_and_its_gradient_are_those_of_equations_3_and_4(cohort):
    samples = cohort.samples("train", 1)[:4]
    learner = learners.learner_of(cohort, moon.ContrastiveLearner, moon=moon.ContrastiveConfig(mu=MU, temperature=TAU))
    received = learner.shared()
    images = learner.images(samples)  # there is no previous model yet
    torch.testing.assert_close(learner.training_losses(samples, images, "seed"), learner.report_losses(samples, images))
    learner.train(1, 0, updates=1)
    assert all(torch.equal(learner.private()[f"previous.{name}"], value) for name, value in learner.shared().items())
    previous, local = (near(received, seed, 0.1) for seed in (1, 2))
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
def test_it_keeps_to_its_contract_is_resumed_to_the_bit_and_stops_when_aborted(announce, tmp_path, home):
    check_method(announce(moon.METHOD).name, tmp_path)
