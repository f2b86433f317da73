"""A DICOM header as one or more slices (frames) of a CT series: geometry, rescale and pixel storage."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydicom.dataset import Dataset
from pydicom.uid import UID

from fedtar_flare.core.errors import DataError
from fedtar_flare.imaging.readers.decoders import Layout, layout_of
from fedtar_flare.imaging.readers.dicom_files import Header, Source
from fedtar_flare.imaging.readers.dicom_tags import decimal, decimals, first, integer, text, words
from fedtar_flare.imaging.readers.volume import check_spacing

PROJECTIONS = {"MIP", "MINIP", "MAX_IP", "MIN_IP", "PROJECTION IMAGE", "AVERAGE", "MEAN_IP", "VOLUME RENDERING"}
CAPTURES = {"SCREEN SAVE", "DOSE_INFO", "SCREENSHOT", "REPORT"}
LOCALIZERS = {"LOCALIZER", "SCOUT", "TOPOGRAM", "SURVIEW"}
"""Words of ImageType: of projections, of pictures of a screen, of scouts."""
SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
"""Beginning of their SOPClassUIDs."""
IMAGES = {f"1.2.840.10008.5.1.4.1.1.2{end}" for end in ("", ".1", ".2")}
"""CT images: classic, enhanced, and converted to enhanced. Without pixels, such a file was cut."""
LOSSLESS = {f"1.2.840.10008.1.2.{end}" for end in ("5", "4.57", "4.70", "4.80", "4.90", "4.92", "4.201", "4.202")}


class NotASlice(DataError):
    """A file that is no slice of a volume and can be left out; any other error refuses its series."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How the pixel values of a slice lie in its file."""

    syntax: UID
    layout: Layout
    padding: tuple[int, int] | None  # lowest and highest stored value that mark "no image here"
    lossy: bool


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
    storage: Storage

    @property
    def normal(self) -> np.ndarray:
        """Unit vector across the slice."""
        return np.cross(self.row, self.column)


def slices_of(header: Header) -> list[Slice]:
    """Read the slices of a file: one, or one for each frame of an enhanced multi-frame CT.

    Raises :class:`NotASlice` for other objects, :class:`DataError` for a slice that cannot be used.
    """
    dataset, name = header.dataset, header.source.name
    image_type = words(dataset, "ImageType")
    _check_kind(header, image_type)
    frames = list(_frames(dataset, name))
    storage = _storage(header, len(frames))
    common: dict[str, Any] = {
        "source": header.source,
        "series_uid": first(dataset, "SeriesInstanceUID"),
        "study_uid": first(dataset, "StudyInstanceUID"),
        "patient_id": first(dataset, "PatientID"),
        "acquisition": first(dataset, "AcquisitionNumber"),
        "image_type": image_type,
        "size": storage.layout[:2],
        "storage": storage,
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


def _storage(header: Header, frames: int) -> Storage:
    dataset, name, syntax = header.dataset, header.source.name, header.syntax
    layout = layout_of(header, frames)
    if layout.bits_stored <= 8:
        raise DataError(f"{name}: {layout.bits_stored}-bit values cannot hold Hounsfield units", reason="lossy-8bit")
    if layout.bits_allocated not in (16, 32):
        raise DataError(f"{name}: values of {layout.bits_allocated} bits, not 16 or 32", reason="bad-header")
    lossy = first(dataset, "LossyImageCompression") == "01" or (syntax.is_encapsulated and syntax not in LOSSLESS)
    return Storage(syntax, layout, _padding(dataset, name, layout), lossy)


def _padding(dataset: Dataset, name: str, layout: Layout) -> tuple[int, int] | None:
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
