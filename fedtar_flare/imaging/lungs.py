"""Where the lungs are in a CT volume, and which slices sample them evenly in millimetres."""

from __future__ import annotations

import numpy as np

BODY_HU = -400
"""Air and lung lie below, the body above."""
COARSE_MM = 3.0
MIN_AREA_CM2 = 15.0
MIN_SHARE = 0.1
MIN_RANGE_MM = 60.0


def lung_range(hu: np.ndarray, spacing_mm: tuple[float, float, float]) -> tuple[int, int]:
    """First and last slice of the lungs.

    Air that the body encloses within a slice is mostly lung. Slices count while its area is at least a tenth of the
    largest slice's: that keeps the tips and leaves out windpipe and bowel gas. Where no lungs are found (another part
    of the body, an unusual field of view), the whole volume is the range.

    ``hu`` is (z, y, x) in Hounsfield units with z along the body's axis; the spacing is along z, y, x.
    """
    steps = [max(1, round(COARSE_MM / step)) for step in spacing_mm[1:]]
    voxels = _enclosed_air(hu[:, :: steps[0], :: steps[1]])
    area = voxels * (steps[0] * spacing_mm[1] * steps[1] * spacing_mm[2] / 100)
    whole = 0, len(hu) - 1
    if area.max() < MIN_AREA_CM2:
        return whole
    peak = int(area.argmax())
    low_air = np.flatnonzero(area < max(MIN_SHARE * area[peak], MIN_AREA_CM2 / 2))
    first = int(low_air[low_air < peak].max(initial=-1)) + 1
    last = int(low_air[low_air > peak].min(initial=len(hu))) - 1
    return (first, last) if (last - first + 1) * spacing_mm[0] >= MIN_RANGE_MM else whole


def _enclosed_air(hu: np.ndarray) -> np.ndarray:
    """For each slice, the number of air voxels that the body encloses within it."""
    from scipy import ndimage

    in_plane = np.zeros((3, 3, 3), bool)
    in_plane[1] = ndimage.generate_binary_structure(2, 1)
    labels, count = ndimage.label(hu < BODY_HU, in_plane)
    inside = np.ones(count + 1, bool)
    inside[0] = False
    for edge in (labels[:, 0], labels[:, -1], labels[:, :, 0], labels[:, :, -1]):
        inside[edge.ravel()] = False
    return inside[labels].sum(axis=(1, 2))


def sample_slices(first: int, last: int, spacing_mm: float, slices: int) -> tuple[np.ndarray, np.ndarray]:
    """Slices nearest to the middles of equal parts of a range, ends included; a short range repeats some.

    Gives their indices (S,), ascending, and their positions float32 (S,) in mm from the middle of the range.
    """
    middles = first - 0.5 + (np.arange(slices) + 0.5) * (last - first + 1) / slices
    indices = np.clip(np.ceil(middles - 0.5).astype(int), first, last)
    return indices, ((indices - (first + last) / 2) * spacing_mm).astype(np.float32)
