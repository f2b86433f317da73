"""The recipe: a preset is the whole setting, what is given wins, and what cannot fit fails before anything runs."""

import json

import pytest
from command import fedtar_here

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.methods.fedkei.mixing import BETA_LIMIT
from fedtar_flare.methods.fedtar.config import EMBEDDING_DIM, AlphaConfig
from fedtar_flare.methods.fedtar.policy import AlphaPolicy
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.presets import papers
from fedtar_flare.runtime import recipe as recipes
from fedtar_flare.runtime.recipe import MethodRecipe


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
        fixed = {name: row["value"] for name, row in rows.items() if row["kind"] == "fixed"}
        d_psi = len(AlphaPolicy(2, AlphaConfig()).hidden_bias)
        constants = {"d of phi": EMBEDDING_DIM, "d_psi": d_psi, "beta": BETA_LIMIT}
        assert bool(fixed) == (preset not in ("r2gen", "medgemma"))
        for name, value in fixed.items():
            assert rows[name]["source"].startswith("ours")
            assert [constants[part] for part in constants if part in name] in ([], [value])
        assert preset in fedtar_here("simulate", "--help")[1]


def test_curves_go_to_mlflow_where_its_client_is_installed(monkeypatch):
    monkeypatch.setattr(recipes, "find_spec", lambda name: None)
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
