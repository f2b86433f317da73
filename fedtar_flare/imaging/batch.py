"""Prepared images of several visits, and of their earlier visits, as one batch of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedtar_flare.imaging.cache import Prepared

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
