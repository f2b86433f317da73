"""Small DICOM files for the tests, written with pydicom alone (never with the writer of the package)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
from pydicom import uid as uids
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate

SPACING = (2.5, 0.8, 0.7)
ORIGIN = (-11.0, -22.0, -33.0)
Edit = Callable[[Dataset, int], "Dataset | None"]


def chest(slices: int = 12, size: tuple[int, int] = (24, 20)) -> np.ndarray:
    """HU (z, y, x): no two voxels' neighbourhoods alike, with air, tissue and bone; body in the middle slices."""
    rng = np.random.default_rng(7)
    hu = rng.integers(-1024, 1500, (slices, *size)).astype(np.int16)
    hu[:, 0, 0] = np.arange(slices) * 10 - 900
    return hu


def _image(sop_class: str, uid: str, modality: str, values: np.ndarray, bits: int) -> Dataset:
    """A grey image of unsigned values in 16 bits."""
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = uids.ExplicitVRLittleEndian
    ds.file_meta.MediaStorageSOPClassUID = ds.SOPClassUID = sop_class
    ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID = uid
    ds.Modality, ds.SamplesPerPixel, ds.PhotometricInterpretation = modality, 1, "MONOCHROME2"
    ds.Rows, ds.Columns = values.shape[-2:]
    ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.PixelRepresentation = 16, bits, bits - 1, 0
    ds.PixelData = values.astype("<u2").tobytes()
    return ds


def slice_dataset(hu: np.ndarray, i: int, spacing: tuple[float, float, float] = SPACING) -> Dataset:
    """One CT slice of a series: 12 unsigned bits, intercept -1024."""
    ds = _image(uids.CTImageStorage, f"1.2.3.4.{i + 1}", "CT", hu.astype(np.int32) + 1024, 12)
    ds.PatientID = "P"
    ds.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    ds.StudyInstanceUID, ds.SeriesInstanceUID, ds.AcquisitionNumber = "1.2.3", "1.2.3.4", 1
    ds.ConvolutionKernel, ds.SliceThickness = "B31f", spacing[0]
    ds.ImagePositionPatient = [ORIGIN[0], ORIGIN[1], ORIGIN[2] + i * spacing[0]]
    ds.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    ds.PixelSpacing = [spacing[1], spacing[2]]
    ds.RescaleIntercept, ds.RescaleSlope = -1024, 1
    return ds


def write_series(
    folder: Path,
    hu: np.ndarray | None = None,
    *,
    edit: Edit = lambda ds, i: None,
    prefix: str = "",
    spacing: tuple[float, float, float] = SPACING,
) -> np.ndarray:
    """Write a series under file names whose order says nothing; gives the HU volume of an unchanged one.

    ``edit`` changes the dataset of slice i; returning an empty dataset leaves the slice out.
    """
    hu = chest() if hu is None else hu
    folder.mkdir(parents=True, exist_ok=True)
    for i, plane in enumerate(hu):
        ds = slice_dataset(plane, i, spacing)
        kept = edit(ds, i)
        if kept is None or len(kept):
            private = ds.file_meta.TransferSyntaxUID.is_private
            encoding = {"implicit_vr": False, "little_endian": True} if private else {}
            (kept or ds).save_as(folder / f"{prefix}{name_of(i, len(hu))}", enforce_file_format=True, **encoding)
    return hu


def name_of(i: int, slices: int = 12) -> str:
    """The file of slice i in :func:`write_series`."""
    return f"{np.random.default_rng(3).permutation(slices)[i]:03d}.dcm"


def put(**values) -> Edit:
    """An edit that sets attributes; None leaves one out."""

    def edit(ds, i=0):
        for keyword, value in values.items():
            if value is None:
                ds.pop(keyword, None)
            else:
                setattr(ds, keyword, value)

    return edit


def of(**values) -> Dataset:
    """A dataset of these attributes."""
    put(**values)(ds := Dataset())
    return ds


def only(at: int, edit: Edit) -> Edit:
    """An edit of one slice alone."""
    return lambda ds, i: edit(ds, i) if i == at else None


def then(*edits: Edit) -> Edit:
    """An edit of several, the last of which says whether the slice is written."""
    return lambda ds, i: [edit(ds, i) for edit in edits][-1]


def drop(*gone: int) -> Edit:
    """An edit that leaves slices out."""
    return lambda ds, i: Dataset() if i in gone else None


def another_series(number: int) -> Edit:
    """An edit that makes slices those of another series of the same study."""

    def edit(ds, i):
        ds.SeriesInstanceUID = f"1.2.3.{number}"
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uids.generate_uid()

    return edit


def enhanced_dataset(hu: np.ndarray, order) -> Dataset:
    """One multi-frame file of a whole volume, its frames in the given order."""
    ds = slice_dataset(hu[0], 0)
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = uids.EnhancedCTImageStorage
    moved = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "RescaleSlope", "RescaleIntercept")
    put(**dict.fromkeys(moved))(ds, 0)
    shared, plane, measures, values = Dataset(), Dataset(), Dataset(), Dataset()
    plane.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    measures.PixelSpacing, measures.SliceThickness = [SPACING[1], SPACING[2]], SPACING[0]
    values.RescaleSlope, values.RescaleIntercept, values.RescaleType = 1, -1024, "HU"
    shared.PlaneOrientationSequence, shared.PixelMeasuresSequence = [plane], [measures]
    shared.PixelValueTransformationSequence = [values]
    ds.SharedFunctionalGroupsSequence, ds.PerFrameFunctionalGroupsSequence = [shared], []
    for i in order:
        frame, place = Dataset(), Dataset()
        place.ImagePositionPatient = [ORIGIN[0], ORIGIN[1], ORIGIN[2] + int(i) * SPACING[0]]
        frame.PlanePositionSequence = [place]
        ds.PerFrameFunctionalGroupsSequence.append(frame)
    ds.NumberOfFrames = len(hu)
    ds.PixelData = (hu[order].astype(np.int32) + 1024).astype("<u2").tobytes()
    return ds


def write_radiograph(path: Path, values: np.ndarray, bits: int = 12, **changes) -> Path:
    """A DX file of unsigned stored values; ``changes`` as in :func:`put`."""
    ds = _image(uids.DigitalXRayImageStorageForPresentation, "1.2.3", "DX", values, bits)
    ds.ViewPosition = "PA"
    put(**changes)(ds, 0)
    meaning = {"MONOCHROME1": "INVERSE", "MONOCHROME2": "IDENTITY"}.get(ds.get("PhotometricInterpretation"))
    if meaning and "PresentationLUTShape" not in changes:
        ds.PresentationLUTShape = meaning
    ds.save_as(path, enforce_file_format=True)
    return path


ENCODERS = {
    uids.JPEGLosslessSV1: imagecodecs.ljpeg_encode,  # not of the library that decodes
    uids.JPEGLSLossless: imagecodecs.jpegls_encode,
    uids.JPEG2000Lossless: partial(imagecodecs.jpeg2k_encode, reversible=True, codecformat="j2k"),
    uids.HTJ2KLossless: partial(imagecodecs.htj2k_encode, reversible=True),  # nor this one
}


def encode(ds: Dataset, syntax: str) -> None:
    """Put the pixels, 16 bits each, into a transfer syntax, in place."""
    if syntax == uids.RLELossless:
        ds.compress(syntax, generate_instance_uid=False)
        return
    values = np.frombuffer(ds.PixelData, "<u2").reshape(ds.Rows, ds.Columns)
    if syntax in ENCODERS:
        ds.PixelData = encapsulate([ENCODERS[syntax](values)])
        ds["PixelData"].VR, ds["PixelData"].is_undefined_length = "OB", True
    elif syntax == uids.ExplicitVRBigEndian:
        ds.PixelData = values.astype(">u2").tobytes()
    ds.file_meta.TransferSyntaxUID = syntax


def encoded(syntax: str) -> Edit:
    """An edit that puts the pixels into a transfer syntax."""
    return lambda ds, i=0: encode(ds, syntax)


def trunk(slices=30, size=64):
    """HU (z, y, x): a body with lungs in slices 6 to 24."""
    y, x = np.mgrid[:size, :size] / (size - 1) * 2 - 1
    hu = np.full((slices, size, size), -1000, np.int16)
    hu[:, (x / 0.9) ** 2 + (y / 0.7) ** 2 < 1] = 40
    hu[6:25, ((abs(x) - 0.4) / 0.3) ** 2 + (y / 0.45) ** 2 < 1] = -850
    hu[:, -20:, :4] = -1000
    hu[:, 12:16, 40:44] = 1500  # marks front and the patient's left
    return hu
