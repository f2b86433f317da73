"""An update whose decoder layers are computed again in the backward pass, in time and in what is kept for it.

The latter is counted, not measured: of a decoder of a billion parameters too, on a device that has no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtar_flare.fedtar.config import PatientConfig
from fedtar_flare.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import DECODER_TARGETS, preset
from fedtar_flare.models.recomputation import RecomputedLayers
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
        self.patient = PatientLoRA(self.model, PatientConfig(), time_steps=3, seed=0)
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


def _kept_by_llama(config: Any, rows: int, length: int, recomputed: bool) -> tuple[int, float]:
    """Parameters, and megabytes that the layers of a bfloat16 Llama with LoRA keep, where tensors have no values."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        llama = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        words = torch.empty(rows, length, config.hidden_size, dtype=torch.bfloat16)
        mask = torch.empty(rows, 1, length, length, dtype=torch.bool)
    size = sum(parameter.numel() for parameter in llama.parameters())
    model = add_lora(llama, targets=r".*\.(q_proj|v_proj)", rank=4, alpha=128, seed=0)
    layers = RecomputedLayers(llama) if recomputed else None

    def states() -> Tensor:
        with nullcontext() if layers is None else layers.acting():
            found: Tensor = llama.model(inputs_embeds=words, attention_mask=mask, use_cache=False).last_hidden_state
        return found

    return size, kept_bytes(states, model.parameters()) / 1e6


def large(quick: bool) -> Result:
    """A decoder of TinyLlama's sizes; image tokens and report together 192 long."""
    from transformers import LlamaConfig

    sizes = (64, 128, 2, 4, 2) if quick else (2048, 5632, 22, 32, 4)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(vocab_size=32000, **dict(zip(names, sizes, strict=True)))
    rows, length = (2, 16) if quick else (8, 192)
    (size, ours), (_, theirs) = (_kept_by_llama(config, rows, length, on) for on in (True, False))
    what = f"kept by the layers of a bfloat16 Llama of {size:,} parameters with LoRA and gradient checkpointing"
    return Result(
        "checkpointing-large", f"{what}, {rows} sequences of {length} tokens", "without it", "MB", (ours,), (theirs,),
        note="counted",
    )  # fmt: skip


COMPARISONS: dict[str, Callable[[bool], Result]] = {
    "checkpointing": partial(measure, False),
    "checkpointing-memory": partial(measure, True),
    "checkpointing-large": large,
}
