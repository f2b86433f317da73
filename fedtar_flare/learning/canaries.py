"""Planted canaries: patients whom a site makes up and trains on, to see what its training remembers.

Each has one visit: an image of smooth noise, and a phrase of words drawn from the tokenizer's by the site's key, which
nothing but memory can know. How well it is known is its exposure, by sampling (Carlini et al. 2019, *The Secret Sharer:
evaluating and testing unintended memorization in neural networks*).
"""

import hmac
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cohort import Cohort, Sample, Visit
from fedtar_flare.data.minimum_cell import PLANTED
from fedtar_flare.imaging import cache
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.learning.site_model import EVALUATION_BATCH, SiteModel
from fedtar_flare.learning.training import parts
from fedtar_flare.models.tokenizer import ReportTokenizer

FRAME = "Code:"
"""First word of every canary's report."""
WORDS = 8
BITS = 8
"""Largest exposure: the phrase is the best known of 2 ** BITS."""


def canaries(cohort: Cohort, run_id: str, count: int, tokenizer: ReportTokenizer, folder: Path) -> list[Sample]:
    """Make up the canary patients of a site in a run; ConfigError where the tokenizer has too few words."""
    [shown], words, samples = images_of(cohort.samples(None)[:1]), _words(tokenizer), []
    slices = shown.image
    for i in range(count):
        name = f"{PLANTED}{i + 1}"
        drawn = random.Random(hmac.digest(cohort.key, f"{name} of {run_id}".encode(), "sha256"))
        file = folder / f"{name.replace(' ', '-')}.npy"
        noise = torch.rand(len(slices), 1, 8, 8, generator=torch.Generator().manual_seed(drawn.getrandbits(63)))
        if cache.load(file) is None:
            smooth = torch.nn.functional.interpolate(255 * noise, slices.shape[2:], mode="bilinear")
            cache.store(file, np.broadcast_to(smooth.numpy(), slices.shape), shown.position_mm)
        report = _phrase(words, drawn)
        visit = Visit(name, name, datetime(1900, 1, 1), file, report, cohort.modality, findings=frozenset())
        samples.append(Sample(visit, None, None, i % cohort.time_steps + 1, "train", prepared=file))
    return samples


@torch.no_grad()
def exposure(model: SiteModel, canary: Sample, personal: bool) -> float:
    """Measure how well a model knows a canary: ``BITS - log2(rank)`` of its loss among 2 ** BITS phrases."""
    words, drawn = _words(model.tokenizer), random.Random(f"rivals of {canary.visit.report}")
    rivals = [_phrase(words, drawn) for _ in range(2**BITS - 1)]
    shown = [replace(canary, visit=replace(canary.visit, report=text)) for text in (canary.visit.report, *rivals)]
    losses: list[float] = []
    for part in parts(shown, EVALUATION_BATCH):
        losses += model.report_losses(part, model.images(part), personal).tolist()
    return BITS - math.log2(1 + sum(loss <= losses[0] for loss in losses[1:]))


@lru_cache(maxsize=1)
def _words(tokenizer: ReportTokenizer) -> Sequence[str]:
    """Words of letters that are one token each, so that phrases have equally many."""
    texts = {tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size)}
    one_more = len(tokenizer.encode(FRAME)) + 1
    words = sorted(w for w in texts if len(w) > 3 and w.isalpha() and len(tokenizer.encode(f"{FRAME} {w}")) == one_more)
    if len(words) < 2 * WORDS:
        raise ConfigError(f"canaries: the model's tokenizer has {len(words)} whole words; {2 * WORDS} are needed")
    return words


def _phrase(words: Sequence[str], drawn: random.Random) -> str:
    return f"{FRAME} {' '.join(drawn.choices(words, k=WORDS))}."
