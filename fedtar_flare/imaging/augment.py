"""Augmentation of model input by MONAI's transforms: small shifts and turns, brightness, contrast and noise.

Off unless a training loop calls it. The defaults are small, since studies differ in where things lie and how bright
they are, and nothing is mirrored, since a report tells left from right.
"""

from __future__ import annotations

import hashlib
import math
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from fedtar_flare.errors import DataError
from fedtar_flare.settings import Settings

if TYPE_CHECKING:
    from monai.transforms import Compose

_ONE_AT_A_TIME = threading.Lock()  # MONAI's transforms keep their random state in themselves


class AugmentConfig(Settings):
    """How far images are changed; each change happens independently, with probability ``probability``."""

    rotation_deg: float = Field(5.0, ge=0, le=45, description="largest turn in plane")
    shift: float = Field(0.04, ge=0, le=0.5, description="largest shift in plane, as a share of the side")
    scale: float = Field(0.05, ge=0, le=0.5, description="largest change of size, as a share")
    intensity: float = Field(0.05, ge=0, le=1, description="largest shift of brightness, as a share of the range")
    contrast: float = Field(0.1, ge=0, le=0.9, description="largest change of gamma, as a share")
    noise: float = Field(0.02, ge=0, le=1, description="largest standard deviation of noise, as a share of the range")
    probability: float = Field(0.8, ge=0, le=1, description="of each of affine, brightness, contrast and noise")


def augment(images: np.ndarray, seed: int, config: AugmentConfig | None = None) -> np.ndarray:
    """A changed copy of one study's model input, uint8 (S, 3, H, W); all its slices and channels move alike.

    ``seed`` decides everything random: the same seed gives the same picture in every process. Raises :class:`DataError`
    ``not-model-input`` for another type or shape.
    """
    if images.dtype != np.uint8 or images.ndim != 4:
        text = f"model input is uint8 (S, 3, H, W), not {images.dtype} {images.shape}"
        raise DataError(text, reason="not-model-input")
    import torch

    slices, channels, height, width = images.shape
    steps = _steps(config or AugmentConfig(), height, width)
    planes = torch.from_numpy(np.array(images)).reshape(slices * channels, height, width).float() / 255
    with _ONE_AT_A_TIME:
        steps.set_random_state(seed=seed % 2**32)
        changed = torch.as_tensor(steps(planes)).reshape(slices, channels, height, width)
    return np.asarray(changed.mul(255).round().clamp(0, 255).to(torch.uint8).numpy())


def sample_seed(seed: int, *parts: object) -> int:
    """A seed for one use of one sample, such as ``sample_seed(seed, round, step, update, visit.visit_id)``."""
    text = "\x1f".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@lru_cache(maxsize=4)
def _steps(config: AugmentConfig, height: int, width: int) -> Compose:
    from monai.transforms import Compose, RandAdjustContrast, RandAffine, RandGaussianNoise, RandShiftIntensity

    p = config.probability
    return Compose(
        [
            RandAffine(
                prob=p,
                rotate_range=math.radians(config.rotation_deg),
                translate_range=[config.shift * height, config.shift * width],
                scale_range=(config.scale, config.scale),
                mode="bilinear",
                padding_mode="zeros",
            ),
            RandShiftIntensity(offsets=config.intensity, prob=p),
            RandAdjustContrast(prob=p, gamma=(1 - config.contrast, 1 + config.contrast)),
            RandGaussianNoise(prob=p, std=config.noise),
        ]
    )
