"""Shadow runs: the run's own tasks at one site, and what an audit makes of them."""

import pytest
import torch

from fedtar_flare.errors import ConfigError
from fedtar_flare.files import write_text
from fedtar_flare.learning.canaries import canaries
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.learning.drafting import base_config
from fedtar_flare.models.adapters.peft_file import read_adapter, read_adapter_info
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.shadows import train_shadow
from fedtar_flare.settings import build
from fedtar_flare.site.cohort import prepare_site
from fedtar_flare.site.model_audit import audit_model
from fedtar_flare.site.place import Site
from fedtar_flare.site.site_file import load_site_config
from fedtar_flare.site.state import SiteState
from fedtar_flare.suite.engine import run_in_process


def test_on_the_run_s_own_patients_a_shadow_is_the_run_and_an_audit_compares_with_others(tmp_path, monkeypatch):
    """One site with canaries, so that the mean is its own update."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    write_text(tmp_path / "sites" / "north.yaml", "source: synthetic\ncanaries: 2\n")
    settings = {"training": {"local_steps": 2}, "data": {"synthetic_patients": 48}}
    settings["model"] = {"num_beams": 1, "max_length": 24}
    recipe = MethodRecipe("fedavg", preset="tiny", num_rounds=1, time_steps=2, **settings)
    adapter = run_in_process(recipe, ["north"], tmp_path / "run") / "adapter"
    site, config = Site.outside_of_jobs(tmp_path, "north"), load_site_config("north", workspace=None, simulator=True)
    info, end = read_adapter_info(adapter), read_adapter(adapter)
    state = SiteState(site.state_root(None), info["run_id"], "north")
    about, before = state.about_run(), sorted(state.folder.parent.rglob("*"))
    data, model = build(DataConfig, about["data"], "data"), base_config(info, {})
    cohort, _ = prepare_site(config, "north", model=model, data=data, time_steps=2, seed=about["seed"])

    def shadow(patients, **job):
        run = {**about, "job": about["job"] | job}
        return train_shadow(patients, run, info["round"], site=site, config=config, model={})

    without = shadow(cohort)
    planted = canaries(cohort, info["run_id"], 2, without.tokenizer, state.folder)
    whole = shadow(cohort.also_with(planted)).shared()
    assert all(torch.allclose(whole[name], value, atol=1e-7) for name, value in end.items())
    assert not all(torch.allclose(without.shared()[name], value, atol=1e-4) for name, value in end.items())
    assert before == sorted(state.folder.parent.rglob("*")), "a shadow run leaves nothing"
    with pytest.raises(ConfigError, match="scaffold"):
        shadow(cohort, method="scaffold")

    found, summary = audit_model(adapter, site, config, {}, print, 2, train_shadow)
    start, shared = found["parts"].values()
    low, high = shared["shadow_interval"]
    assert low <= shared["shadow_found"] <= high and "shadow_auc" not in start
    assert 0 <= shared["shadow_auc"] <= 1 and shared["written"] == 0 and len(shared["exposures"]) == 2
    assert {"shadow_auc", "shadow_found", "exposure"} < set(summary.parts["shared adapter"])
    with pytest.raises(ConfigError, match="--shadows 1: 2 or more"):
        audit_model(adapter, site, config, {}, print, 1, train_shadow)
