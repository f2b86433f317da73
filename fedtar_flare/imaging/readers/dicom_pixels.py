"""Stored pixel values of CT slices to Hounsfield units in int16."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedtar_flare.core.errors import DataError
from fedtar_flare.imaging.limits import check_size, check_time
from fedtar_flare.imaging.readers.decoders import decoded
from fedtar_flare.imaging.readers.dicom_slices import Slice
from fedtar_flare.imaging.readers.volume import AIR_HU, INT16, Note, to_int16, unlike_neighbours

PADDING_BELOW_HU = -900  # A padding value above this is ignored: it would wipe out tissue
OTHER_UNITS = ("OD", "MGML", "Z_EFF", "ED", "EDW", "PCT")
"""Values of RescaleType (DICOM PS3.3, C.11.1.1.2) under which values are no attenuation."""


def read_hu(slices: Sequence[Slice]) -> tuple[np.ndarray, list[Note]]:
    """Decode and rescale to int16 (z, y, x) in the given order; the notes name what was altered.

    Padding becomes air (-1,024 HU); bits above BitsStored are masked (old overlays live there); values that do not fit
    int16 are clipped. Raises :class:`DataError` ``no-rescale``, ``truncated``, ``undecodable``,
    ``too-large`` or ``too-slow``.
    """
    rows, columns = slices[0].size
    check_size(slices[0].source.name, "voxels", len(slices) * rows * columns)
    volume = np.empty((len(slices), *slices[0].size), np.int16)
    seen: Counter[str] = Counter()
    files: dict[str, list[int]] = {}  # indices of the slices of each file
    for i, slice_ in enumerate(slices):
        files.setdefault(slice_.source.name, []).append(i)
    for name, places in files.items():
        first, frames = slices[places[0]], [slices[i].frame for i in places]
        pixels = decoded(first.source, first.storage.syntax, first.storage.layout, frames, masked=False)
        for i, raw in zip(places, pixels, strict=True):
            check_time(name)
            seen.update(_to_hu(raw, slices[i], volume[i]))
    notes = [Note(reason, f"{TEXTS[reason]} in {n} of {len(slices)} slices") for reason, n in seen.items()]
    pairs = {(slice_.slope, slice_.intercept) for slice_ in slices}
    if len(pairs) > 1:
        notes.append(Note("mixed-rescale", f"{len(pairs)} pairs of RescaleSlope and RescaleIntercept in one series"))
    compressed = any(slice_.storage.syntax.is_encapsulated for slice_ in slices)
    if compressed and (unlike := unlike_neighbours(volume)):
        names = ", ".join(slices[i].source.name for i in unlike[:5])
        text = f"{len(unlike)} slice(s) unlike both neighbours, damaged when compressed or copied? {names}"
        notes.append(Note("unlike-neighbours", text))
    return volume, notes


TEXTS = {
    "padding": "padding set to air",
    "padding-in-tissue": "a padding value within the range of tissue was ignored",
    "unused-bits": "bits above BitsStored were masked",
    "clipped": "values beyond 16 bits were clipped",
    "lossy": "lossy compression",
    "rescale-type": "RescaleType is not HU",
}


def _to_hu(raw: np.ndarray, slice_: Slice, out: np.ndarray) -> list[str]:
    """Fill ``out`` and return each kind of finding once (a key of ``TEXTS``)."""
    store, layout, notes = slice_.storage, slice_.storage.layout, []
    slope, intercept = slice_.slope, slice_.intercept
    if slope is None or intercept is None:
        text = f"{slice_.source.name}: no RescaleSlope and RescaleIntercept, so that the values' unit is unknown"
        raise DataError(text, reason="no-rescale")
    if slope == 0:
        raise DataError(f"{slice_.source.name}: RescaleSlope is 0", reason="no-rescale")
    if slice_.rescale_type in OTHER_UNITS:
        text = f"{slice_.source.name}: values of the unit {slice_.rescale_type}, not Hounsfield units"
        raise DataError(text, reason="not-hounsfield")
    if slice_.rescale_type not in ("", "HU"):
        notes.append("rescale-type")
    if store.lossy:
        notes.append("lossy")
    low, high = int(raw.min()), int(raw.max())
    padding = None
    if store.padding is not None and low <= store.padding[1] and high >= store.padding[0]:
        where = (raw >= store.padding[0]) & (raw <= store.padding[1])
        if where.any():
            believed = max(value * slope for value in store.padding) + intercept < PADDING_BELOW_HU
            notes.append("padding" if believed else "padding-in-tissue")
            if believed:
                padding = where
                raw = np.where(where, raw.dtype.type(0), raw)
                low, high = int(raw.min()), int(raw.max())
    floor = -(1 << (layout.bits_stored - 1)) if layout.signed else 0
    if layout.bits_stored < layout.bits_allocated and not floor <= low <= high < floor + (1 << layout.bits_stored):
        notes.append("unused-bits")
        shift = layout.bits_allocated - layout.bits_stored
        raw = (raw << shift) >> shift
        low, high = int(raw.min()), int(raw.max())
    edges = sorted((low * slope + intercept, high * slope + intercept))
    fits = INT16.min <= edges[0] and edges[1] <= INT16.max
    if fits and slope == 1 and intercept.is_integer() and abs(intercept) <= INT16.max:
        np.add(raw.astype(np.int16, copy=False), np.int16(intercept), out=out)  # wraps there and back again: exact
    else:
        if not fits:
            notes.append("clipped")
        out[:] = to_int16(raw * np.float64(slope) + intercept)
    if padding is not None:
        out[padding] = AIR_HU
    return notes
