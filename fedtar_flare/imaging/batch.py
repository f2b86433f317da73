"""Prepared images of several visits, and of their earlier visits, as one batch of tensors.

They may be changed before: at random in training, and for each simulated site by one change.
"""

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.transform_list import Spec

__all__ = ["ImageBatch", "PriorBatch", "collate"]


@dataclass
class PriorBatch:
    """The previous visits of B visits, as a model may see them; a row without one has False in all its masks."""

    days: torch.Tensor
    """float32 (B,), days between the two visits, at least 0."""
    images: "ImageBatch | None" = None
    """None where the model sees no earlier image."""
    input_ids: torch.Tensor | None = None
    """int64 (B, L), tokens of the reports, padded on the right; None where the model sees no earlier report."""
    text_mask: torch.Tensor | None = None
    """bool (B, L), False at padding."""
    reports: tuple[str | None, ...] | None = None
    """The reports' text, B; None for a row without one."""
    earlier: "PriorBatch | None" = None
    """The visits before these."""

    def to(self, device: torch.device | str) -> "PriorBatch":
        """Copy to a device.

        Parameters
        ----------
        device : torch.device or str

        Returns
        -------
        PriorBatch
        """
        parts = {name: part for name, part in vars(self).items() if part is not None and name != "reports"}
        return replace(self, **{name: part.to(device) for name, part in parts.items()})


@dataclass
class ImageBatch:
    """Images of B visits."""

    images: torch.Tensor
    """uint8 (B, S, 3, H, W), as prepared; the encoder normalises them."""
    position_mm: torch.Tensor
    """float32 (B, S), positions of the slices along the body's axis."""
    slice_mask: torch.Tensor
    """bool (B, S), False where a visit has fewer slices than the longest."""
    prior: PriorBatch | None = None
    """The previous visits; None where the model sees none."""

    def to(self, device: torch.device | str) -> "ImageBatch":
        """Copy to a device.

        Parameters
        ----------
        device : torch.device or str

        Returns
        -------
        ImageBatch
        """
        prior = None if self.prior is None else self.prior.to(device)
        return ImageBatch(self.images.to(device), self.position_mm.to(device), self.slice_mask.to(device), prior)


def collate(prepared: Sequence[Prepared]) -> ImageBatch:
    """Stack prepared images.

    Parameters
    ----------
    prepared : sequence of Prepared
        At least one, all of one height and width.

    Returns
    -------
    ImageBatch
        Visits with fewer slices are padded with zeros and masked.
    """
    slices = max(len(item.image) for item in prepared)
    images = np.zeros((len(prepared), slices, *prepared[0].image.shape[1:]), np.uint8)
    positions = np.zeros((len(prepared), slices), np.float32)
    mask = np.zeros((len(prepared), slices), bool)
    for i, item in enumerate(prepared):
        n = len(item.image)
        images[i, :n], positions[i, :n], mask[i, :n] = item.image, item.position_mm, True
    return ImageBatch(torch.from_numpy(images), torch.from_numpy(positions), torch.from_numpy(mask))


BLUR, CONTRAST, BRIGHTNESS = 1.0, 0.4, 0.15
"""Largest change of a site: Gaussian sigma (pixels), natural logarithm of the factor, share of the range of pixels."""
_LOCK = threading.Lock()  # MONAI's transforms hold their random state in themselves


def augment(images: np.ndarray, seed: int, transforms: Sequence[Spec]) -> np.ndarray:
    """Change the prepared image of one visit, uint8 (S, 3, H, W), at random; all slices and channels change alike."""
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
