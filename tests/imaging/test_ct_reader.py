"""Values and geometry of what the CT reader accepts, DICOM and NIfTI, made up and real."""

import tracemalloc

import nibabel
import numpy as np
import pydicom
import pytest
from broken import AFFINE, nifti, rle
from make_dicom import ORIGIN, SPACING, chest, put, write_series
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.dicom_files import Source, read_header
from fedtar_flare.imaging.readers.dicom_slices import read_hu, slices_of

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
    assert np.array_equal(volume.hu, expected) and [note.reason for note in volume.warnings] == [noted]


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

    hu = write_series(tmp_path / "deep" / "er", edit=turn)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and volume.series_uid == "1.2.3.4"
    lps = np.diag([-1, -1, 1, 1]) @ volume.affine
    for i in (0, 5, 11):
        assert lps @ [0, 0, i, 1] == pytest.approx([*(np.array(ORIGIN) + np.array(direction) * SPACING[0] * i), 1])
    rows, columns = np.reshape(orientation, (2, 3))
    assert lps[:3, 0] == pytest.approx(rows * SPACING[2]) and lps[:3, 1] == pytest.approx(columns * SPACING[1])


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


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz"])
def test_nifti_in_any_orientation(tmp_path, name):
    volume = read_ct(nifti(affine=TURNED, name=name)(tmp_path))
    assert volume.hu.dtype == np.int16 and np.array_equal(volume.hu, HU)
    assert volume.affine == pytest.approx(TURNED) and volume.spacing_mm == pytest.approx((2.5, 0.7, 0.8))


def lost(sform=None, qform=None, zooms=None):
    image = nibabel.Nifti1Image(HU.transpose(2, 1, 0), TURNED)
    image.set_qform(TURNED if qform is None else qform, 1)
    if zooms is not None:
        image.header["pixdim"][1:4] = zooms
    image.set_sform(TURNED if sform is None else sform, 1)
    return image


@pytest.mark.parametrize(
    "image",
    [
        lost(sform=np.eye(4)),  # voxels of 1 mm
        lost(sform=TURNED @ np.diag([1, 1, 4 / 3, 1])),
        lost(sform=TURNED @ np.diag([1, 1, -1, 1])),  # head and feet exchanged
        lost(zooms=(0.8, 0.7, 3.3)),
    ],
)
def test_nifti_whose_header_contradicts_itself_is_refused(tmp_path, image):
    nibabel.save(image, tmp_path / "v.nii")
    with refused("conflicting-geometry"):
        read_ct(tmp_path / "v.nii")
    nibabel.save(lost(), tmp_path / "v.nii")
    assert np.array_equal(read_ct(tmp_path / "v.nii").hu, HU)


def test_scaling_is_applied_and_values_that_are_no_number_become_air(tmp_path):
    image = nibabel.Nifti1Image(HU.transpose(2, 1, 0), TURNED)
    image.header.set_slope_inter(2, -1000)
    nibabel.save(image, tmp_path / "i.nii")
    assert np.array_equal(read_ct(tmp_path / "i.nii").hu, HU.astype(int) * 2 - 1000)
    floats = HU.transpose(2, 1, 0).astype(np.float32)
    floats[0, 0, 0] = np.nan
    volume = read_ct(nifti(floats)(tmp_path))
    assert volume.hu[0, 0, 0] == -1024 and [note.reason for note in volume.warnings] == ["not-finite"]
    assert np.array_equal(volume.hu.ravel()[1:], HU.ravel()[1:])


@pytest.mark.shared_data
def test_all_lossless_files_give_the_same_hu_and_others_are_refused(shared_data):
    files = sorted((shared_data / "ct_transfer_syntaxes").glob("CTImage*.dcm"))
    lossless = [file for file in files if "4.53" not in file.name]
    assert len(lossless) == 7
    for name, reason in (("*4.53.dcm", "unsupported-transfer-syntax"), ("no-pixel-data.dcm", "no-pixel-data")):
        with refused(reason):
            read_ct(*(shared_data / "ct_transfer_syntaxes").glob(name))
    plain = pydicom.dcmread(shared_data / "ct_transfer_syntaxes" / "CTImage.dcm")
    expected = plain.pixel_array.astype(int) * int(plain.RescaleSlope) + int(plain.RescaleIntercept)
    for file in lossless:
        slices = slices_of(read_header(Source(file)))
        assert np.array_equal(read_hu(slices)[0][0], expected), file.name
        assert (slices[0].step_mm, *slices[0].spacing) == pytest.approx((6.5, 0.675781, 0.675781))


@pytest.mark.shared_data
def test_a_whole_series_against_pydicom(shared_data):
    volume = read_ct(shared_data / "lung_pet_ct_dx")
    slices = [pydicom.dcmread(file) for file in (shared_data / "lung_pet_ct_dx").rglob("*.dcm")]
    slices.sort(key=lambda ds: float(ds.ImagePositionPatient[2]))
    expected = np.stack([ds.pixel_array * ds.RescaleSlope + ds.RescaleIntercept for ds in slices])
    assert volume.hu.shape == (64, 512, 512) and volume.warnings == ()
    assert np.array_equal(volume.hu, expected)
    assert volume.spacing_mm == pytest.approx((5, 0.841796875, 0.841796875))
    for i in (0, 31, 63):
        lps = np.diag([-1, -1, 1, 1]) @ volume.affine @ [0, 0, i, 1]
        assert lps[:3] == pytest.approx(np.array(slices[i].ImagePositionPatient, float))
