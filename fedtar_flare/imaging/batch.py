"""Prepared images of several visits, and what is shown of the visits before, as one batch of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedtar_flare.imaging.cache import Prepared


@dataclass
class PriorBatch:
    """What is shown of the visits before B visits; a row whose masks are False everywhere shows nothing."""

    days: torch.Tensor  # float32 (B,), time between the visits, at least 0
    images: "ImageBatch | None" = None
    input_ids: torch.Tensor | None = None  # int64 (B, L), tokens of the reports, padded on the right
    text_mask: torch.Tensor | None = None  # bool (B, L), False at padding
    reports: tuple[str | None, ...] | None = None  # what the tokens spell, None in a row that shows no report
    earlier: "PriorBatch | None" = None  # what is shown of the visits before these

    def to(self, device: torch.device | str) -> "PriorBatch":
        images = None if self.images is None else self.images.to(device)
        ids, mask = (None if part is None else part.to(device) for part in (self.input_ids, self.text_mask))
        earlier = None if self.earlier is None else self.earlier.to(device)
        return PriorBatch(self.days.to(device), images, ids, mask, self.reports, earlier)


@dataclass
class ImageBatch:
    """Images of B visits."""

    images: torch.Tensor  # uint8 (B, S, 3, H, W), as prepared; the encoder normalises them
    position_mm: torch.Tensor  # float32 (B, S), along the body's axis
    slice_mask: torch.Tensor  # bool (B, S), False where a visit has fewer slices than the longest
    prior: PriorBatch | None = None  # None: nothing is shown of any visit before

    def to(self, device: torch.device | str) -> "ImageBatch":
        prior = None if self.prior is None else self.prior.to(device)
        return ImageBatch(self.images.to(device), self.position_mm.to(device), self.slice_mask.to(device), prior)


def collate(prepared: Sequence[Prepared]) -> ImageBatch:
    """Stack prepared images, at least one; those with fewer slices are padded with zeros and masked."""
    slices = max(item.image.shape[0] for item in prepared)
    images = np.zeros((len(prepared), slices, *prepared[0].image.shape[1:]), np.uint8)
    positions = np.zeros((len(prepared), slices), np.float32)
    mask = np.zeros((len(prepared), slices), bool)
    for i, item in enumerate(prepared):
        n = item.image.shape[0]
        images[i, :n], positions[i, :n], mask[i, :n] = item.image, item.position_mm, True
    return ImageBatch(torch.from_numpy(images), torch.from_numpy(positions), torch.from_numpy(mask))
