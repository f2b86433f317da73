"""Values and geometry of what the CT reader accepts."""

from __future__ import annotations

import tracemalloc

import nibabel
import numpy as np
import pytest
from make_dicom import ORIGIN, SPACING, another_series, chest, enhanced_dataset, put, write_series
from pydicom.dataset import Dataset
from pydicom.uid import ExplicitVRBigEndian, ImplicitVRLittleEndian, RLELossless, generate_uid

from fedtar_flare.imaging.readers.ct import read_ct

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


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRBigEndian, RLELossless])
def test_transfer_syntaxes(tmp_path, syntax):
    def encode(ds, i):
        if syntax == RLELossless:
            ds.compress(RLELossless, generate_instance_uid=False)
        elif syntax == ExplicitVRBigEndian:
            ds.PixelData = np.frombuffer(ds.PixelData, "<u2").astype(">u2").tobytes()
        ds.file_meta.TransferSyntaxUID = syntax

    hu = write_series(tmp_path, edit=encode)
    assert np.array_equal(read_ct(tmp_path).hu, hu)


def test_a_list_of_files(tmp_path):
    hu = write_series(tmp_path)
    assert np.array_equal(read_ct(sorted(tmp_path.iterdir())).hu, hu)


def test_signed_values_rescale_and_fractions(tmp_path):
    hu = chest()

    def store(ds, i):
        ds.PixelRepresentation, ds.BitsStored, ds.HighBit = 1, 16, 15
        ds.RescaleSlope, ds.RescaleIntercept = 0.5, -0.5 - i  # differs from slice to slice
        ds.PixelData = (hu[i].astype(np.int32) * 2 + 1 + 2 * i).astype("<i2").tobytes()

    write_series(tmp_path, hu, edit=store)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and reasons(volume) == ["mixed-rescale"]


def test_values_beyond_16_bits_are_clipped_and_noted(tmp_path):
    def store(ds, i):
        ds.BitsStored, ds.HighBit, ds.RescaleSlope = 16, 15, 100
        ds.PixelData = np.full((ds.Rows, ds.Columns), i * 60 + 5, "<u2").tobytes()

    write_series(tmp_path, edit=store)
    volume = read_ct(tmp_path)
    assert volume.hu.max() == 32767 and volume.hu[0, 0, 0] == -524 and "clipped" in reasons(volume)


@pytest.mark.parametrize("written", [63536, -2000])
def test_padding_becomes_air(tmp_path, written):
    def pad(ds, i):
        raw = np.frombuffer(ds.PixelData, "<u2").astype("<i2").reshape(ds.Rows, ds.Columns).copy()
        raw[:3] = -2000
        ds.PixelRepresentation, ds.BitsStored, ds.HighBit = 1, 16, 15
        ds.add_new("PixelPaddingValue", "SS" if written < 0 else "US", written)
        ds.PixelData = raw.tobytes()

    hu = write_series(tmp_path, edit=pad)
    volume = read_ct(tmp_path)
    assert (volume.hu[:, :3] == -1024).all() and np.array_equal(volume.hu[:, 3:], hu[:, 3:])
    assert reasons(volume) == ["padding"]


def test_padding_within_tissue_is_not_believed(tmp_path):
    hu = chest()
    hu[:, 5:9] = 0
    write_series(tmp_path, hu, edit=put(PixelPaddingValue=1024))  # water
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and reasons(volume) == ["padding-in-tissue"]


def test_bits_above_the_stored_ones_are_masked(tmp_path):
    def overlay(ds, i):
        raw = np.frombuffer(ds.PixelData, "<u2").copy()
        raw[::3] |= 0x8000
        ds.PixelData = raw.tobytes()

    hu = write_series(tmp_path, edit=overlay)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and reasons(volume) == ["unused-bits"]


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
    def flip(ds, i):
        ds.ImagePositionPatient = [ORIGIN[0], ORIGIN[1], ORIGIN[2] + (11 - i) * SPACING[0]]

    hu = write_series(tmp_path, edit=flip)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu[::-1]) and volume.affine == pytest.approx(AFFINE)


def test_rounded_positions_are_an_even_grid(tmp_path):
    def rounded(ds, i):
        ds.ImagePositionPatient = [ORIGIN[0], ORIGIN[1], round(ORIGIN[2] + i * 0.625, 1)]

    write_series(tmp_path, edit=rounded)
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
    def scout(ds, i):
        another_series(ds, 8)
        ds.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
        return None if i < 2 else Dataset()

    def capture(ds, i):
        another_series(ds, 9)
        ds.SOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
        return None if i < 1 else Dataset()

    def report(ds, i):
        another_series(ds, 7)
        ds.Modality = "SR"
        del ds.PixelData, ds.Rows
        return None if i < 1 else Dataset()

    hu = write_series(tmp_path)
    for n, edit in enumerate((scout, capture, report)):
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


def as_dicom(folder, hu):
    write_series(folder, hu)
    return folder


def as_rle(folder, hu):
    write_series(folder, hu, edit=lambda ds, i: ds.compress(RLELossless, generate_instance_uid=False))
    return folder


def as_scaled_nifti(folder, hu):
    image = nibabel.Nifti1Image(hu.transpose(2, 1, 0), AFFINE)
    image.header.set_slope_inter(1, 0.25)
    folder.mkdir()
    nibabel.save(image, folder / "v.nii")
    return folder / "v.nii"


@pytest.mark.parametrize("write", [as_dicom, as_rle, as_scaled_nifti])
def test_a_volume_is_held_in_memory_once(tmp_path, write):
    path = write(tmp_path / "s", chest(40, (96, 96)))
    read_ct(path)  # what is imported once
    tracemalloc.start()
    volume = read_ct(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert volume.hu.nbytes <= peak < 1.5 * volume.hu.nbytes
