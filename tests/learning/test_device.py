"""Where a site computes, and what it does when memory is short: told before weights are read, else smaller batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learners import MODEL

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.learning.device import SMALL_MODEL, choose_device, device_of_each
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.models.config import preset
from fedtar_flare.runtime.requirements import AdaptedModel, require_memory
from fedtar_flare.site.site_file import SiteConfig

FACTOR = 1.5
"""Of estimate and peak, either way, as the reference of the site file says."""


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs."""

    def pretend(count, bfloat16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bfloat16)

    return pretend


@pytest.mark.parametrize(
    ("count", "bfloat16", "arguments", "chosen"),
    [
        (0, True, (), ("cpu", False)),
        (0, True, ("cpu", "bfloat16"), ("cpu", True)),
        (2, True, ("cuda:1", "float32"), ("cuda:1", False)),
        (2, True, ("cpu",), ("cpu", False)),
        (1, False, (), ("cuda", False)),
        (1, True, ("auto", "auto", SMALL_MODEL), ("cuda", True)),
        (1, True, ("auto", "auto", 1_900_000), ("cpu", False)),
        (1, True, ("cuda", "auto", 1), ("cuda", True)),
    ],
)
def test_the_file_says_where_and_how_and_a_small_model_leaves_the_gpu_alone(gpus, count, bfloat16, arguments, chosen):
    gpus(count, bfloat16)
    assert choose_device(*arguments) == chosen
    with pytest.raises(ConfigError, match=f"this machine shows {count} GPU"):
        choose_device("cuda:2")


def test_each_process_has_a_gpu_or_none_has(gpus, monkeypatch):
    gpus(0)
    assert device_of_each("auto", 2) == "cpu"
    gpus(2)
    assert [device_of_each(*of) for of in (("auto", 2), ("cuda", 2), ("cpu", 3))] == ["cuda", "cuda", "cpu"]
    with pytest.raises(ConfigError, match=r"shows 2 GPU\(s\)"):
        device_of_each("auto", 3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert choose_device(parameters=1) == ("cuda", True), "as its process group, one GPU each"


# ---------------------------------------------------------------------- memory, estimated
@pytest.mark.slow
def test_the_estimate_is_near_the_peak_of_a_process_that_makes_an_update(tmp_path):
    """Of every family of models."""
    command = [sys.executable, str(Path(__file__).parents[1] / "memory_peak.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    measured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(measured) == 3, done.stderr
    for family in measured:
        assert 1 / FACTOR < family["estimate"] / family["peak"] < FACTOR, measured


@pytest.mark.parametrize("limited", ["machine", "container"])
def test_a_site_without_a_gpu_refuses_by_numbers_what_it_cannot_hold(tmp_path, monkeypatch, limited):
    asked, site = AdaptedModel(preset("small"), LoRAConfig()), SiteConfig(source="synthetic", device="cpu")
    (file := tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr("fedtar_flare.imaging.limits.CONTAINER_LIMIT", file)
    require_memory(asked, TrainingConfig(), Timeline(1), site)
    if limited == "machine":
        monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**9 // 4096}[name])
    else:
        file.write_text("1000000000\n")
    helps = r"'small' needs .* 64 reports at once; cpu has 1.00 GB.*micro_batch.*lora_rank"
    with pytest.raises(ConfigError, match=helps):
        require_memory(asked, TrainingConfig(batch_size=64), Timeline(1), site)
    few = TrainingConfig(batch_size=64, micro_batch=1, gradient_checkpointing=True)
    monkeypatch.setattr("fedtar_flare.runtime.requirements.getrusage", lambda who: type("", (), {"ru_maxrss": 0}))
    require_memory(asked, few, Timeline(1), site)


# ---------------------------------------------------------------------- memory that runs out, injected on the CPU
class SmallMemory(ReportLearner):
    """Runs out of memory with more than so many reports at once, in the loss or (``late``) only when it writes."""

    most, late = 10**6, False

    def report_losses(self, samples, images, personal=True, **others):
        self._require(samples, self.late)
        return super().report_losses(samples, images, personal, **others)

    def generate(self, samples, images, personal=True):
        self._require(samples, False)
        return super().generate(samples, images, personal)

    def _require(self, samples, spared):
        self.sizes = [*getattr(self, "sizes", []), len(samples)]
        if len(samples) > self.most and not spared:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")


@pytest.fixture
def small(learner_of):
    def make(most=10**6, late=False):
        learner = learner_of(SmallMemory, local_steps=2, batch_size=5)
        learner.most, learner.late = most, late
        return learner

    return make


def test_training_goes_on_in_halves_and_learns_the_same(small):
    whole, halved = small(), small(most=2)
    expected, trained = whole.train(1, 3), halved.train(1, 3)
    assert halved.sizes[:4] == [5, 2, 2, 1] and max(halved.sizes[1:]) == 2, "halved once, and remembered"
    assert trained.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, value in expected.update.items():
        torch.testing.assert_close(trained.update[name], value, rtol=1e-2, atol=1e-4)
    assert halved.validate().loss == pytest.approx(whole.validate().loss, rel=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_evaluation_goes_on_in_halves_and_scores_the_same(small, late):
    whole, halved = small().evaluate(1), (learner := small(3, late)).evaluate(1)
    assert max(learner.sizes) > 3 >= learner.sizes[-1]
    assert halved.texts == whole.texts and halved.samples == whole.samples
    for mine, other in zip(halved.rows, whole.rows, strict=True):
        assert mine["token_loss"] == pytest.approx(other["token_loss"], rel=1e-5)
        assert {**mine, "token_loss": 0} == {**other, "token_loss": 0}
    with pytest.raises(DataError) as caught:
        small(most=0).evaluate(1)
    assert caught.value.reason == "out-of-memory"


def test_an_evaluation_reads_each_image_once_and_keeps_nothing_of_it(small, cohort):
    learner, calls = small(), []
    learner.generator.encoder.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    samples = cohort.samples("test")
    learner.evaluate(1)
    assert sum(calls) == len(samples) * MODEL.slices, "losses and texts share one reading of each image"
    images = learner.images(samples[:2])
    before = learner.report_losses(samples[:2], images)
    images.images = 255 - images.images
    assert not torch.equal(learner.report_losses(samples[:2], images), before)
