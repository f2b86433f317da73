"""The hospital that the scale benchmarks measure: its size, its model, and a made-up cohort on disk."""

from __future__ import annotations

import io
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.models.config import CVT_TARGETS, DECODER_TARGETS
from fedtar_flare.site.site_file import SITES_VARIABLE
from tests.benchmarks.compare_server import PUBLISHED
from tools.corpus import text_corpus

SITE = "site-1"
BATCH = 8
PIXELS, PICTURES, TEXTS = 64, 16, 400
"""Side of the made-up radiographs, and how many different pictures and reports there are."""
_SIZED = {"weights": "random", "slices": 1}
_PAPER_LORA = {"lora_targets": CVT_TARGETS, "image_size": PIXELS}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("tiny", {}),
    "small": ("small", {"lora_targets": DECODER_TARGETS}),
    "tiny, both": ("tiny", _PAPER_LORA),
    "small, both": ("small", _PAPER_LORA),
    "decoder of 256": (
        "small",
        {
            **_SIZED,
            **_PAPER_LORA,
            "encoder_config": {"embed_dim": (64, 128, 256), "depth": (1, 2, 4), "num_heads": (1, 2, 4)},
            "decoder_config": {"n_embd": 256, "n_layer": 6},
        },
    ),
    "decoder of 512": (
        "small",
        {
            **_SIZED,
            **_PAPER_LORA,
            "encoder_config": {"embed_dim": (64, 192, 384), "depth": (1, 2, 10), "num_heads": (1, 3, 6)},
            "decoder_config": {"n_embd": 512, "n_layer": 6, "n_head": 8},
        },
    ),
    "cvt-21 and distilgpt2": ("small", {**_SIZED, **_PAPER_LORA, **PUBLISHED}),
}
"""Model preset and settings; ``both``: encoder and decoder have adapters. The last one has random weights."""


@dataclass(frozen=True)
class Hospital:
    """What is measured.

    Args:
        patients: with ``visits`` each, which is T as well.
        rank: of LoRA.
        model: one of :data:`MODELS`.
        updates: of :data:`BATCH` reports, in each training task.
        scored: whether reports are written and scored at the end of the round.
        warm: whether :data:`SMALLEST` is done first, and not counted.
    """

    patients: int
    visits: int = 1
    rank: int = 4
    model: str = "tiny"
    updates: int = 12
    scored: bool = True
    warm: bool = True

    def executor(self) -> dict[str, Any]:
        """Arguments of the executor."""
        name, model = MODELS[self.model]
        return {
            "preset": name,
            "model": model,
            "lora": {"rank": self.rank},
            "training": {"local_steps": self.updates, "batch_size": BATCH},
            "data": {},
        }


SMALLEST = Hospital(40, updates=2)


@contextmanager
def alone(folder: Path, size: Hospital, make: bool = False) -> Iterator[None]:
    """The folders of one hospital in this process's environment; with ``make``, its cohort is written first."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if make:
        write_cohort(folder, size)
    names = {SITES_VARIABLE: str(folder / "sites"), "FEDTAR_HOME": str(folder / "home")}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def write_cohort(folder: Path, size: Hospital) -> None:
    """A manifest with small radiographs of noise and reports of the warm start's words, and the site's file."""
    for name in ("images", "sites", "state", "workspace", "home"):
        (folder / name).mkdir(parents=True)
    draw = np.random.default_rng(0)
    pictures = [_png(draw.integers(256, size=(PIXELS, PIXELS), dtype=np.uint8)) for _ in range(PICTURES)]
    texts = text_corpus(min(TEXTS, size.patients * size.visits), 0)
    ages = draw.normal(60, 15, size.patients).clip(18, 95)
    rows = []
    for number, (patient, visit) in enumerate(itertools.product(range(size.patients), range(size.visits))):
        image = folder / "images" / f"{number:06d}.png"
        image.write_bytes(pictures[number % PICTURES])
        rows.append(
            {
                "patient_id": f"patient-{patient:05d}",
                "study_datetime": (datetime(2020, 1, 1) + timedelta(days=90 * visit)).date().isoformat(),
                "image": f"images/{image.name}",
                "report": texts[number % len(texts)],
                "age": f"{ages[patient] + visit / 4:.2f}",
                "sex": "FM"[patient % 2],
            }
        )
    write_rows(folder / "manifest.csv", rows)
    lines = {
        "source": "manifest",
        "path": folder / "manifest.csv",
        "options": "{modality: radiograph}",
        "cache_dir": folder / "cache",
        "state_dir": folder / "state",
        "device": "cpu",
    }
    (folder / "sites" / f"{SITE}.yaml").write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()
