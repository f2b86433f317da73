"""A training step with per-patient LoRA: beside PEFT's shared LoRA alone, a loop over the samples, and PEFT's poly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedtar_flare.fedtar.config import PatientConfig
from fedtar_flare.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora
from tests.benchmarks.result import Asked, Result, alternated

WIDTH, LENGTH, RANK, LAYERS, COMPONENTS, STEPS = 768, 128, 4, 2, 16, 4
RIVALS: dict[str, tuple[str, Asked]] = {
    "shared": ("PEFT's shared LoRA alone", ("at most", 1.0)),
    "loop": ("the same, sample by sample", ("at least", 1.4)),
    "poly": ("PEFT's poly, 16 skills", ("at least", 1.0)),
}


def _layers(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])


def _poly(width: int) -> Any:
    """PEFT's mixture of LoRA skills by task, a task for each patient."""
    from peft import PolyConfig, get_peft_model

    config = PolyConfig(
        r=RANK, n_tasks=32, n_skills=COMPONENTS, n_splits=1, target_modules=[str(i) for i in range(LAYERS)]
    )
    return get_peft_model(_layers(width), config)


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
    poly = _poly(width) if rival == "poly" else None

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

    def by_poly() -> None:
        assert poly is not None
        poly.base_model(x, task_ids=torch.arange(samples)).square().mean().backward()
        clear(poly)

    theirs: dict[str, Callable[[], None]] = {"shared": shared, "loop": loop, "poly": by_poly}
    seconds = alternated({"ours": ours, "theirs": theirs[rival]}, 2 if quick else 5)
    title, asked = RIVALS[rival]
    return Result(
        f"step-{rival}-{samples}",
        f"training step with per-patient LoRA, e={width}, r={RANK}, L={length}, N={samples}",
        title,
        "s",
        seconds["ours"],
        seconds["theirs"],
        asked,
    )


def _case(rival: str, samples: int) -> Callable[[bool], Result]:
    return lambda quick: measure(rival, samples, quick)


COMPARISONS = {f"step-{rival}-{n}": _case(rival, n) for n in (8, 32) for rival in RIVALS}
