"""What the values themselves tell of damage: neighbouring slices, and neighbouring rows, are alike.

A slice unlike both of its neighbours is what damage may do to a compressed slice that no decoder reports.

Anatomy changes steadily: a voxel lies between those above and below it, or not far outside. How far outside on average
(HU) hardly differs from one slice to the next. Only gross damage raises it; a few wrong voxels remain unseen.
"""

from __future__ import annotations

import numpy as np

from fedtar_flare.errors import DataError

SAMPLE = 4
"""Every fourth row and column is looked at."""
AROUND = 3
"""Slices on either side with which one is compared."""
SWAPPED = 1.5
"""Rows are taken for swapped with columns when rows of the swapped picture are so many times more alike."""
RATIO, LEAST_HU = 2.0, 5.0
"""A slice is told when its mean distance is this many times the largest around it, and this much above it."""


def unlike_neighbours(hu: np.ndarray) -> list[int]:
    """Indices of slices of a volume (z, y, x) that lie far outside the range of their two neighbours."""
    if len(hu) < 2 * AROUND + 1:
        return []
    distance = np.zeros(len(hu))
    below, here = (hu[i, ::SAMPLE, ::SAMPLE].astype(np.int32) for i in (0, 1))
    for i in range(1, len(hu) - 1):
        above = hu[i + 1, ::SAMPLE, ::SAMPLE].astype(np.int32)
        outside = np.maximum(here - np.maximum(below, above), np.minimum(below, above) - here)
        distance[i] = np.maximum(outside, 0).mean()
        below, here = here, above
    found = []
    for i in range(1, len(hu) - 1):
        around = np.concatenate([distance[max(1, i - AROUND) : i], distance[i + 1 : min(len(hu) - 1, i + 1 + AROUND)]])
        if distance[i] > max(RATIO * around.max(), around.max() + LEAST_HU):
            found.append(i)
    return found


def check_shape(hu: np.ndarray, where: str) -> None:
    """Refuse slices whose Rows and Columns are swapped: their rows go on where others end.

    As many pixels are stated as there are, so that nothing else tells. Raises :class:`DataError` ``wrong-pixel-count``.
    """
    _, rows, columns = hu.shape
    if rows == columns or min(rows, columns) < 2:
        return
    planes = hu[:: max(1, len(hu) // 5)].astype(np.int32)
    stated = np.abs(np.diff(planes, axis=1)).mean()
    swapped = np.abs(np.diff(planes.reshape(-1, columns, rows), axis=1)).mean()
    if stated > SWAPPED * swapped:
        text = f"{where}: rows of a picture of {columns} rows and {rows} columns, not of {rows} and {columns}"
        raise DataError(text, reason="wrong-pixel-count")
