"""Pictures that occur under several patients, found by comparing small versions of images.

Copies of a radiograph or CT (compressed again, resized, in another window) correlate above :data:`SAME`; images of two
people did not. ``docs/reference/image-readers.md`` has the figures, and says why it is no perceptual hash.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedtar_flare.imaging import cache

logger = logging.getLogger(__name__)
SIDE = 32  # rows and columns of a small version
SLICES = 3  # slices of a CT that are compared, evenly spaced
SAME = 0.98  # rank correlation from which two small versions show the same picture
BLOCK = 256  # images compared with all others at once


def miniature(planes: Sequence[np.ndarray]) -> np.ndarray:
    """Rank the grey values of an image's slices (uint8 (H, W)), which windows and gamma curves hardly change."""
    from PIL import Image, ImageOps

    chosen = np.unique(np.linspace(0, len(planes) - 1, SLICES + 2)[1:-1].round().astype(int))
    fine = (8 * SIDE, 8 * SIDE)  # first: at the coarse size the black margins of a copy could differ by a row
    small = [ImageOps.pad(Image.fromarray(planes[i]), fine, Image.Resampling.BOX).reduce(8) for i in chosen]
    values = np.asarray(small).ravel()
    counts = np.bincount(values, minlength=256)
    ranks = (np.cumsum(counts) - counts / 2)[values] - len(values) / 2
    return (ranks / max(float(np.linalg.norm(ranks)), 1e-6)).astype(np.float32)


def shared_pictures(miniatures: Sequence[np.ndarray], patients: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Find pictures that different patients share."""
    if not miniatures:
        return
    stacked, patient = np.stack(miniatures), np.unique(patients, return_inverse=True)[1]
    for start in range(0, len(stacked), BLOCK):
        rows = slice(start, start + BLOCK)
        alike = (stacked[rows] @ stacked[start:].T > SAME) & (patient[rows, None] != patient[None, start:])
        yield from ((start + int(i), start + int(j)) for i, j in np.argwhere(np.triu(alike, 1)))


def linked(pairs: Iterable[tuple[str, str]]) -> tuple[frozenset[str], ...]:
    """Join pairs of patients who share a picture to groups."""
    groups: list[frozenset[str]] = []
    for pair in pairs:
        joined = [group for group in groups if not group.isdisjoint(pair)]
        groups = [*(group for group in groups if group not in joined), frozenset(pair).union(*joined)]
    return tuple(groups)


@lru_cache(maxsize=8)
def linked_patients(prepared: tuple[tuple[str, Path], ...]) -> tuple[frozenset[str], ...]:
    """:func:`linked` of patients and the cache entries of their images; computed once in a process."""
    patients, miniatures = [], []
    for patient, entry in prepared:
        file = cache.computed_path(entry, "miniature")
        if (small := cache.load_computed(file)) is None and (image := cache.load(entry)) is not None:
            cache.store_computed(file, small := miniature(list(image.image[:, 0])))
        if small is not None:
            patients.append(patient)
            miniatures.append(small)
    pairs = shared_pictures(miniatures, patients)
    if groups := linked((patients[i], patients[j]) for i, j in pairs):
        text = "%d patients share a picture, and so a split ('fedtar data check' names them)"
        logger.warning(text, sum(map(len, groups)))
    return groups
