"""Changes of prepared images: random ones in training, and a fixed one for each simulated site."""

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.transform_list import Spec

BLUR, CONTRAST, BRIGHTNESS = 1.0, 0.4, 0.15
"""Largest change of a site: Gaussian sigma (pixels), natural logarithm of the factor, share of the range of pixels."""
_LOCK = threading.Lock()  # MONAI's transforms hold their random state in themselves


def augment(images: np.ndarray, seed: int, transforms: Sequence[Spec]) -> np.ndarray:
    """Change the prepared image of one visit, uint8 (S, 3, H, W), at random; all slices and channels change alike."""
    import torch

    from fedtar_flare.imaging.transforms import composed

    steps = composed(transforms)
    planes = torch.from_numpy(np.array(images)).flatten(0, 1).float() / 255
    with _LOCK:
        steps.set_random_state(seed=seed % 2**32)
        changed = torch.as_tensor(steps({"image": planes})["image"]).reshape(images.shape)
    return np.asarray(changed.mul(255).round().clamp(0, 255).to(torch.uint8).numpy())


def sample_seed(seed: int, *parts: object) -> int:
    """Derive the seed of one use of one sample."""
    text = "\x1f".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@dataclass(frozen=True)
class SiteChange:
    """``clip(mean + contrast * (blurred - mean) + brightness)``, as FedMRG's paper gives each client such a change."""

    blur: float  # Gaussian sigma in pixels, within a slice
    contrast: float  # factor, above 0
    brightness: float  # added to pixels in [0, 1]

    def __call__(self, prepared: Prepared) -> Prepared:
        """Change an image as this site's machine would show it."""
        from scipy.ndimage import gaussian_filter

        pixels = prepared.image.astype(np.float32)
        if self.blur:
            pixels = gaussian_filter(pixels, (0, 0, self.blur, self.blur), mode="nearest")
        mean = pixels.mean()
        changed = mean + self.contrast * (pixels - mean) + 255 * self.brightness
        return replace(prepared, image=np.clip(np.rint(changed), 0, 255).astype(np.uint8))


def change_of(site: str, seed: int, strength: float) -> SiteChange:
    """Draw the image change of a simulated site."""
    digest = hashlib.sha256(f"image change\x1f{seed}\x1f{site}".encode()).digest()
    blur, contrast, brightness = np.random.default_rng(list(digest)).uniform((0, -1, -1), 1) * strength
    return SiteChange(BLUR * float(blur), math.exp(CONTRAST * float(contrast)), BRIGHTNESS * float(brightness))
