"""From a volume or a picture in memory to what the encoder sees, with arrays alone.

:mod:`.transforms` offers the same steps to MONAI, whose import takes longer than preparing a study.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.imaging.lungs import lung_range, sample_slices
from fedtar_flare.imaging.readers.volume import to_int16

PLANES_AT_ONCE = 6
"""Planes shrunk together: few enough to stay in the processor's cache."""
DISPLAY_AXES = ("S", "P", "L")
"""Slices from feet to head; in a slice, rows from front to back and columns from the patient's right to the left."""


class LungSlices(NamedTuple):
    """Slices of a volume: Hounsfield units int16 (S, H, W), their places, and the size of a pixel (row, column)."""

    hu: np.ndarray
    position_mm: np.ndarray  # float32 (S,), from the middle of the lungs, positive towards the head
    pixel_mm: tuple[float, float]


def lung_slices(volume: np.ndarray, affine: np.ndarray, slices: int) -> LungSlices:
    """S slices that sample the lungs evenly in millimetres, of a volume (X, Y, Z) whose affine leads to RAS.

    A range with fewer than S slices repeats some. Raises :class:`DataError` as :func:`displayed` does.
    """
    hu, spacing = displayed(volume, affine)
    first, last = lung_range(hu, spacing)
    choice = sample_slices(first, last, spacing[0], slices)
    return LungSlices(to_int16(hu[choice.indices]), choice.position_mm, (spacing[1], spacing[2]))


def displayed(volume: np.ndarray, affine: np.ndarray) -> tuple[np.ndarray, tuple[float, float, float]]:
    """A view of the volume as (feet to head, front to back, right to left), and its spacing in mm along these.

    Raises :class:`DataError` ``not-a-volume`` for another shape than (X, Y, Z) or (1, X, Y, Z).
    """
    import nibabel.orientations as nio

    affine = np.asarray(affine, np.float64)
    array = volume[0] if volume.ndim == 4 and volume.shape[0] == 1 else volume
    if array.ndim != 3:
        raise DataError(f"a CT volume has three axes, not the shape {array.shape}", reason="not-a-volume")
    turn = nio.ornt_transform(nio.io_orientation(affine), nio.axcodes2ornt(DISPLAY_AXES))
    sizes = np.linalg.norm(affine[:3, :3], axis=0)
    z, y, x = (float(sizes[int(np.flatnonzero(turn[:, 0] == axis)[0])]) for axis in range(3))
    return nio.apply_orientation(array, turn), (z, y, x)


class HUWindows:
    """Hounsfield units (S, H, W) to uint8 (S, C, H, W): each (level, width) window is a channel, black to white.

    Raises:
        ConfigError: there is no window, or one without a positive width.
    """

    def __init__(self, windows: Sequence[tuple[float, float]]):
        if not windows or any(width <= 0 for _, width in windows):
            raise ConfigError(f"windows are (level, width) with a positive width, not {windows}")
        values = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.float32)
        self._tables = [
            np.rint(np.clip((values - (level - width / 2)) * (255 / width), 0, 255)).astype(np.uint8)
            for level, width in windows
        ]

    def __call__(self, hu: np.ndarray) -> np.ndarray:
        places = np.ascontiguousarray(to_int16(hu)).view(np.uint16)
        return np.stack([self._channels(plane) for plane in places])

    def _channels(self, plane: np.ndarray) -> np.ndarray:
        places = plane.astype(np.intp)
        return np.stack([table.take(places, mode="clip") for table in self._tables])  # clip: no check of each place


def to_square(pictures: np.ndarray, size: int, pixel_mm: tuple[float, float] = (1.0, 1.0)) -> np.ndarray:
    """The last two axes of a uint8 array fitted into a black square of side ``size``, keeping the aspect ratio.

    Averages over areas when shrinking, interpolates linearly when enlarging. ``pixel_mm`` is the distance between rows
    and between columns.
    """
    import torch
    from torch.nn.functional import interpolate

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


def as_slice(picture: np.ndarray) -> np.ndarray:
    """A picture uint8 (1 or 3, H, W) as one slice (1, 3, H, W); one channel three times."""
    return np.repeat(picture, 3 // len(picture), axis=0)[None]
