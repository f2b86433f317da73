"""MONAI transforms from a CT volume or a radiograph to what the encoder sees; usable in any ``Compose``.

Those for CT never resample the volume: slices are picked, windowed and shrunk in plane, which takes tenths of a second.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform
from torch.nn.functional import interpolate

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.imaging.lungs import lung_range, sample_slices
from fedtar_flare.imaging.readers.volume import to_int16

PLANES_AT_ONCE = 6
"""Planes shrunk together: few enough to stay in the processor's cache."""
DISPLAY_AXES = ("S", "P", "L")
"""Slices from feet to head; in a slice, rows from front to back and columns from the patient's right to the left."""


class LungSlicesd(MapTransform):
    """Volume to S slices that sample the lungs evenly in millimetres, in the same orientation for every volume.

    Input: (1, X, Y, Z) or (X, Y, Z) Hounsfield units with an affine (``MetaTensor``). Output: int16 (S, H, W), feet to
    head; under ``position_mm`` float32 (S,) from the middle of the lungs, positive towards the head; under ``pixel_mm``
    the distance between rows and between columns. A range with fewer than S slices repeats some.
    Raises :class:`DataError` ``not-a-volume`` for another shape or a volume without an affine.
    """

    def __init__(self, keys: KeysCollection, slices: int = 16):
        super().__init__(keys)
        if slices < 1:
            raise ConfigError(f"slices must be at least 1, not {slices}")
        self.slices = slices

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            hu, spacing = displayed(out[key])
            first, last = lung_range(hu, spacing)
            choice = sample_slices(first, last, spacing[0], self.slices)
            out[key] = to_int16(hu[choice.indices])
            out["position_mm"], out["pixel_mm"] = choice.position_mm, spacing[1:]
        return out


def displayed(volume: Any) -> tuple[np.ndarray, tuple[float, float, float]]:
    """A view of the volume as (feet to head, front to back, right to left), and its spacing in mm along these."""
    import nibabel.orientations as nio

    if not isinstance(volume, MetaTensor):
        raise DataError("a CT volume needs its affine; load it with LoadImaged", reason="not-a-volume")
    affine = np.asarray(volume.affine, np.float64)
    array = volume.as_tensor().numpy()
    array = array[0] if array.ndim == 4 and array.shape[0] == 1 else array
    if array.ndim != 3:
        raise DataError(f"a CT volume has three axes, not the shape {array.shape}", reason="not-a-volume")
    turn = nio.ornt_transform(nio.io_orientation(affine), nio.axcodes2ornt(DISPLAY_AXES))
    sizes = np.linalg.norm(affine[:3, :3], axis=0)
    z, y, x = (float(sizes[int(np.flatnonzero(turn[:, 0] == axis)[0])]) for axis in range(3))
    return nio.apply_orientation(array, turn), (z, y, x)


class HUWindowsd(MapTransform):
    """Hounsfield units (S, H, W) to uint8 (S, C, H, W): each (level, width) window is a channel, black to white."""

    def __init__(self, keys: KeysCollection, windows: Sequence[tuple[float, float]]):
        super().__init__(keys)
        if not windows or any(width <= 0 for _, width in windows):
            raise ConfigError(f"windows are (level, width) with a positive width, not {windows}")
        values = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.float32)
        self._tables = [
            np.rint(np.clip((values - (level - width / 2)) * (255 / width), 0, 255)).astype(np.uint8)
            for level, width in windows
        ]

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            hu = np.ascontiguousarray(to_int16(np.asarray(out[key]))).view(np.uint16)
            out[key] = np.stack([self._channels(plane) for plane in hu])
        return out

    def _channels(self, plane: np.ndarray) -> np.ndarray:
        places = plane.astype(np.intp)
        return np.stack([table.take(places, mode="clip") for table in self._tables])  # clip: no check of each place


class SquareResized(MapTransform):
    """Fit the last two axes of a uint8 array into a black square of side ``size``, keeping the aspect ratio.

    Averages over areas when shrinking, interpolates linearly when enlarging. ``pixel_mm`` holds the distance between
    rows and between columns; pixels are square where it is missing.
    """

    def __init__(self, keys: KeysCollection, size: int):
        super().__init__(keys)
        if size < 1:
            raise ConfigError(f"size must be at least 1, not {size}")
        self.size = size

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            out[key] = _to_square(np.asarray(out[key]), self.size, out.get("pixel_mm", (1.0, 1.0)))
        return out


def _to_square(pictures: np.ndarray, size: int, pixel_mm: tuple[float, float]) -> np.ndarray:
    *front, rows, columns = pictures.shape
    extent = rows * pixel_mm[0], columns * pixel_mm[1]
    height, width = (max(1, round(size * side / max(extent))) for side in extent)
    shrinks = height <= rows and width <= columns
    how: dict[str, Any] = {"mode": "area"} if shrinks else {"mode": "bilinear", "antialias": True}
    planes = torch.from_numpy(pictures.reshape(-1, 1, rows, columns))
    out = np.zeros((len(planes), size, size), np.uint8)
    top, left = (size - height) // 2, (size - width) // 2
    for i in range(0, len(planes), PLANES_AT_ONCE):
        part = interpolate(planes[i : i + PLANES_AT_ONCE].float(), size=(height, width), **how)
        out[i : i + PLANES_AT_ONCE, top : top + height, left : left + width] = part[:, 0].round().clamp(0, 255).numpy()
    return out.reshape(*front, size, size)


class PictureToSliced(MapTransform):
    """Picture uint8 (1 or 3, H, W) to one slice (1, 3, H, W), one channel three times; ``position_mm`` is 0."""

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            picture = np.asarray(out[key])
            out[key] = np.repeat(picture, 3 // len(picture), axis=0)[None]
            out["position_mm"] = np.zeros(1, np.float32)
        return out
