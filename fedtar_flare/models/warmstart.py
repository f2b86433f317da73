"""Make the shipped small model: ``python -m fedtar_flare.models.warmstart --preset small --out fedtar_flare/assets/small``.

Trains on CT phantoms with reports in the generic style, mixed with text of ever new styles, so that the model sees
findings well and has the words of radiology, and knows no site's way of writing. The phantoms pass through the very
transforms that prepare a site's CT.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtar_flare.data.cache import Prepared
from fedtar_flare.data.pipeline import InputConfig
from fedtar_flare.errors import ConfigError
from fedtar_flare.models.presets import ModelConfig, build_model, preset
from fedtar_flare.models.pretraining import PretrainingConfig, pretrain, write_reports
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.weights import save_weights

HELD_OUT_SEED_STEP = 1_000_003  # pairs that are scored come from another stream than those trained on


@dataclass(frozen=True)
class Pairs:
    """Phantoms as the encoder sees them, their reports, and their findings, in the same order."""

    images: list[Prepared]
    reports: list[str]
    findings: list[frozenset[str]]


def phantom_pairs(n: int, seed: int, config: InputConfig, say: Callable[[str], None] = lambda line: None) -> Pairs:
    """``n`` phantoms in the generic style, prepared like a site's CT."""
    from fedtar_flare.data.synthetic.warm_start import generic_pairs

    prepare = volume_pipeline(config)
    pairs = Pairs([], [], [])
    started = time.monotonic()
    for i, (hu, spacing_mm, report, findings) in enumerate(generic_pairs(n, seed), start=1):
        pairs.images.append(prepare(hu, spacing_mm))
        pairs.reports.append(report)
        pairs.findings.append(findings)
        if i % 250 == 0:
            rate = i / (time.monotonic() - started)
            say(f"phantom {i}/{n}  {rate:.1f}/s  {(n - i) / rate / 60:.1f} min left")
    return pairs


def volume_pipeline(config: InputConfig) -> Callable[[np.ndarray, tuple[float, float, float]], Prepared]:
    """The steps of :func:`fedtar_flare.data.pipeline.ct_pipeline` after the reader, for a volume in memory.

    The function that is returned takes HU (z, y, x) with z to the head, y to the back and x to the patient's left,
    and the spacing along them in mm.
    """
    from monai.data import MetaTensor
    from monai.transforms import Compose

    from fedtar_flare.data.ct_transforms import HUWindowsd, LungSlicesd, SquareResized

    steps = Compose(
        [
            LungSlicesd("image", config.slices),
            HUWindowsd("image", config.windows),
            SquareResized("image", config.image_size),
        ]
    )

    def prepare(hu: np.ndarray, spacing_mm: tuple[float, float, float]) -> Prepared:
        z, y, x = spacing_mm
        affine = torch.tensor(
            [[0, 0, -x, 0], [0, -y, 0, 0], [z, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.float64
        )  # to right, anterior, superior
        result: dict[str, Any] = steps({"image": MetaTensor(torch.from_numpy(hu)[None], affine=affine)})
        return Prepared(
            np.ascontiguousarray(result["image"], np.uint8), np.asarray(result["position_mm"], np.float32)
        )

    return prepare


def scores(model: ReportGenerator, tokenizer: ReportTokenizer, pairs: Pairs) -> dict[str, float]:
    """BLEU-4 and finding F1 of the reports that the model writes for these pairs."""
    from fedtar_flare.data.synthetic.vocabulary import findings_in
    from fedtar_flare.metrics.clinical import finding_f1
    from fedtar_flare.metrics.language import language_scores

    written = write_reports(model, tokenizer, pairs.images)
    language = language_scores(pairs.reports, written)
    clinical = finding_f1(pairs.findings, [findings_in(text) for text in written])
    return {"bleu_4": language["bleu_4"], "finding_f1": clinical["finding_f1"]}
