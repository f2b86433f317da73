"""Random changes of training images by MONAI's transforms, which one seed decides."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.transform_list import Spec

_ONE_AT_A_TIME = threading.Lock()  # MONAI's transforms keep their random state in themselves


def augment(images: np.ndarray, seed: int, transforms: Sequence[Spec]) -> np.ndarray:
    """A changed copy of one study's model input, uint8 (S, 3, H, W); all its slices and channels move alike.

    ``seed`` decides everything random, alike in every process. ``transforms`` are of :data:`.transform_list.RANDOM` and
    see float32 (3 S, H, W) in [0, 1]. Raises :class:`DataError` ``not-model-input`` for another type or shape.
    """
    if images.dtype != np.uint8 or images.ndim != 4:
        text = f"model input is uint8 (S, 3, H, W), not {images.dtype} {images.shape}"
        raise DataError(text, reason="not-model-input")
    import torch

    from fedtar_flare.imaging.transforms import composed

    steps = composed(transforms)
    planes = torch.from_numpy(np.array(images)).flatten(0, 1).float() / 255
    with _ONE_AT_A_TIME:
        steps.set_random_state(seed=seed % 2**32)
        changed = torch.as_tensor(steps({"image": planes})["image"]).reshape(images.shape)
    return np.asarray(changed.mul(255).round().clamp(0, 255).to(torch.uint8).numpy())


def sample_seed(seed: int, *parts: object) -> int:
    """A seed for one use of one sample, such as ``sample_seed(seed, round, step, update, visit.visit_id)``."""
    text = "\x1f".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
