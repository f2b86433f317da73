"""Every rival method from the handshake to the page: its own controller and executors, at made-up hospitals."""

import json
import shutil

import pytest
from federation import federation_of

from fedtar_flare.record.events import End, Evaluation, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.registry import contract_of, names
from fedtar_flare.testing import Hospital, same_bits
from fedtar_flare.testing import last_checkpoint as last

T = 2
SITES = ("site-1", "site-2")
SMALL = {"model": {"max_length": 8, "num_beams": 1}, "training": {"local_steps": 2, "batch_size": 2, "lr": 1e-2}}
COVERED = ("fedavg", "fedprox", "local", "local_patient", "fedavg_finetune", "drfa", "fedadam", "fedyogi")
"""Methods whose controllers and executors have quick tests of their own, or run here as parts of another's."""
RIVALS = [
    pytest.param(name, marks=pytest.mark.slow) if name in COVERED else name
    for name in names()
    if name not in ("fedtar", "fedmrg", "fedkei")  # which have rooms of their own
]
STAYS_HOME = ("local", "local_patient")
"""Methods whose server holds no trained weights."""
PERSONAL = ("fedavg_patient", "local_patient", "fedavg_finetune")
"""Methods that are scored with and without a personal part."""


@pytest.fixture(autouse=True)
def _environment(home, monkeypatch):
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    monkeypatch.delenv("FEDTAR_SITES", raising=False)


def run(name, folder, hospitals, **server):
    """A run of a method over two rounds; returns its controller and the events."""
    kind = federation_of(name)
    sites = {site: one.run for site, one in hospitals.items()}
    controller = kind(folder, sites, num_rounds=2, time_steps=T, evaluate_every=2, **server)
    controller.run()
    assert not controller.panics, controller.panics
    return controller, read_events(controller.results_folder)


def hospitals(name, folder):
    return {site: Hospital(folder, site, fresh=False, method=name, **SMALL) for site in SITES}


def resumed_after_round_1(name, controller, folder, there):
    """The run of a controller gone on with from its first round, as if the second had never been."""
    kept = shutil.copytree(controller.results_folder / "checkpoint", folder / "kept")
    (kept / "round-0002.safetensors").unlink()
    return run(name, folder, there, resume_from=str(kept))


@pytest.mark.parametrize("name", RIVALS)
def test_a_run_is_scored_and_one_that_is_resumed_ends_with_the_same_bits(tmp_path, name):
    there = hospitals(name, tmp_path)
    whole, events = run(name, tmp_path / "whole", there)
    assert of_kind(events, End)[-1].status == "completed"
    steps, losses = of_kind(events, Step), [event.loss for event in of_kind(events, Validation)]
    assert [(step.round, step.step) for step in steps] == [(r, t) for r in (1, 2) for t in (1, 2)]
    trained = SITES[:1] if name == "centralised" else SITES
    assert all(tuple(step.sites) == trained and not (step.refused or step.absent) for step in steps)
    assert len(losses) == 2 and losses[1] != losses[0]
    times = 0 if name in STAYS_HOME else 2 if name == "scaffold" else 1  # its control variates go with the weights
    assert steps[0].bytes_down == times * len(trained) * of_kind(events, Start)[0].exchange.bytes
    assert (steps[0].update_norm is None) is (name in STAYS_HOME)
    assert (whole.results_folder / "adapter").is_dir() is (name not in STAYS_HOME)
    final = of_kind(events, Evaluation)[-1]
    assert sorted(final.sites) == list(SITES) and bool(final.generic) is (name in PERSONAL)
    assert contract_of(name).title in (whole.results_folder / "report.html").read_text()
    assert json.loads((whole.results_folder / "metrics.json").read_text())["method"] == name

    second, again = resumed_after_round_1(name, whole, tmp_path / "second", there)
    assert same_bits(last(whole), last(second))
    assert final == of_kind(again, Evaluation)[-1]
