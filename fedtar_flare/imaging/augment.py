"""Changes of prepared images: random ones in training, by MONAI's transforms, and a simulated site's own.

The latter are for collections that are divided over sites (``fedtar data partition``), whose images come from the same
machines; FedMRG's paper gives each of its clients such a change.
"""

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.transform_list import Spec

_ONE_AT_A_TIME = threading.Lock()  # MONAI's transforms keep their random state in themselves


def augment(images: np.ndarray, seed: int, transforms: Sequence[Spec]) -> np.ndarray:
    """A changed copy of one study's model input, uint8 (S, 3, H, W); all its slices and channels move alike.

    ``seed`` decides all chance, alike in every process. ``transforms`` are of :data:`.transform_list.RANDOM` and
    see float32 (3 S, H, W) in [0, 1].
    """
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


BLUR, CONTRAST, BRIGHTNESS = 1.0, 0.4, 0.15
"""Largest changes: Gaussian sigma (pixels), natural logarithm of the factor, share of the range of pixels."""


@dataclass(frozen=True)
class SiteChange:
    """``clip(mean + contrast * (blurred - mean) + brightness)``, with the mean of the whole image."""

    blur: float  # sigma in pixels, within a slice
    contrast: float  # factor, above 0
    brightness: float  # of pixels in [0, 1]

    def __call__(self, prepared: Prepared) -> Prepared:
        """The same image (uint8, S, 3, H, W) as this site's machine shows it."""
        from scipy.ndimage import gaussian_filter

        pixels = prepared.image.astype(np.float32)
        if self.blur:
            pixels = gaussian_filter(pixels, (0, 0, self.blur, self.blur), mode="nearest")
        mean = pixels.mean()
        changed = mean + self.contrast * (pixels - mean) + 255 * self.brightness
        return replace(prepared, image=np.clip(np.rint(changed), 0, 255).astype(np.uint8))


def change_of(site: str, seed: int, strength: float) -> SiteChange:
    """A site's change; of ``strength`` 0 it changes nothing, of 1 it is drawn evenly within the largest changes."""
    digest = hashlib.sha256(f"image change\x1f{seed}\x1f{site}".encode()).digest()
    blur, contrast, brightness = np.random.default_rng(list(digest)).uniform((0, -1, -1), 1) * strength
    return SiteChange(BLUR * float(blur), math.exp(CONTRAST * float(contrast)), BRIGHTNESS * float(brightness))
