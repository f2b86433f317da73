"""The recipe: a preset is the whole setting, what is given wins, and what cannot fit fails before anything runs."""

import json

import pytest
from command import fedtar_here

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.presets import papers
from fedtar_flare.runtime import scalars
from fedtar_flare.runtime.recipe import MethodRecipe


def exported(recipe, folder):
    """Arguments of the controller and of the executor, as the job carries them; defaults are left out."""
    recipe.export(str(folder))
    config = folder / recipe.name / "app" / "config"
    server, client = (json.loads((config / f"config_fed_{side}.json").read_text()) for side in ("server", "client"))
    return server["workflows"][0]["args"], client["executors"][0]["executor"]["args"]


def test_the_paper_s_preset_is_the_whole_setting(tmp_path):
    recipe = FedTARRecipe(preset="paper")
    server, site = recipe.controller.strategy.settings, recipe.executor.strategy.settings
    assert (recipe.controller.config.time_steps, server.server.eta, server.server.alpha_form) == (5, 1e-4, "softmax")
    assert site.patient.scale == site.lora.alpha / site.lora.rank == 32.0
    assert site.patient.time_conditioned is site.patient.common_start is False
    assert site.temporal.replay == server.temporal.replay == "none" and site.training.schedule == "constant"
    assert site.patient.profile == ("hash", "age", "sex")
    assert site.training.lr == site.patient.lr == 1e-5
    assert site.model.encoder_name == "microsoft/cvt-21-384-22k"
    server, site = exported(recipe, tmp_path)
    assert server["time_steps"] == 5 and server["settings"]["server"]["eta"] == 1e-4 and site["preset"] == "paper"
    site = site["settings"]
    assert site["patient"]["scale"] == 32.0 and site["patient"]["time_conditioned"] is False
    assert site["training"]["lr"] == site["patient"]["lr"] == 1e-5


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
        code, out, _ = fedtar_here("settings", method, "--preset", preset, "--json")
        rows = {row["name"]: row for row in json.loads(out)}
        sources = {n: s for n, s in paper.sources.items() if n in rows or not n.startswith("fedmrg.")}
        left = {name for name, source in sources.items() if rows[name]["source"] != source}
        assert code == 0 and left <= {"lora.exchange"} and rows["num_rounds"]["source"], left
        assert preset in fedtar_here("simulate", "--help")[1]


def test_explicit_settings_win_over_the_preset_s_and_leave_its_others():
    given = {"server": {"eta": 5e-3}, "patient": {"scale": 2.0}, "training": {"lr": 3e-4}}
    recipe = FedTARRecipe(preset="paper", time_steps=3, **given)
    server, site = recipe.controller.strategy.settings, recipe.executor.strategy.settings
    assert (recipe.controller.config.time_steps, server.server.eta) == (3, 5e-3)
    assert (site.patient.scale, site.patient.time_conditioned) == (2.0, False)
    assert (site.training.lr, site.patient.lr) == (3e-4, 1e-5)
    small = FedTARRecipe()
    server, site = small.controller.strategy.settings, small.executor.strategy.settings
    assert small.controller.config.time_steps == 3 and site.patient.scale == 1.0, "no preset leaks"
    assert server.server.alpha_form == "sigmoid" and site.patient.profile == ("age", "sex")
    assert server.temporal.replay == site.temporal.replay == "seen"
    server = FedTARRecipe(temporal={"replay": "none"}).controller.strategy.settings
    assert server.temporal.replay == "none", "the server follows the sites"


def test_curves_go_to_mlflow_where_its_client_is_installed(monkeypatch):
    monkeypatch.setattr(scalars, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedtar_flare\[mlflow\]'"):
        FedTARRecipe(mlflow="http://localhost:5000")
    monkeypatch.undo()
    pytest.importorskip("mlflow")
    from fedtar_flare.runtime.mlflow_runs import MLflowRuns

    receiver = MLflowRuns("sqlite://", "job")
    monkeypatch.setattr(MLflowRuns.__base__, "_mlflow_setup", lambda self, *_: made.append(_[3]))
    monkeypatch.setattr(MLflowRuns.__base__, "save", lambda *_: None)
    made = []
    receiver._mlflow_setup("artifacts", "job", {}, ["site-1"], None)
    receiver._init_buffer(["site-1"])
    for origin in ("site-1", "server", "server", "site-2"):
        receiver.save(None, None, origin)
    assert made == [["site-1"], ["server"], ["site-2"]] and [*receiver.buffer] == ["site-1", "server", "site-2"]
