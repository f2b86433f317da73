"""Values and geometry of what the CT reader accepts, DICOM and NIfTI."""

from __future__ import annotations

import tracemalloc

import nibabel
import numpy as np
import pytest
from broken import rle
from make_dicom import ORIGIN, SPACING, another_series, chest, enhanced_dataset, put, write_series
from pydicom.dataset import Dataset
from pydicom.uid import ExplicitVRBigEndian, ImplicitVRLittleEndian, generate_uid

from fedtar_flare.imaging.readers.ct import read_ct

Z = ORIGIN[2]
AFFINE = np.array(
    [
        [-SPACING[2], 0, 0, -ORIGIN[0]],
        [0, -SPACING[1], 0, -ORIGIN[1]],
        [0, 0, SPACING[0], ORIGIN[2]],
        [0, 0, 0, 1],
    ]
)


def reasons(volume):
    return [note.reason for note in volume.warnings]


def test_values_order_and_geometry(tmp_path):
    hu = write_series(tmp_path / "study" / "deep" / "er")
    (tmp_path / "study" / "notes.txt").write_text("not DICOM")
    volume = read_ct(tmp_path / "study")
    assert volume.hu.dtype == np.int16 and np.array_equal(volume.hu, hu)
    assert volume.spacing_mm == pytest.approx(SPACING)
    assert volume.affine == pytest.approx(AFFINE)
    assert volume.series_uid == "1.2.3.4" and volume.warnings == ()


def big_endian(ds, i):
    ds.PixelData = np.frombuffer(ds.PixelData, "<u2").astype(">u2").tobytes()
    ds.file_meta.TransferSyntaxUID = ExplicitVRBigEndian


def implicit(ds, i):
    ds.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian


@pytest.mark.parametrize("edit", [implicit, big_endian, rle])
def test_transfer_syntaxes(tmp_path, edit):
    hu = write_series(tmp_path, edit=edit)
    assert np.array_equal(read_ct(tmp_path).hu, hu)


HU = chest()
SIGNED = {"PixelRepresentation": 1, "BitsStored": 16, "HighBit": 15}


def fractions(ds, i):
    """The rescale differs from slice to slice."""
    raw = (HU[i].astype(np.int32) * 2 + 1 + 2 * i).astype("<i2")
    put(RescaleSlope=0.5, RescaleIntercept=-0.5 - i, PixelData=raw.tobytes(), **SIGNED)(ds)


def padded(written):
    """The padding value is written signed or not, whatever the pixels are."""

    def edit(ds, i):
        raw = np.frombuffer(ds.PixelData, "<u2").astype("<i2").reshape(ds.Rows, ds.Columns).copy()
        raw[:3] = -2000
        ds.add_new("PixelPaddingValue", "SS" if written < 0 else "US", written)
        put(PixelData=raw.tobytes(), **SIGNED)(ds)

    return edit


def overlay(ds, i):
    """In a bit above the stored ones, as of old."""
    raw = np.frombuffer(ds.PixelData, "<u2").copy()
    raw[::3] |= 0x8000
    ds.PixelData = raw.tobytes()


def far_beyond(ds, i):
    raw = np.full((ds.Rows, ds.Columns), i * 60 + 5, "<u2")
    put(BitsStored=16, HighBit=15, RescaleSlope=100, PixelData=raw.tobytes())(ds)


WATER, PADDED = HU.copy(), HU.copy()
WATER[:, 5:9], PADDED[:, :3] = 0, -1024
BEYOND = np.broadcast_to(np.clip((np.arange(12) * 60 + 5) * 100 - 1024, None, 32767)[:, None, None], HU.shape)


@pytest.mark.parametrize(
    "hu, edit, expected, noted",
    [
        (HU, fractions, HU, "mixed-rescale"),
        (HU, far_beyond, BEYOND, "clipped"),
        (HU, padded(63536), PADDED, "padding"),
        (HU, padded(-2000), PADDED, "padding"),
        (WATER, put(PixelPaddingValue=1024), WATER, "padding-in-tissue"),
        (HU, overlay, HU, "unused-bits"),
    ],
)
def test_stored_values_and_what_is_noted(tmp_path, hu, edit, expected, noted):
    write_series(tmp_path, hu, edit=edit)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, expected) and reasons(volume) == [noted]


@pytest.mark.parametrize(
    "orientation, direction",
    [
        ([1, 0, 0, 0, 0, -1], [0, 1, 0]),  # coronal
        ([0, 1, 0, 0, 0, -1], [-1, 0, 0]),  # sagittal
        ([-1, 0, 0, 0, -1, 0], [0, 0, 1]),  # prone
        ([0.8, 0.6, 0, -0.6, 0.8, 0], [0, 0, 1]),  # turned in plane
        ([1, 0, 0, 0, 0.8, -0.6], [0, 0.6, 0.8]),  # oblique
    ],
)
def test_affine_maps_every_slice_to_its_own_position(tmp_path, orientation, direction):
    def turn(ds, i):
        ds.ImageOrientationPatient = orientation
        ds.ImagePositionPatient = (np.array(ORIGIN) + np.array(direction) * SPACING[0] * i).tolist()

    hu = write_series(tmp_path, edit=turn)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu)
    lps = np.diag([-1, -1, 1, 1]) @ volume.affine
    for i in (0, 5, 11):
        assert lps @ [0, 0, i, 1] == pytest.approx([*(np.array(ORIGIN) + np.array(direction) * SPACING[0] * i), 1])
    along_row = np.array(orientation[:3]) * SPACING[2]
    assert lps[:3, 0] == pytest.approx(along_row) and lps[:3, 1] == pytest.approx(
        np.array(orientation[3:]) * SPACING[1]
    )


def test_slices_given_from_head_to_feet_are_turned(tmp_path):
    hu = write_series(
        tmp_path, edit=lambda ds, i: put(ImagePositionPatient=[*ORIGIN[:2], Z + (11 - i) * SPACING[0]])(ds)
    )
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu[::-1]) and volume.affine == pytest.approx(AFFINE)


def test_rounded_positions_are_an_even_grid(tmp_path):
    write_series(tmp_path, edit=lambda ds, i: put(ImagePositionPatient=[*ORIGIN[:2], round(Z + i * 0.625, 1)])(ds))
    assert read_ct(tmp_path).spacing_mm[0] == pytest.approx(0.625, abs=0.01)


def test_two_acquisitions_at_the_same_places(tmp_path):
    hu = write_series(tmp_path)

    def phase(ds, i):
        ds.AcquisitionNumber, ds.SOPInstanceUID = 2, generate_uid()
        return Dataset() if i == 11 else None

    write_series(tmp_path, hu[::-1], edit=phase, prefix="b")
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and reasons(volume) == ["several-acquisitions"]


def test_localizers_captures_and_objects_without_image_are_left_out(tmp_path):
    left_out = (
        put(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]),
        put(SOPClassUID="1.2.840.10008.5.1.4.1.1.7"),
        put(Modality="SR", PixelData=None, Rows=None),
    )
    hu = write_series(tmp_path)
    for n, change in enumerate(left_out):
        edit = lambda ds, i, n=n, change=change: (another_series(ds, n), change(ds))[1] if i < 2 else Dataset()  # noqa: E731
        write_series(tmp_path, edit=edit, prefix=f"x{n}")
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu)
    assert reasons(volume) == ["localizer", "no-pixel-data", "secondary-capture"]


def test_enhanced_multiframe(tmp_path):
    hu = chest()
    order = np.random.default_rng(1).permutation(len(hu))
    enhanced_dataset(hu, order).save_as(tmp_path / "enhanced.dcm", enforce_file_format=True)
    volume = read_ct(tmp_path / "enhanced.dcm")
    assert np.array_equal(volume.hu, hu) and volume.affine == pytest.approx(AFFINE)


def test_one_slice_takes_its_spacing_from_the_header(tmp_path):
    write_series(tmp_path, chest(1))
    volume = read_ct(tmp_path / "000.dcm", 1)
    assert volume.hu.shape == (1, 24, 20) and volume.spacing_mm == pytest.approx(SPACING)


@pytest.mark.parametrize("kind", ["raw", "rle", "nifti"])
def test_a_volume_is_held_in_memory_once(tmp_path, kind):
    path, hu = tmp_path / "s", chest(40, (96, 96))
    write_series(path, hu, edit=rle if kind == "rle" else lambda ds, i: None)
    if kind == "nifti":
        image = nibabel.Nifti1Image(hu.transpose(2, 1, 0), AFFINE)
        image.header.set_slope_inter(1, 0.25)
        path = tmp_path / "v.nii"
        nibabel.save(image, path)
    read_ct(path)  # what is imported once
    tracemalloc.start()
    volume = read_ct(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert volume.hu.nbytes <= peak < 1.5 * volume.hu.nbytes


TURNED = np.array([[0, -0.7, 0, 5], [0.8, 0, 0, 6], [0, 0, 2.5, 7], [0, 0, 0, 1]])


def save(path, values, affine=TURNED, edit=lambda image: None):
    image = nibabel.Nifti1Image(values, affine)
    edit(image)
    nibabel.save(image, path)
    return path


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz"])
def test_values_and_geometry_in_any_orientation(tmp_path, name):
    hu = chest()
    volume = read_ct(save(tmp_path / name, hu.transpose(2, 1, 0)))
    assert volume.hu.dtype == np.int16 and np.array_equal(volume.hu, hu)
    assert volume.affine == pytest.approx(TURNED) and volume.spacing_mm == pytest.approx((2.5, 0.7, 0.8))


def test_scaling_is_applied_and_values_that_are_no_number_become_air(tmp_path):
    def scale(image):
        image.header.set_slope_inter(2, -1000)

    hu = chest()
    volume = read_ct(save(tmp_path / "i.nii", hu.transpose(2, 1, 0), edit=scale))
    assert np.array_equal(volume.hu, hu.astype(int) * 2 - 1000)
    floats = hu.transpose(2, 1, 0).astype(np.float32)
    floats[0, 0, 0] = np.nan
    volume = read_ct(save(tmp_path / "f.nii", floats))
    assert volume.hu[0, 0, 0] == -1024 and [note.reason for note in volume.warnings] == ["not-finite"]
    assert np.array_equal(volume.hu.ravel()[1:], hu.ravel()[1:])
