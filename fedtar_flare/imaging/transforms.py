"""MONAI transforms from a CT volume or a radiograph to what the encoder sees; usable in any ``Compose``.

Those for CT never resample the volume: slices are picked, windowed and shrunk in plane, which takes tenths of a second.
What they do is in :mod:`.planes`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.imaging.planes import HUWindows, as_slice, lung_slices, to_square


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
            out[key], out["position_mm"], out["pixel_mm"] = lung_slices(*array_and_affine(out[key]), self.slices)
        return out


def array_and_affine(volume: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values and affine of a ``MetaTensor``; raises :class:`DataError` ``not-a-volume`` for anything else."""
    if not isinstance(volume, MetaTensor):
        raise DataError("a CT volume needs its affine; load it with LoadImaged", reason="not-a-volume")
    return volume.as_tensor().numpy(), np.asarray(volume.affine, np.float64)


class HUWindowsd(MapTransform):
    """Hounsfield units (S, H, W) to uint8 (S, C, H, W), as :class:`.planes.HUWindows`."""

    def __init__(self, keys: KeysCollection, windows: Sequence[tuple[float, float]]):
        super().__init__(keys)
        self._to_channels = HUWindows(windows)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            out[key] = self._to_channels(np.asarray(out[key]))
        return out


class SquareResized(MapTransform):
    """Fit the last two axes of a uint8 array into a black square, as :func:`.planes.to_square`.

    ``pixel_mm`` holds the distance between rows and between columns; pixels are square where it is missing.
    """

    def __init__(self, keys: KeysCollection, size: int):
        super().__init__(keys)
        if size < 1:
            raise ConfigError(f"size must be at least 1, not {size}")
        self.size = size

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            out[key] = to_square(np.asarray(out[key]), self.size, out.get("pixel_mm", (1.0, 1.0)))
        return out


class PictureToSliced(MapTransform):
    """Picture uint8 (1 or 3, H, W) to one slice (1, 3, H, W), one channel three times; ``position_mm`` is 0."""

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            out[key] = as_slice(np.asarray(out[key]))
            out["position_mm"] = np.zeros(1, np.float32)
        return out
