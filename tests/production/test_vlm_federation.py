"""A vision-language model learns at two hospitals, in real processes over mTLS."""

import math

import pytest

from fedtar_flare.models.adapters.peft_file import read_adapter, read_adapter_info
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


def test_both_hospitals_train_a_vision_language_model_and_its_adapter_is_kept(federation, exported):
    settings = {"model": {"max_length": 24, "num_beams": 1}, "diagnosis": {"labeler": "synthetic"}}
    job = exported("vlm", preset="vlm-tiny", time_steps=1, **settings)
    results = federation.completed(federation.submit(job), 600)
    (step,) = of_kind(read_events(results), Step)
    assert sorted(step.sites) == ["hospital-a", "hospital-b"]
    assert all(math.isfinite(site.train_loss) for site in step.sites.values())
    weights = read_adapter(results / "adapter")
    assert any(bool(value.any()) for name, value in weights.items() if "lora_B" in name)
    assert read_adapter_info(results / "adapter")["model"]["preset"] == "vlm-tiny"
