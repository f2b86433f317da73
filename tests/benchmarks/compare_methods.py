"""What FedMRG and FedKEI add to a site's work: a step of FedMRG, and a task of FedKEI in time and in FLOPs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from fedtar_flare.data.timeline import Timeline
from fedtar_flare.imaging.pipeline import prepare_cohort
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedkei.learner import TaskLearner
from fedtar_flare.methods.fedkei.tuning import LearnerSettings
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.synthetic.cohort import synthetic_cohort
from tests.benchmarks.result import Result, alternated
from tests.textures import task_data

SIZES = (64, 16, 96)
LEARNING = LearnerSettings(epochs=10, batch_size=16, lr=0.05, momentum=0.9)
VIT = ClassifierConfig(
    encoder="vit", image_size=32, slices=1, encoder_config={"embed_dim": 32, "depth": 2, "num_heads": 2}
)


def fedmrg(quick: bool) -> Result:
    """Both halves with distillation, diagnosis and contrast, as the shipped job sets them."""
    job = MethodRecipe("fedmrg", preset="tiny" if quick else "small").executor.resolved
    model = job.model
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        cohort = synthetic_cohort("site-1", folder=home / "synthetic", patients=16, timeline=Timeline(2), seed=0)
        cohort = prepare_cohort(cohort, model, home / "prepared")
        training = job.training.replace(local_steps=4)
        common = {"model": model, "training": training, "cohort": cohort, "seed": 0}
        method = FedMRGLearner(lora=job.lora, fedmrg=job.fedmrg, **common)
        plain = ReportLearner(lora=job.lora.replace(exchange=()), **common)
        seconds = alternated(
            {"ours": lambda: method.train(1, 0), "theirs": lambda: plain.train(1, 0)}, 2 if quick else 3
        )
    return Result(
        "fedmrg-step",
        "four local updates of FedMRG as shipped, both halves, frozen encoder",
        "FedAvg's of the same model and LoRA",
        "s",
        seconds["ours"],
        seconds["theirs"],
        note="its encoder sees no image twice; two halves, each with a teacher's pass",
    )


def _fedkei_task(quick: bool) -> dict[str, Callable[[], object]]:
    learner = TaskLearner(VIT, LEARNING.replace(epochs=1 if quick else LEARNING.epochs), seed=0)
    data = task_data("a", tuple(range(5)), 2, 0, (8, 4, 8) if quick else SIZES)
    generator = torch.Generator().manual_seed(0)
    start = learner.start
    several = {
        name: torch.stack([value + 0.01 * torch.randn(value.shape, generator=generator) for _ in range(4)])
        for name, value in start.items()
    }
    single = {name: value[None] for name, value in start.items()}

    def ours() -> None:
        learner.probe(several, data, 2)
        learner.adapt(several, data, 2)

    return {"ours": ours, "theirs": lambda: learner.adapt(single, data, 2, alpha="fixed")}


def fedkei(quick: bool) -> Result:
    """Probe, alpha and tuning from four centres, beside tuning alone from one start."""
    seconds = alternated(_fedkei_task(quick), 2 if quick else 3)
    return Result("fedkei-task", "a site's part in one task of FedKEI: probe, start, tuning", "tuning alone", "s",
                  seconds["ours"], seconds["theirs"])  # fmt: skip


def fedkei_flops(quick: bool) -> Result:
    """As the paper counts: it names 7.8 % more."""
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for name, run in _fedkei_task(quick).items():
        with FlopCounterMode(display=False) as counter:
            run()
        flops[name] = (counter.get_total_flops() / 1e9,)
    return Result("fedkei-flops", "the same, floating-point operations", "tuning alone", "GFLOP", flops["ours"],
                  flops["theirs"], note="the paper: 1.078x")  # fmt: skip


COMPARISONS = {"fedmrg-step": fedmrg, "fedkei-task": fedkei, "fedkei-flops": fedkei_flops}
