"""From a CT volume to model input: slices sampled over the lungs, three HU windows as channels.

The array functions are the work; the MONAI ``MapTransform`` s below wrap them, so that a hospital can put its own
steps between. Only the chosen slices are resized, never the whole volume: that is what makes it fast.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.config import KeysCollection
from monai.transforms import MapTransform

from fedtar_flare.errors import ConfigError, DataError

AIR_LIMIT_HU = -400
AIR_FILL_HU = -1024
Windows = Sequence[tuple[float, float]]


def lung_range(hu: np.ndarray) -> tuple[int, int]:
    """First and last slice of the lungs: where air lies inside the body.

    Args:
        hu: int16 (z, y, x).

    Returns:
        indices, both included; the whole volume when no lung is found.
    """
    from scipy.ndimage import label

    step = max(1, hu.shape[1] // 96)
    areas = np.zeros(len(hu))
    for i, plane in enumerate(hu[:, ::step, ::step]):
        parts, _ = label(plane < AIR_LIMIT_HU)
        outside = np.unique(np.concatenate([parts[0], parts[-1], parts[:, 0], parts[:, -1]]))
        areas[i] = np.count_nonzero(parts) - np.count_nonzero(np.isin(parts, outside[outside > 0]))
    most = int(areas.argmax())
    if areas[most] < 0.02 * hu[0, ::step, ::step].size:
        return 0, len(hu) - 1
    lungs = areas > 0.1 * areas[most]
    first = most - int(np.argmin(lungs[most::-1])) + 1 if not lungs[: most + 1].all() else 0
    last = most + int(np.argmin(lungs[most:])) - 1 if not lungs[most:].all() else len(hu) - 1
    return first, last


def choose_slices(hu: np.ndarray, spacing_z_mm: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Slices spread evenly over the lungs, each the middle of an equal part.

    Args:
        hu: int16 (z, y, x), z towards the head.
        spacing_z_mm: slice distance.
        count: S; a volume with fewer slices repeats some.

    Returns:
        indices (S,), rising, and positions (S,) in mm from the middle of the lungs towards the head, float32.
    """
    first, last = lung_range(hu)
    places = first - 0.5 + (np.arange(count) + 0.5) * (last - first + 1) / count
    indices = np.clip(np.rint(places), first, last).astype(int)
    positions = (indices - (first + last) / 2) * spacing_z_mm
    return indices, positions.astype(np.float32)


def resize_square(planes: np.ndarray, size: int, fill: float, pixel_mm: tuple[float, float] = (1.0, 1.0)) -> np.ndarray:
    """Pad to a square in millimetres around the centre, then average down (or interpolate up) to size x size.

    Args:
        planes: (S, y, x).
        size: H and W.
        fill: value of the padding.
        pixel_mm: distance of pixels along y and x; where they differ, the plane is stretched to equal ones.

    Returns:
        float32 (S, size, size).
    """
    tensor = torch.from_numpy(np.ascontiguousarray(planes)).float()
    height, width = planes.shape[1] * pixel_mm[0], planes.shape[2] * pixel_mm[1]
    longest = max(height, width)
    target = (max(1, round(size * height / longest)), max(1, round(size * width / longest)))
    shrinks = target[0] <= planes.shape[1] and target[1] <= planes.shape[2]
    small = torch.nn.functional.interpolate(
        tensor[:, None], size=target, **({"mode": "area"} if shrinks else {"mode": "bilinear", "align_corners": False})
    )[:, 0]
    top, left = (size - target[0]) // 2, (size - target[1]) // 2
    result = torch.full((len(planes), size, size), float(fill))
    result[:, top : top + target[0], left : left + target[1]] = small
    return result.numpy()


def hu_windows(planes: np.ndarray, windows: Windows) -> np.ndarray:
    """HU windows as channels: level and width to 0..255.

    Args:
        planes: (S, H, W) in HU.
        windows: (level, width) per channel.

    Returns:
        uint8 (S, C, H, W).
    """
    channels = [np.clip((planes - (level - width / 2)) * (255.0 / width), 0, 255) for level, width in windows]
    return np.rint(np.stack(channels, 1)).astype(np.uint8)


class LungSlicesd(MapTransform):
    """Sample S slices over the lungs and resize them; a volume (1, x, y, z) in LPS becomes (S, H, W) in HU.

    Args:
        keys: of the volumes.
        slices: S.
        image_size: H and W.
        position_key: where the positions (S,) in mm are put.
    """

    def __init__(self, keys: KeysCollection, slices: int, image_size: int, position_key: str = "position_mm"):
        super().__init__(keys)
        if slices < 1 or image_size < 8:
            raise ConfigError(f"slices ({slices}) must be at least 1 and image_size ({image_size}) at least 8")
        self.slices, self.image_size, self.position_key = slices, image_size, position_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Apply to all keys."""
        result = dict(data)
        for key in self.key_iterator(result):
            volume = result[key]
            spacing = np.linalg.norm(np.asarray(volume.affine, dtype=float)[:3, :3], axis=0)
            hu = np.asarray(volume)[0].transpose(2, 1, 0)
            if hu.ndim != 3 or 0 in hu.shape:
                raise DataError(f"a volume of shape {np.asarray(volume).shape} has no slices", reason="empty-volume")
            indices, positions = choose_slices(hu, float(spacing[2]), self.slices)
            pixel = (float(spacing[1]), float(spacing[0]))
            result[key] = resize_square(hu[indices], self.image_size, AIR_FILL_HU, pixel)
            result[self.position_key] = positions
        return result


class HUWindowsd(MapTransform):
    """HU windows as channels: (S, H, W) in HU becomes uint8 (S, C, H, W).

    Args:
        keys: of the sampled slices.
        windows: (level, width) per channel.
    """

    def __init__(self, keys: KeysCollection, windows: Windows):
        super().__init__(keys)
        self.windows = [(float(level), float(width)) for level, width in windows]
        if not self.windows or any(width <= 0 for _, width in self.windows):
            raise ConfigError(f"windows {windows} must be (level, width) pairs with positive widths")

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Apply to all keys."""
        result = dict(data)
        for key in self.key_iterator(result):
            result[key] = hu_windows(result[key], self.windows)
        return result
