"""Stored pixel values of CT slices to Hounsfield units in int16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from pydicom.filereader import read_partial
from pydicom.uid import ExplicitVRBigEndian

from fedtar_flare.errors import DataError, decoding
from fedtar_flare.imaging.limits import check_size, check_time
from fedtar_flare.imaging.readers.decoders import decoded
from fedtar_flare.imaging.readers.dicom_files import PIXEL_TAGS, after_pixels
from fedtar_flare.imaging.readers.dicom_slices import Slice
from fedtar_flare.imaging.readers.neighbours import unlike_neighbours
from fedtar_flare.imaging.readers.volume import AIR_HU, INT16, CTRules, Note, to_int16

PADDING_BELOW_HU = -900
"""A padding value above this is ignored: it would wipe out tissue."""


def read_hu(slices: Sequence[Slice], rules: CTRules) -> tuple[np.ndarray, list[Note]]:
    """Decode and rescale to int16 (z, y, x) in the given order; the notes say what was altered.

    Padding becomes air (-1,024 HU); bits above BitsStored are masked (old overlays live there); values that do not fit
    int16 are clipped. Raises :class:`DataError` ``no-rescale``, ``truncated``, ``undecodable``,
    ``too-large`` or ``too-slow``.
    """
    rows, columns = slices[0].size
    check_size(slices[0].source.name, "voxels", len(slices) * rows * columns)
    volume = np.empty((len(slices), *slices[0].size), np.int16)
    seen: Counter[str] = Counter()
    compressed: dict[str, list[int]] = {}
    for i, slice_ in enumerate(slices):
        check_time(slice_.source.name)
        if slice_.storage.offset is not None:
            seen.update(_to_hu(_in_place(slice_), slice_, rules, volume[i]))
        else:
            compressed.setdefault(slice_.source.name, []).append(i)
    for places in compressed.values():  # file by file: one may hold many slices
        for i, raw in zip(places, _decode([slices[i] for i in places]), strict=True):
            check_time(slices[i].source.name)
            seen.update(_to_hu(raw, slices[i], rules, volume[i]))
    notes = [Note(reason, f"{TEXTS[reason]} in {n} of {len(slices)} slices") for reason, n in seen.items()]
    pairs = {(slice_.slope, slice_.intercept) for slice_ in slices}
    if len(pairs) > 1:
        notes.append(Note("mixed-rescale", f"{len(pairs)} pairs of RescaleSlope and RescaleIntercept in one series"))
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


def _in_place(slice_: Slice) -> np.ndarray:
    store = slice_.storage
    order = ">" if store.syntax == ExplicitVRBigEndian else "<"
    dtype = np.dtype(f"{order}{'i' if store.signed else 'u'}{store.bits_allocated // 8}")
    count = slice_.size[0] * slice_.size[1]
    offset = (store.offset or 0) + slice_.frame * count * dtype.itemsize
    raw = np.fromfile(slice_.source.path, dtype, count, offset=offset)
    if raw.size < count:
        raise DataError(f"{slice_.source.name}: the file ends within its pixels; copy it again", reason="truncated")
    return raw.reshape(slice_.size)


def _decode(slices: Sequence[Slice]) -> Iterator[np.ndarray]:
    """The stored values (rows, columns) of these slices of one file, one by one."""
    name, syntax = slices[0].source.name, slices[0].storage.syntax
    with decoding(f"{name}: the pixels cannot be read", "undecodable"), slices[0].source.open() as file:
        dataset = read_partial(file, stop_when=after_pixels, specific_tags=PIXEL_TAGS, force=True)
    if "PixelData" not in dataset:
        raise DataError(f"{name}: the file ends within its pixels; copy it again", reason="truncated")
    yield from decoded(dataset, syntax, [slice_.frame for slice_ in slices], slices[0].size, name, masked=False)


def _to_hu(raw: np.ndarray, slice_: Slice, rules: CTRules, out: np.ndarray) -> list[str]:
    """Fill ``out`` and return each kind of finding once (a key of ``TEXTS``)."""
    store, met = slice_.storage, []
    slope, intercept = _rescale(slice_, rules)
    if slice_.rescale_type not in ("", "HU"):
        met.append("rescale-type")
    if store.lossy:
        met.append("lossy")
    low, high = int(raw.min()), int(raw.max())
    padding = None
    if store.padding is not None and low <= store.padding[1] and high >= store.padding[0]:
        where = (raw >= store.padding[0]) & (raw <= store.padding[1])
        if where.any():
            believed = max(value * slope for value in store.padding) + intercept < PADDING_BELOW_HU
            met.append("padding" if believed else "padding-in-tissue")
            if believed:
                padding = where
                raw = np.where(where, raw.dtype.type(0), raw)
                low, high = int(raw.min()), int(raw.max())
    floor = -(1 << (store.bits_stored - 1)) if store.signed else 0
    if store.bits_stored < store.bits_allocated and not floor <= low <= high < floor + (1 << store.bits_stored):
        met.append("unused-bits")
        shift = store.bits_allocated - store.bits_stored
        raw = (raw << shift) >> shift
        low, high = int(raw.min()), int(raw.max())
    edges = sorted((low * slope + intercept, high * slope + intercept))
    fits = INT16.min <= edges[0] and edges[1] <= INT16.max
    if fits and slope == 1 and intercept.is_integer() and abs(intercept) <= INT16.max:
        np.add(raw.astype(np.int16, copy=False), np.int16(intercept), out=out)  # wraps there and back again: exact
    else:
        if not fits:
            met.append("clipped")
        out[:] = to_int16(raw * np.float64(slope) + intercept)
    if padding is not None:
        out[padding] = AIR_HU
    return met


def _rescale(slice_: Slice, rules: CTRules) -> tuple[float, float]:
    slope, intercept = slice_.slope, slice_.intercept
    if slope is None or intercept is None:
        if rules.rescale is None:
            raise DataError(
                f"{slice_.source.name}: no RescaleSlope and RescaleIntercept, so that the values' unit is unknown; "
                "state them in the rules (rescale) when you know them",
                reason="no-rescale",
            )
        return float(rules.rescale[0]), float(rules.rescale[1])
    if slope == 0:
        raise DataError(f"{slice_.source.name}: RescaleSlope is 0", reason="no-rescale")
    return slope, intercept
