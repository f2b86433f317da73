"""The memory that an update needs is told before weights are read, of every family, where no GPU halves a batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.models.config import preset
from fedtar_flare.runtime.requirements import AdaptedModel, require_memory
from fedtar_flare.site.site_file import SiteConfig

FACTOR = 1.5
"""Of estimate and peak, either way, as the reference of the site file says."""


@pytest.mark.slow
def test_the_estimate_is_near_the_peak_of_a_process_that_makes_an_update(tmp_path):
    command = [sys.executable, str(Path(__file__).parents[1] / "memory_peak.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(found) == 3, done.stderr
    for one in found:
        assert 1 / FACTOR < one["estimate"] / one["peak"] < FACTOR, found


@pytest.mark.parametrize("limited", ["machine", "container"])
def test_a_site_without_a_gpu_refuses_by_numbers_what_it_cannot_hold_and_says_what_helps(
    tmp_path, monkeypatch, limited
):
    asked, site = AdaptedModel(preset("small"), LoRAConfig()), SiteConfig(source="synthetic", device="cpu")
    (file := tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr("fedtar_flare.imaging.limits.CONTAINER_LIMIT", file)
    require_memory(asked, TrainingConfig(), Timeline(1), site)
    if limited == "machine":
        monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**9 // 4096}[name])
    else:
        file.write_text("1000000000\n")
    with pytest.raises(
        ConfigError, match=r"'small' needs .* 64 reports at once; cpu has 1.00 GB.*micro_batch.*lora_rank"
    ):
        require_memory(asked, TrainingConfig(batch_size=64), Timeline(1), site)
    few = TrainingConfig(batch_size=64, micro_batch=1, gradient_checkpointing=True)
    monkeypatch.setattr("fedtar_flare.runtime.requirements.getrusage", lambda who: type("", (), {"ru_maxrss": 0}))
    require_memory(asked, few, Timeline(1), site)
