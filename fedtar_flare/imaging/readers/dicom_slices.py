"""The slices (frames) of a CT series in a DICOM file: geometry, rescale, pixel storage, and values in HU."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydicom.dataset import Dataset
from pydicom.uid import UID

from fedtar_flare.core.errors import DataError
from fedtar_flare.imaging.limits import check_size, check_time
from fedtar_flare.imaging.readers.decoders import Layout, decoded, layout_of
from fedtar_flare.imaging.readers.dicom_files import Header, Source
from fedtar_flare.imaging.readers.dicom_tags import decimal, decimals, first, integer, text, text_of, words
from fedtar_flare.imaging.readers.volume import AIR_HU, INT16, Note, check_spacing, to_int16, unlike_neighbours

PROJECTIONS = {"MIP", "MINIP", "MAX_IP", "MIN_IP", "PROJECTION IMAGE", "AVERAGE", "MEAN_IP", "VOLUME RENDERING"}
CAPTURES = {"SCREEN SAVE", "DOSE_INFO", "SCREENSHOT", "REPORT"}
LOCALIZERS = {"LOCALIZER", "SCOUT", "TOPOGRAM", "SURVIEW"}
"""Words of ImageType: of projections, of pictures of a screen, of scouts."""
SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"  # beginning of SOPClassUIDs
IMAGES = {f"1.2.840.10008.5.1.4.1.1.2{end}" for end in ("", ".1", ".2")}  # CT images; one without pixels was cut
LOSSLESS = {f"1.2.840.10008.1.2.{end}" for end in ("5", "4.57", "4.70", "4.80", "4.90", "4.92", "4.201", "4.202")}

PADDING_BELOW_HU = -900  # A padding value above this is ignored: it would wipe out tissue
OTHER_UNITS = ("OD", "MGML", "Z_EFF", "ED", "EDW", "PCT")  # RescaleType (PS3.3, C.11.1.1.2) of no attenuation
TEXTS = {
    "padding": "padding set to air",
    "padding-in-tissue": "a padding value within the range of tissue was ignored",
    "unused-bits": "bits above BitsStored were masked",
    "clipped": "values beyond 16 bits were clipped",
    "lossy": "lossy compression",
    "rescale-type": "RescaleType is not HU",
}


class NotASlice(DataError):
    """A file that is no slice of a volume and can be left out; any other error refuses its series."""


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """One slice of a CT series; directions and positions are LPS."""

    source: Source
    frame: int
    series_uid: str
    study_uid: str
    patient_id: str
    sop_uid: str
    acquisition: str
    image_type: tuple[str, ...]
    kernel: str
    size: tuple[int, int]
    spacing: tuple[float, float]  # between rows and between columns, mm
    position: np.ndarray  # centre of the first voxel, mm
    row: np.ndarray  # unit vector along a row
    column: np.ndarray  # unit vector along a column
    thickness: float | None
    number: int | None  # InstanceNumber; None where the file has none, or several frames
    location: float | None  # SliceLocation, mm from anywhere
    step_mm: float | None  # distance between slices as the header states it, else their thickness
    slope: float | None  # from stored value to HU, with the intercept; None where the file has none
    intercept: float | None
    rescale_type: str
    syntax: UID
    layout: Layout
    padding: tuple[int, int] | None  # lowest and highest stored value that mark "no image here"
    lossy: bool
    feet_first: bool  # the patient lay so, and slices may be seen from the head

    @property
    def normal(self) -> np.ndarray:
        """Unit vector across the slice."""
        return np.cross(self.row, self.column)


def slices_of(header: Header) -> list[Slice]:
    """Read the slices of a file: one, or one for each frame of an enhanced multi-frame CT."""
    dataset, name = header.dataset, header.source.name
    image_type = words(dataset, "ImageType")
    _check_kind(header, image_type)
    frames = list(_frames(dataset, name))
    layout, syntax = layout_of(header, len(frames)), header.syntax
    if layout.bits_stored <= 8:
        raise DataError(f"{name}: {layout.bits_stored}-bit values cannot hold Hounsfield units", reason="lossy-8bit")
    if layout.bits_allocated not in (16, 32):
        raise DataError(f"{name}: values of {layout.bits_allocated} bits, not 16 or 32", reason="bad-header")
    common: dict[str, Any] = {
        "source": header.source,
        "series_uid": first(dataset, "SeriesInstanceUID"),
        "study_uid": first(dataset, "StudyInstanceUID"),
        "patient_id": text_of(dataset, "PatientID"),
        "acquisition": first(dataset, "AcquisitionNumber"),
        "image_type": image_type,
        "size": layout[:2],
        "syntax": syntax,
        "layout": layout,
        "padding": padding_of(dataset, name, layout),
        "feet_first": first(dataset, "PatientPosition").startswith("FF"),
        "lossy": first(dataset, "LossyImageCompression") == "01" or (syntax.is_encapsulated and syntax not in LOSSLESS),
    }
    sop_uid = first(dataset, "SOPInstanceUID") or name
    return [
        Slice(frame=i, sop_uid=f"{sop_uid}/{i}" if i else sop_uid, **common, **_geometry(frame, name))
        for i, frame in enumerate(frames)
    ]


def _check_kind(header: Header, image_type: tuple[str, ...]) -> None:
    dataset, name = header.dataset, header.source.name
    modality, sop_class = first(dataset, "Modality"), first(dataset, "SOPClassUID")
    if not header.has_pixels:
        of_ct = modality == "CT" and (sop_class in IMAGES or "Rows" in dataset)
        an_image = of_ct or not (sop_class and modality)
        kind = DataError if an_image else NotASlice
        raise kind(f"{name}: a DICOM object without pixel data (modality '{modality}')", reason="no-pixel-data")
    if sop_class.startswith(SECONDARY_CAPTURE) or CAPTURES & set(image_type):
        raise NotASlice(f"{name}: a secondary capture (a picture of a screen)", reason="secondary-capture")
    if modality != "CT":
        raise NotASlice(f"{name}: modality '{modality}' is not CT", reason="not-ct")
    if LOCALIZERS & set(image_type):
        raise NotASlice(f"{name}: a localizer", reason="localizer")
    if integer(dataset, "SamplesPerPixel", name, 1) != 1:
        raise NotASlice(f"{name}: a colour image", reason="secondary-capture")


def padding_of(dataset: Dataset, name: str, layout: Layout) -> tuple[int, int] | None:
    """Lowest and highest padding value; files write them signed or unsigned, whatever the pixels are."""
    low = integer(dataset, "PixelPaddingValue", name, None)
    if low is None:
        return None
    high = integer(dataset, "PixelPaddingRangeLimit", name, low)
    bits = layout.bits_allocated
    least = -(1 << (bits - 1)) if layout.signed else 0
    low, high = sorted((value - least) % (1 << bits) + least for value in (low, high))
    return low, high


def _frames(dataset: Dataset, name: str) -> Iterator[Dataset]:
    """One dataset per frame: the file's own or, for enhanced CT, shared and per-frame groups merged."""
    if "PerFrameFunctionalGroupsSequence" not in dataset:
        if integer(dataset, "NumberOfFrames", name, 1) > 1:
            raise DataError(f"{name}: several frames without a position of each", reason="no-position")
        yield dataset
        return
    shared = list(dataset.get("SharedFunctionalGroupsSequence") or [])
    for item in dataset.PerFrameFunctionalGroupsSequence:
        frame = Dataset()
        for keyword in ("ConvolutionKernel", "SliceThickness", "SpacingBetweenSlices"):
            if keyword in dataset:
                frame[keyword] = dataset[keyword]
        for groups in (*shared, item):
            for group in groups:
                if group.VR == "SQ" and len(group.value) == 1:
                    frame.update(group.value[0])
        yield frame


def _geometry(frame: Dataset, name: str) -> dict[str, Any]:
    spacing = decimals(frame, "PixelSpacing", 2, name)
    if spacing is None or min(spacing) <= 0:
        raise DataError(f"{name}: no usable pixel spacing ({spacing})", reason="no-pixel-spacing")
    check_spacing(name, *spacing)
    position = decimals(frame, "ImagePositionPatient", 3, name)
    if position is None:
        raise DataError(f"{name}: no position (ImagePositionPatient) to put the slice in order", reason="no-position")
    orientation = decimals(frame, "ImageOrientationPatient", 6, name)
    if orientation is None:
        raise DataError(f"{name}: no orientation (ImageOrientationPatient)", reason="no-orientation")
    row, column = np.array(orientation[:3]), np.array(orientation[3:])
    lengths = float(np.linalg.norm(row)), float(np.linalg.norm(column))
    if max(abs(lengths[0] - 1), abs(lengths[1] - 1), abs(float(row @ column))) > 0.01:
        text = f"{name}: orientation {orientation} is not two perpendicular unit vectors"
        raise DataError(text, reason="no-orientation")
    row /= lengths[0]
    column -= row * float(row @ column)
    column /= np.linalg.norm(column)
    thickness = decimal(frame, "SliceThickness", name)
    return {
        "kernel": first(frame, "ConvolutionKernel"),
        "spacing": spacing,
        "position": np.array(position),
        "row": row,
        "column": column,
        "thickness": thickness,
        "number": None if (number := _if_readable(frame, "InstanceNumber")) is None else int(number),
        "location": _if_readable(frame, "SliceLocation"),
        "step_mm": abs(decimal(frame, "SpacingBetweenSlices", name) or thickness or 0) or None,
        "slope": decimal(frame, "RescaleSlope", name),
        "intercept": decimal(frame, "RescaleIntercept", name),
        "rescale_type": first(frame, "RescaleType"),
    }


def _if_readable(frame: Dataset, keyword: str) -> float | None:
    """A number that is only compared; None where it cannot be read."""
    try:
        number = float(text(frame, keyword))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def read_hu(slices: Sequence[Slice]) -> tuple[np.ndarray, list[Note]]:
    """Decode and rescale to int16 (z, y, x) in the given order; the notes name what was altered.

    Padding becomes air (-1,024 HU); bits above BitsStored are masked (old overlays live there).
    """
    rows, columns = slices[0].size
    check_size(slices[0].source.name, "voxels", len(slices) * rows * columns)
    volume = np.empty((len(slices), *slices[0].size), np.int16)
    seen: Counter[str] = Counter()
    files: dict[str, list[int]] = {}  # indices of the slices of each file
    for i, slice_ in enumerate(slices):
        files.setdefault(slice_.source.name, []).append(i)
    for name, indices in files.items():
        first, frames = slices[indices[0]], [slices[i].frame for i in indices]
        pixels = decoded(first.source, first.syntax, first.layout, frames, masked=False)
        for i, raw in zip(indices, pixels, strict=True):
            check_time(name)
            seen.update(_to_hu(raw, slices[i], volume[i]))
    notes = [Note(reason, f"{TEXTS[reason]} in {n} of {len(slices)} slices") for reason, n in seen.items()]
    pairs = {(slice_.slope, slice_.intercept) for slice_ in slices}
    if len(pairs) > 1:
        notes.append(Note("mixed-rescale", f"{len(pairs)} pairs of RescaleSlope and RescaleIntercept in one series"))
    compressed = any(slice_.syntax.is_encapsulated for slice_ in slices)
    if compressed and (unlike := unlike_neighbours(volume)):
        names = ", ".join(slices[i].source.name for i in unlike[:5])
        text = f"{len(unlike)} slice(s) unlike both neighbours, damaged when compressed or copied? {names}"
        notes.append(Note("unlike-neighbours", text))
    return volume, notes


def _to_hu(raw: np.ndarray, slice_: Slice, out: np.ndarray) -> list[str]:
    """Fill ``out`` and return each kind of finding once (a key of ``TEXTS``)."""
    layout, bounds, slope, intercept = slice_.layout, slice_.padding, slice_.slope, slice_.intercept
    notes = []
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
    if slice_.lossy:
        notes.append("lossy")
    low, high = int(raw.min()), int(raw.max())
    padding = None
    if bounds is not None and low <= bounds[1] and high >= bounds[0]:
        where = (raw >= bounds[0]) & (raw <= bounds[1])
        if where.any():
            believed = max(value * slope for value in bounds) + intercept < PADDING_BELOW_HU
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
