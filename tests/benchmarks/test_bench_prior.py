"""Cost of the visit before in a training step: `pytest -m benchmark -s tests/benchmarks/test_bench_prior.py`."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from fedtar_flare.imaging.batch import ImageBatch, PriorBatch
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset

pytestmark = pytest.mark.benchmark

BATCH, REPEATS = 8, 5
MOST = 1.6
"""Seconds of a step with the visit before over those without, at most."""
REPORT = (
    "CT of the chest, compared with prior. There is moderate right lower lobe consolidation, increased. There is a "
    "small left pleural effusion, new. The heart size is normal. There is no lymphadenopathy. The spine shows "
    "degenerative changes. Interval resolution of left nodule."
)


def test_a_training_step_with_the_visit_before() -> None:
    """Forward and backward pass of a batch of the small preset, with report, image and both of the visit before."""
    config = preset("small")
    tokenizer = build_tokenizer(config)
    model = add_lora(build_model(config), targets=config.lora_targets, rank=4, alpha=128, seed=0)
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, config.slices, 3, config.image_size, config.image_size)

    def images() -> ImageBatch:
        pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        position = torch.arange(config.slices).mul(20.0).repeat(BATCH, 1)
        return ImageBatch(pixels, position, torch.ones(BATCH, config.slices, dtype=torch.bool))

    batch, before = images(), images()
    ids, labels = tokenizer.batch([REPORT] * BATCH)
    days, mask = torch.full((BATCH,), 30.0), labels != -100
    cases = {
        "none": None,
        "report": PriorBatch(days, None, ids, mask),
        "image": PriorBatch(days, before),
        "report+image": PriorBatch(days, before, ids, mask),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(REPEATS + 1):
        for name, prior in cases.items():
            batch.prior = prior
            start = time.process_time()  # of all threads: another program beside it does not count
            model.get_base_model()(batch, ids, labels).mean().backward()
            taken = time.process_time() - start
            model.zero_grad(set_to_none=True)
            if repeat:  # the first warms up
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"prior {name}: {1e3 * value:.0f} ms a step, {value / medians['none']:.2f} times that without")
    assert max(medians.values()) <= MOST * medians["none"]
