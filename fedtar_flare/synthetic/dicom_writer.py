"""Write a CT volume as a DICOM series (CT Image Storage, explicit VR little endian), one file per slice.

Everything in the files follows from the arguments: unique identifiers are hashes of the content, so the same call
writes the same bytes. The files carry every attribute of type 1 and 2 that the CT Image IOD asks for.
"""

from __future__ import annotations

import hashlib
import struct
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedtar_flare.core.errors import DataError
from fedtar_flare.core.files import read_yaml

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_SERIES = read_yaml(Path(__file__).with_name("ct_series.yaml"), "attributes of a CT series")
LOWEST_HU = -1024  # the intercept of the stored values, which have twelve bits


def content_uid(*parts: object) -> str:
    """A unique identifier (``2.25.`` and a 128-bit number) that depends on the parts alone."""
    digest = bytearray(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x80  # UUID version 8 (custom), variant of RFC 9562
    digest[8] = digest[8] & 0x3F | 0x80
    return f"2.25.{int.from_bytes(digest, 'big')}"


def write_ct_series(
    folder: Path,
    hu: np.ndarray,
    spacing_mm: tuple[float, float, float],
    *,
    patient_id: str,
    study_datetime: datetime,
    age: float | None = None,
    sex: Literal["F", "M"] | None = None,
    kernel: str = "STANDARD",
    seed: int = 0,
) -> list[Path]:
    """Write one axial series from whole Hounsfield units (z, y, x), feet to head; returns its files in this order.

    y rises to the back, x to the patient's left; ``seed`` enters the identifiers, to keep two cohorts apart.
    """
    from pydicom.filebase import DicomBytesIO
    from pydicom.filewriter import write_dataset, write_file_meta_info
    from pydicom.uid import UID

    if not 1 <= len(patient_id) <= 64 or "\\" in patient_id:
        text = f"patient id {patient_id!r} must have 1 to 64 characters, none a backslash"
        raise DataError(text, reason="wrong-patient-id")
    slices, rows, columns = hu.shape
    dz, dy, dx = spacing_mm
    origin_mm = (-(columns - 1) / 2 * dx, -(rows - 1) / 2 * dy, -(slices - 1) / 2 * dz)
    stored = np.ascontiguousarray(hu.astype(np.int32) - LOWEST_HU).astype("<u2")
    study_uid = content_uid("study", seed, patient_id, study_datetime.isoformat())
    pixels = hashlib.sha256(stored.tobytes()).hexdigest()
    series_uid = content_uid("series", study_uid, pixels, spacing_mm, origin_mm, kernel)

    header = _header(spacing_mm, study_datetime, study_uid, series_uid)
    header.Rows, header.Columns = rows, columns
    header.PatientID = patient_id
    header.PatientName = f"{patient_id[:60]}^"
    header.PatientSex = sex or ""
    if age is not None:
        header.PatientAge = f"{int(age):03d}Y"
    header.ConvolutionKernel = kernel

    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    tags = (0x00080018, 0x00200013, 0x00200032, 0x00201041, 0x7FE00010)  # what differs from slice to slice
    between = []  # encoded once
    for begin, end in zip((0, *tags), tags, strict=False):
        encoded = DicomBytesIO()
        encoded.is_little_endian, encoded.is_implicit_VR = True, False
        write_dataset(encoded, header[begin:end])
        between.append(encoded.getvalue())
    for k in range(slices):
        uid = content_uid("instance", series_uid, k)
        x, y, z = (_decimal(value) for value in (*origin_mm[:2], origin_mm[2] + k * dz))
        header.file_meta.MediaStorageSOPInstanceUID = UID(uid)
        values = (uid, f"{k + 1}", f"{x}\\{y}\\{z}", z, stored[k].tobytes())
        file = DicomBytesIO()
        file.write(b"\0" * 128 + b"DICM")
        write_file_meta_info(file, header.file_meta)
        for shared, tag, vr, value in zip(between, tags, ("UI", "IS", "DS", "DS", "OW"), values, strict=True):
            content = value.encode() if isinstance(value, str) else value  # explicit VR little endian: PS3.5, 7.1.2
            content += (b"\0" if vr in ("UI", "OW") else b" ") * (len(content) % 2)
            length = struct.pack("<xxI" if vr == "OW" else "<H", len(content))
            file.write(shared + struct.pack("<HH", tag >> 16, tag & 0xFFFF) + vr.encode() + length + content)
        files.append(folder / f"{k + 1:04d}.dcm")
        files[-1].write_bytes(file.getvalue())
    return files


def _decimal(value: float) -> str:
    """A DICOM decimal string (at most 16 characters) at a precision of 0.1 micrometre."""
    return f"{value:.4f}".rstrip("0").rstrip(".") if value else "0"


def _header(spacing_mm: tuple[float, float, float], acquired: datetime, study_uid: str, series_uid: str) -> Dataset:
    """The elements that all slices share, except the patient's and the size."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import UID, CTImageStorage, ExplicitVRLittleEndian

    header = Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.MediaStorageSOPClassUID = CTImageStorage
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.file_meta.ImplementationClassUID = UID(content_uid("implementation", "fedtar_flare"))
    header.file_meta.ImplementationVersionName = "FEDTAR_FLARE"
    for keyword, value in _SERIES.items():
        setattr(header, keyword, value)
    for name in ("Study", "Series", "Acquisition", "Content"):
        setattr(header, f"{name}Date", f"{acquired:%Y%m%d}")
        setattr(header, f"{name}Time", f"{acquired:%H%M%S}")
    header.SliceThickness = header.SpacingBetweenSlices = _decimal(spacing_mm[0])
    header.StudyInstanceUID = study_uid
    header.SeriesInstanceUID = series_uid
    header.FrameOfReferenceUID = content_uid("frame of reference", series_uid)
    header.PixelSpacing = [_decimal(spacing_mm[1]), _decimal(spacing_mm[2])]
    header.RescaleIntercept = str(LOWEST_HU)
    return header
