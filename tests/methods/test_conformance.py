"""Every method keeps to its contract, resumes to the bit and is scored; presets hold, and what cannot be is refused."""

import json

import pytest
from command import passing
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.methods.fedkei.mixing import BETA_LIMIT
from fedtar_flare.methods.fedtar.config import EMBEDDING_DIM, AlphaConfig
from fedtar_flare.methods.fedtar.policy import AlphaPolicy
from fedtar_flare.presets import papers
from fedtar_flare.record.events import End, Evaluation, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.registry import contract_of, names
from fedtar_flare.runtime import recipe as recipes
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


@pytest.mark.parametrize(("method", "settings", "word"), cases(__file__, "refusals.yaml"))
def test_settings_that_cannot_be_are_refused_when_the_job_is_made(method, settings, word):
    with pytest.raises(ConfigError, match=word):
        (executor_of if "torch_threads" in settings else MethodRecipe)(method, **settings)


def test_a_preset_of_a_paper_reaches_every_method_and_says_where_each_value_comes_from():
    """Values that a method has no setting for are left out; what is printed as the paper's is in force."""
    for name in ("fedavg", "fedpeft", "local", "centralised", "fedmrg"):
        here = MethodRecipe(name, preset="fedmrg-paper")
        assert (here.controller.config.num_rounds, here.controller.config.time_steps) == (1000, 1)
        lora, training = here.executor.strategy.settings.lora, here.executor.strategy.settings.training
        assert (lora.rank, lora.alpha, training.lr, training.local_epochs) == (16, 16.0, 5e-5, 0.02)
        assert {"encoder.*", "projection.*"} <= set(lora.exchange), "they are trained, so that none stays random"
        assert len(set(lora.exchange)) == len(lora.exchange)
    for preset, paper in papers().items():
        method = {"fedkei-paper": "fedkei", "fedmrg-paper": "fedmrg", "r2gen": "fedpeft"}.get(preset, "fedtar")
        rows = {row["name"]: row for row in json.loads(passing("settings", method, "--preset", preset, "--json"))}
        sources = {n: s for n, s in paper.sources.items() if n in rows or not n.startswith("fedmrg.")}
        left = {name for name, source in sources.items() if rows[name]["source"] != source}
        assert left <= {"lora.exchange"} and rows["num_rounds"]["source"], left
        fixed = {name: row["value"] for name, row in rows.items() if row["kind"] == "fixed"}
        d_psi = len(AlphaPolicy(2, AlphaConfig()).hidden_bias)
        constants = {"d of phi": EMBEDDING_DIM, "d_psi": d_psi, "beta": BETA_LIMIT}
        assert bool(fixed) == (preset not in ("r2gen", "medgemma"))
        for name, value in fixed.items():
            assert rows[name]["source"].startswith("ours")
            assert [constants[part] for part in constants if part in name] in ([], [value])
        assert preset in passing("simulate", "--help")


def test_curves_go_to_mlflow_only_where_its_client_is_installed(monkeypatch):
    monkeypatch.setattr(recipes, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedtar_flare\[mlflow\]'"):
        MethodRecipe("fedtar", mlflow="http://localhost:5000")
