"""Every method keeps to its contract, resumes to the bit and is scored; settings that cannot be are refused."""

import json
from pathlib import Path

import pytest
import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.record.events import End, Evaluation, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.registry import contract_of, names
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.testing import check_method, executor_of

SITES = ["site-1", "site-2"]
REPORTS = {"model": {"max_length": 8, "num_beams": 1}, "training": {"local_steps": 2, "batch_size": 2, "lr": 1e-2}}
CLASSIFIES = {"training": {"epochs": 1, "batch_size": 8}, "data": {"synthetic_patients": 20}}
QUICK = ("fedavg_patient",)
"""It has every part that a method can have; the others take ten seconds each."""
METHODS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names()]
UNSHARED = ("local", "local_patient")
"""Methods whose server holds no trained weights."""
PERSONAL = ("fedtar", "fedmrg", "fedavg_patient", "local_patient", "fedavg_finetune")
"""Methods that are scored with and without a personal part."""


@pytest.mark.parametrize("name", METHODS)
def test_a_method_keeps_to_its_contract_and_its_run_is_scored(without_site_files, tmp_path, name):
    check_method(name, tmp_path, **(CLASSIFIES if name == "fedkei" else REPORTS))
    results = tmp_path / "whole" / "fedtar"
    events = read_events(results)
    assert of_kind(events, End)[-1].status == "completed"
    assert contract_of(name).title in (results / "report.html").read_text()
    assert json.loads((results / "metrics.json").read_text())["method"] == name
    if name in ("fedkei", "evaluate"):
        return
    steps, losses = of_kind(events, Step), [event.loss for event in of_kind(events, Validation)]
    exchanges = (1,) if name == "fedmrg" else (1, 2)
    assert [(step.round, step.step) for step in steps] == [(r, t) for r in (1, 2) for t in exchanges]
    trained = SITES[:1] if name == "centralised" else SITES
    assert all(list(step.sites) == trained and not (step.refused or step.absent) for step in steps)
    assert len(losses) == 2 and losses[1] != losses[0]
    times = 0 if name in UNSHARED else 2 if name == "scaffold" else 1  # its control variates go with the weights
    assert steps[0].bytes_down == times * len(trained) * of_kind(events, Start)[0].exchange.bytes
    assert (steps[0].update_norm is None) is (name in UNSHARED)
    assert (results / "adapter").is_dir() is (name not in UNSHARED)
    final = of_kind(events, Evaluation)[-1]
    assert sorted(final.sites) == SITES and bool(final.generic) is (name in PERSONAL)


REFUSED = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.mark.parametrize(("method", "settings", "word"), REFUSED)
def test_settings_that_cannot_be_are_refused_when_the_job_is_made(method, settings, word):
    with pytest.raises(ConfigError, match=word):
        (executor_of if "torch_threads" in settings else MethodRecipe)(method, **settings)
