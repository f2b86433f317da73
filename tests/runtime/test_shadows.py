"""Shadow runs: the run's own tasks at one site, and what an audit makes of them."""

import pytest
import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.learning.canaries import canaries
from fedtar_flare.models.adapters.peft_file import read_adapter, read_adapter_info
from fedtar_flare.runtime.in_process import run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.shadows import train_shadow
from fedtar_flare.site.context import Site
from fedtar_flare.site.model_audit import audit_model, training_on
from fedtar_flare.site.site_file import load_site_config


@pytest.mark.slow
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
    given = []

    def shadow(cohort, run, rounds, **others):
        given.append((cohort, run, rounds, others))
        return train_shadow(cohort, run, rounds, **others)

    found = audit_model(adapter, site, config, {}, print, 2, shadow)
    start, shared = found["parts"].values()
    low, high = shared["shadow_interval"]
    assert low <= shared["shadow_found"] <= high and "shadow_auc" not in start
    assert 0 <= shared["shadow_auc"] <= 1 and shared["written"] == 0 and len(shared["exposures"]) == 2
    assert {"shadow_auc", "shadow_found", "exposure"} < set(found["rounded"]["shared adapter"])
    with pytest.raises(ConfigError, match="--shadows 1: 2 or more"):
        audit_model(adapter, site, config, {}, print, 1, shadow)

    (half, run, rounds, others), before = given[0], sorted((tmp_path / "home").rglob("*"))
    whole = training_on(half, {p.patient_id for p in half.patients if half._split_of(p.patient_id) == "train"})
    without = train_shadow(whole, run, rounds, **others)
    planted = canaries(whole, read_adapter_info(adapter)["run_id"], 2, without.tokenizer, tmp_path)
    same = train_shadow(whole.with_samples([*whole.samples(None), *planted]), run, rounds, **others).shared()
    end = read_adapter(adapter)
    assert all(torch.allclose(same[name], value, atol=1e-7) for name, value in end.items())
    assert not all(torch.allclose(without.shared()[name], value, atol=1e-4) for name, value in end.items())
    assert before == sorted((tmp_path / "home").rglob("*")), "a shadow run leaves nothing"
    with pytest.raises(ConfigError, match="scaffold"):
        train_shadow(whole, {**run, "job": run["job"] | {"method": "scaffold"}}, 1, **others)
