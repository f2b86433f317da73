"""A blur, a contrast and a brightness of a simulated site's own, the same for all of its images.

For collections that are divided over sites (``fedtar data partition``), whose images come from the same machines;
FedMRG's paper gives each of its clients such a change.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np

from fedtar_flare.imaging.cache import Prepared

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
