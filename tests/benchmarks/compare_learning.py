"""Learning and writing: a training step, beam search, and what FedKEI adds to a site."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.methods.fedkei.config import LearnerSettings
from fedtar_flare.methods.fedkei.learner import TaskLearner
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.models.config import preset
from tests.benchmarks.harness import comparison
from tests.textures import task_data

Cases = tuple[Callable[[], Any], Callable[[], Any]]
WIDTH, LENGTH, RANK, LAYERS, COMPONENTS, STEPS = 768, 128, 4, 2, 16, 4
SIZES = (64, 16, 96)
LEARNING = LearnerSettings(epochs=10, batch_size=16, lr=0.05, momentum=0.9)
VIT = ClassifierConfig(
    encoder="vit", image_size=32, slices=1, encoder_config={"embed_dim": 32, "depth": 2, "num_heads": 2}
)


def noise(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def training_step(quick: bool, folder: Path, rival: str, samples: int) -> Cases:
    """Forward and backward pass of ``samples`` sequences through :data:`LAYERS` linear layers."""
    width, length = (32, 8) if quick else (WIDTH, LENGTH)
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    model = add_lora(layers, targets=["?*"], rank=RANK, seed=0)
    patient = PatientLoRA(model, PatientConfig(components=COMPONENTS), rank=RANK, time_steps=STEPS, seed=0)
    x, q = noise((samples, length, width), 1), torch.softmax(noise((samples, COMPONENTS), 2), 1)
    step = torch.arange(samples) % STEPS + 1

    def passed(parts: list[slice] | None) -> None:
        """With the patient adapter in each part of the batch; None: with the shared adapter alone."""
        for part in parts or [slice(None)]:
            with patient.adapt(q[part], step[part]) if parts else nullcontext():
                (model(x[part]).square().mean() / len(parts or [0])).backward()
        for module in (model, patient):
            module.zero_grad(set_to_none=True)

    theirs = {"shared": None, "loop": [slice(i, i + 1) for i in range(samples)]}
    return lambda: passed([slice(None)]), lambda: passed(theirs[rival])


for n in (8, 32):
    what = f"training step with per-patient LoRA, e={WIDTH}, r={RANK}, L={LENGTH}, N={n}"
    for rival, title, goal in (
        ("shared", "PEFT's shared LoRA alone", ("at most", 1.0)),
        ("loop", "the same, sample by sample", ("at least", 1.4)),
    ):
        run = partial(training_step, rival=rival, samples=n)
        comparison(f"step-{rival}-{n}", title, goal, what, repetitions=5)(run)


def moved(parameters: Iterable[nn.Parameter]) -> None:
    """Parameters off their start, where adapters change nothing."""
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            parameter.add_(0.002 * noise(tuple(parameter.shape), i))


@comparison("generation", "without it", ("at most", 1.1), repetitions=5)
def generation(quick: bool, folder: Path) -> Cases:
    """32 reports of 60 tokens, 4 beams, with patient LoRA; images of noise."""
    count, length = (2, 6) if quick else (32, 60)
    config = preset("tiny" if quick else "small")
    model = add_lora(build_model(config), targets=config.lora_targets, rank=4, alpha=128, seed=0)
    moved(parameter for parameter in model.parameters() if parameter.requires_grad)
    patient = PatientLoRA(model, PatientConfig(), time_steps=3, seed=0)
    moved(patient.parameters())
    base = model.get_base_model()
    base.eos_id = base.pad_id = base.bos_id
    head = base.decoder.lm_head
    bias = torch.zeros(head.out_features)
    bias[base.bos_id] = -1e4  # never the end, so that both write as many tokens
    head.bias = nn.Parameter(bias)
    pixels = torch.randint(256, (count, config.slices, 3, config.image_size, config.image_size), dtype=torch.uint8)
    position = torch.arange(config.slices).mul(20.0).repeat(count, 1)
    batch = ImageBatch(pixels, position, torch.ones(count, config.slices, dtype=torch.bool))
    q, step = torch.softmax(noise((count, 16), 2), 1), torch.arange(count) % 3 + 1

    def write(personal: bool) -> None:
        with patient.adapt(q, step) if personal else nullcontext():
            assert base.generate(batch, num_beams=4, max_length=length).shape == (count, length)

    return lambda: write(True), lambda: write(False)


@comparison("fedkei-task", "tuning alone")
def fedkei(quick: bool, folder: Path) -> Cases:
    """A site's part in one task of FedKEI: probe, start, tuning."""
    learner = TaskLearner(VIT, LEARNING.replace(epochs=1 if quick else LEARNING.epochs), seed=0)
    data = task_data("a", tuple(range(5)), 2, 0, (8, 4, 8) if quick else SIZES)
    start = learner.start.items()
    several = {name: value + 0.01 * noise((4, *value.shape), i) for i, (name, value) in enumerate(start)}
    single = {name: value[None] for name, value in start}

    def ours() -> None:
        learner.probe(several, data, 2)
        learner.adapt(several, data, 2)

    return ours, lambda: learner.adapt(single, data, 2)


@comparison("fedkei-flops", "tuning alone", note="the paper: 1.078x", unit="GFLOP")
def fedkei_flops(quick: bool, folder: Path) -> tuple[list[float], ...]:
    """The same, floating-point operations."""
    found = []
    for run in fedkei(quick, folder):
        with FlopCounterMode(display=False) as counter:
            run()
        found.append([counter.get_total_flops() / 1e9])
    return tuple(found)
