"""``fedtar generate`` from what a run of other parts than LoRA leaves: it writes what the site's own model wrote."""

import json

import pytest
import torch
from command import passing

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.models.adapters.peft_file import ADAPTER_WEIGHTS, read_adapter_info, write_adapter
from fedtar_flare.reporting.examples import EXAMPLES_FILE, read_examples
from fedtar_flare.runtime.in_process import run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.synthetic.cohort import synthetic_cohort

TINY = {
    "preset": "tiny",
    "num_rounds": 1,
    "time_steps": 2,
    "model": {"max_length": 16, "num_beams": 1},
    "training": {"local_steps": 4, "batch_size": 4, "lr": 0.05},
    "server": {"evaluate_every": 1},
    "data": {"synthetic_patients": 10},
}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("adalora", "vera", "loha", "none")]


@pytest.mark.parametrize("kind", ["prompt", "prefix", *SLOW])
def test_the_text_is_that_of_the_run(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    own = {"lora": {"exchange": ["pooling.*", "projection.*"]}} if kind == "none" else {}
    recipe = MethodRecipe("fedpeft", **TINY, peft={"kind": kind}, **own)
    adapter = run_in_process(recipe, 1, tmp_path / "run") / "adapter"
    (examples,) = (tmp_path / "home" / "state").rglob(EXAMPLES_FILE)
    folder = tmp_path / "home" / "synthetic"
    cohort = synthetic_cohort("site-1", folder=folder, patients=10, timeline=Timeline(2), seed=0)
    drafts = []
    for sample in cohort.samples("test")[:2]:
        draft = passing("generate", sample.visit.image, "--adapter", adapter, "--format", "json")
        drafts.append(json.loads(draft)["text"])
        assert json.loads(draft)["findings"] is None, "the method reads none"
    assert all(drafts) and drafts == [example.draft for example in read_examples(examples).examples[:2]]


def test_extras_whose_adapter_is_lost_are_no_adapter(tmp_path):
    """Else a draft would be written with half of what was trained."""
    state = {"base_model.model.h.0.mlp.lora_A.weight": torch.zeros(2, 3), "projection.weight": torch.zeros(2)}
    write_adapter(tmp_path, state, {"peft_type": "LORA"}, {"model": {}, "fingerprint": "f"})
    assert read_adapter_info(tmp_path)["fingerprint"] == "f"
    (tmp_path / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="is no adapter folder"):
        read_adapter_info(tmp_path)
