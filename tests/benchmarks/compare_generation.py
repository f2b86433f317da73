"""Writing reports by beam search, and a training step with the visit before: the small preset on made-up volumes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from fedtar_flare.imaging.batch import ImageBatch, PriorBatch
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from tests.benchmarks.result import Result, alternated

REPORT = (
    "CT of the chest, compared with prior. There is moderate right lower lobe consolidation, increased. There is a "
    "small left pleural effusion, new. The heart size is normal. There is no lymphadenopathy. The spine shows "
    "degenerative changes. Interval resolution of left nodule."
)


def model_of(quick: bool) -> tuple[Any, Any]:
    """The preset's model with its shared adapter moved off its start, and its tokenizer."""
    config = preset("tiny" if quick else "small")
    model = add_lora(build_model(config), targets=config.lora_targets, rank=4, alpha=128, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.002 * torch.randn(parameter.shape, generator=generator))
    return model, (build_tokenizer(config), config)


def volumes(config: Any, count: int, seed: int = 0) -> ImageBatch:
    """Noise in the place of images: what it shows does not matter to the time."""
    shape = (count, config.slices, 3, config.image_size, config.image_size)
    pixels = torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    position = torch.arange(config.slices).mul(20.0).repeat(count, 1)
    return ImageBatch(pixels, position, torch.ones(count, config.slices, dtype=torch.bool))


def generation(quick: bool) -> Result:
    """Both write the same number of tokens, since nothing ends a report here before its length."""
    count, length = (2, 6) if quick else (32, 60)
    model, (_, config) = model_of(quick)
    patient = PatientLoRA(model, PatientConfig(), time_steps=3, seed=0)
    base = model.get_base_model()
    base.eos_id = base.pad_id = base.bos_id
    with torch.no_grad():
        base.decoder.lm_head.bias = torch.nn.Parameter(torch.zeros(base.decoder.lm_head.out_features))
        base.decoder.lm_head.bias[base.bos_id] = -1e4  # never the end
        for parameter in patient.parameters():
            parameter.add_(0.002 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = volumes(config, count)
    q = torch.softmax(torch.randn(count, 16, generator=torch.Generator().manual_seed(2)), 1)

    def write(personal: bool) -> None:
        with patient.adapt(q, torch.arange(count) % 3 + 1) if personal else nullcontext():
            assert base.generate(batch, num_beams=4, max_length=length).shape == (count, length)

    seconds = alternated({"ours": lambda: write(True), "theirs": lambda: write(False)}, 2 if quick else 5)
    what = f"{count} reports of {length} tokens, 4 beams, with patient LoRA"
    return Result("generation", what, "without it", "s", seconds["ours"], seconds["theirs"], ("at most", 1.1))


def prior(quick: bool) -> Result:
    """Report and image of the visit before, both."""
    count = 2 if quick else 8
    model, (tokenizer, config) = model_of(quick)
    batch, before = volumes(config, count), volumes(config, count, 1)
    ids, labels = tokenizer.batch([REPORT] * count)
    shown = PriorBatch(torch.full((count,), 30.0), before, ids, labels != -100)

    def step(prior: PriorBatch | None) -> None:
        batch.prior = prior
        model.get_base_model()(batch, ids, labels).mean().backward()
        model.zero_grad(set_to_none=True)

    seconds = alternated({"ours": lambda: step(shown), "theirs": lambda: step(None)}, 2 if quick else 5)
    what = "training step shown the visit before, report and image"
    return Result("prior", what, "shown nothing of it", "s", seconds["ours"], seconds["theirs"], ("at most", 1.6))


COMPARISONS = {"generation": generation, "prior": prior}
