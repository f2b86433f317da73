"""An update whose decoder layers are computed again in the backward pass, in time and in what is kept for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedtar_flare.fedtar.patient_lora import PatientLoRA, PatientLoRAConfig
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import DECODER_TARGETS, preset
from tests.benchmarks.compare_generation import REPORT, volumes
from tests.benchmarks.result import Result, alternated
from tests.saved_tensors import kept_bytes


class Update:
    """Loss of a batch with per-patient LoRA in the decoder, as the shipped job has it; on the CPU, float32."""

    def __init__(self, quick: bool, recomputed: bool):
        self.count = 2 if quick else 8
        config = preset("tiny" if quick else "small", lora_targets=DECODER_TARGETS)
        base = build_model(config)
        self.model = add_lora(base, targets=config.lora_targets, rank=4, alpha=128, seed=0)
        self.patient = PatientLoRA(self.model, PatientLoRAConfig(time_steps=3, seed=0))
        if recomputed:
            base.recompute_layers()
        self.ids, self.labels = build_tokenizer(config).batch([REPORT] * self.count)
        self.images = volumes(config, self.count)
        self.q = torch.softmax(torch.randn(self.count, 16, generator=torch.Generator().manual_seed(2)), 1)

    def loss(self) -> Tensor:
        with self.patient.adapt(self.q, torch.arange(self.count) % 3 + 1):
            losses: Tensor = self.model.get_base_model()(self.images, self.ids, self.labels)
        return losses.mean()

    def step(self) -> None:
        self.loss().backward()
        self.model.zero_grad(set_to_none=True)
        self.patient.zero_grad(set_to_none=True)

    def kept(self) -> float:
        """Megabytes."""
        return kept_bytes(self.loss, (*self.model.parameters(), *self.patient.parameters())) / 1e6


def measure(memory: bool, quick: bool) -> Result:
    ours, theirs = Update(quick, True), Update(quick, False)
    assert torch.equal(ours.loss(), theirs.loss())
    what = f"{ours.count} reports of {ours.ids.shape[1]} tokens, per-patient LoRA, decoder with gradient checkpointing"
    if memory:
        name, kept = "checkpointing-memory", (ours.kept(), theirs.kept())
        return Result(name, f"kept for the backward pass of {what}", "without it", "MB", kept[:1], kept[1:])
    seconds = alternated({"ours": ours.step, "theirs": theirs.step}, 2 if quick else 5)
    return Result("checkpointing", f"update of {what}", "without it", "s", seconds["ours"], seconds["theirs"])


COMPARISONS: dict[str, Callable[[bool], Result]] = {
    "checkpointing": partial(measure, False),
    "checkpointing-memory": partial(measure, True),
}
