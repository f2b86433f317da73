"""A training step with per-patient LoRA, compared with PEFT's shared LoRA alone and with a loop over the samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora
from tests.benchmarks.result import Asked, Result, alternated

WIDTH, LENGTH, RANK, LAYERS, COMPONENTS, STEPS = 768, 128, 4, 2, 16, 4
RIVALS: dict[str, tuple[str, Asked]] = {
    "shared": ("PEFT's shared LoRA alone", ("at most", 1.0)),
    "loop": ("the same, sample by sample", ("at least", 1.4)),
}


def _layers(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])


def measure(rival: str, samples: int, quick: bool) -> Result:
    """Forward and backward pass of ``samples`` sequences through :data:`LAYERS` linear layers."""
    width, length = (32, 8) if quick else (WIDTH, LENGTH)
    model = add_lora(_layers(width), targets=r"\d+", rank=RANK, seed=0)
    config = PatientConfig(components=COMPONENTS)
    patient = PatientLoRA(model, config, rank=RANK, time_steps=STEPS, seed=0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, length, width, generator=generator)
    q = torch.softmax(torch.randn(samples, COMPONENTS, generator=generator), 1)
    step = torch.arange(samples) % STEPS + 1

    def clear(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad = None

    def ours() -> None:
        with patient.adapt(q, step):
            model(x).square().mean().backward()
        clear(model)
        clear(patient)

    def shared() -> None:
        model(x).square().mean().backward()
        clear(model)

    def loop() -> None:
        for i in range(samples):
            with patient.adapt(q[i : i + 1], step[i : i + 1]):
                (model(x[i : i + 1]).square().mean() / samples).backward()
        clear(model)
        clear(patient)

    theirs: dict[str, Callable[[], None]] = {"shared": shared, "loop": loop}
    seconds = alternated({"ours": ours, "theirs": theirs[rival]}, 2 if quick else 5)
    title, asked = RIVALS[rival]
    what = f"training step with per-patient LoRA, e={width}, r={RANK}, L={length}, N={samples}"
    return Result(f"step-{rival}-{samples}", what, title, "s", seconds["ours"], seconds["theirs"], asked)


def _case(rival: str, samples: int) -> Callable[[bool], Result]:
    return lambda quick: measure(rival, samples, quick)


COMPARISONS = {f"step-{rival}-{n}": _case(rival, n) for n in (8, 32) for rival in RIVALS}
