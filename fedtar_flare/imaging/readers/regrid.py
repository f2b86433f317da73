"""Linear interpolation of a stack of slices to a regular grid: gaps, uneven steps, and a tilted gantry."""

from __future__ import annotations

import math

import numpy as np

from fedtar_flare.imaging.readers.volume import AIR_HU


def even(hu: np.ndarray, positions: np.ndarray, spacing: float) -> np.ndarray:
    """Resample slices at rising positions (mm, the first at 0) to an even grid that starts at 0; int16."""
    count = math.floor(float(positions[-1]) / spacing + 1e-3) + 1
    out = np.empty((count, *hu.shape[1:]), np.int16)
    for i in range(count):
        at = min(i * spacing, float(positions[-1]))
        above = min(int(np.searchsorted(positions, at)), len(positions) - 1)
        below = max(above - 1, 0)
        gap = float(positions[above] - positions[below])
        weight = (at - float(positions[below])) / gap if gap else 1.0
        out[i] = np.rint(hu[below] * (1 - weight) + hu[above] * weight)
    return out


def straighten(
    hu: np.ndarray, spacing: float, pixel: tuple[float, float], shear: tuple[float, float]
) -> tuple[np.ndarray, tuple[float, float]]:
    """Undo the drift of slices across their normal, on a canvas that holds all of them.

    Returns the straight volume, and the place of its first voxel relative to the first of ``hu``: mm along x and y.

    Args:
        hu: int16 (z, y, x).
        spacing: between slices, mm.
        pixel: between rows and between columns, mm.
        shear: drift per mm along the normal, in mm along a row (x) and along a column (y).
    """
    from scipy.ndimage import shift

    drift = np.arange(len(hu))[:, None] * spacing * np.array([shear[1] / pixel[0], shear[0] / pixel[1]])  # pixels, y x
    low, high = np.floor(drift.min(axis=0)).astype(int), np.ceil(drift.max(axis=0)).astype(int)
    height, width = (int(n) for n in np.array(hu.shape[1:]) + high - low)
    out = np.full((len(hu), height, width), AIR_HU, np.int16)
    for i, plane in enumerate(hu):
        whole = np.floor(drift[i]).astype(int)
        y, x = whole - low
        padded = np.pad(plane, ((0, 1), (0, 1)), constant_values=AIR_HU).astype(np.float32)
        moved = np.rint(shift(padded, drift[i] - whole, order=1, cval=AIR_HU))
        rows, columns = min(padded.shape[0], height - y), min(padded.shape[1], width - x)
        out[i, y : y + rows, x : x + columns] = moved[:rows, :columns]
    return out, (float(low[1] * pixel[1]), float(low[0] * pixel[0]))
