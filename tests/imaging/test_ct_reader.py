"""Values and geometry of what the CT reader accepts; and of damaged streams, one decoder decides."""

import tracemalloc
import warnings

import imagecodecs
import nibabel
import numpy as np
import pydicom
import pytest
from broken import AFFINE, ORIGIN, SPACING, nifti, rle
from make_dicom import chest, encode, encoded, name_of, put, slice_dataset, trunk, write_radiograph, write_series
from pydicom import dcmread, uid
from pydicom.encaps import encapsulate, get_frame
from refused import refused
from tables import cases

from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.decoders import stream_size
from fedtar_flare.imaging.readers.dicom_files import Source, read_header
from fedtar_flare.imaging.readers.dicom_slices import read_hu, slices_of
from fedtar_flare.imaging.readers.pictures import read_radiograph
from fedtar_flare.imaging.readers.volume import unlike_neighbours

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


@pytest.mark.parametrize(("orientation", "direction"), cases(__file__, "orientations.yaml"))
def test_affine_maps_every_slice_to_its_own_position(tmp_path, orientation, direction):
    def turn(ds, i):
        ds.ImageOrientationPatient = orientation
        ds.ImagePositionPatient = (np.array(ORIGIN) + np.array(direction) * SPACING[0] * i).tolist()

    hu = write_series(tmp_path / "deep" / "er", edit=turn)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu)
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
    volume = read_ct(tmp_path / "v.nii")
    assert np.array_equal(volume.hu, HU) and volume.affine == pytest.approx(TURNED)
    assert volume.spacing_mm == pytest.approx((2.5, 0.7, 0.8))


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


SYNTAXES = {"RLE": uid.RLELossless, "JPEG-LS": uid.JPEGLSLossless, "JPEG": uid.JPEGLosslessSV1,
            "JPEG 2000": uid.JPEG2000Lossless, "HTJ2K": uid.HTJ2KLossless}  # fmt: skip


def patient() -> np.ndarray:
    """A body of nine slices with noise, larger than the least size that the encoder of JPEG 2000 takes."""
    noise = np.random.default_rng(0).integers(-20, 20, (9, 48, 40), dtype=np.int16)
    return np.ascontiguousarray(trunk(size=48)[6:15, :, 4:44]) + noise


def compressed(syntax, change=None):
    """An edit that compresses a slice, and changes the stream."""

    def edit(ds, i=0):
        encode(ds, syntax)
        if change:
            ds.PixelData = encapsulate([change(get_frame(ds.PixelData, 0, number_of_frames=1))])
            ds["PixelData"].is_undefined_length = True

    return edit


REFUSED = ("undecodable", "unsupported-transfer-syntax", "truncated")


@pytest.mark.parametrize("name", SYNTAXES)
def test_each_syntax_is_read_and_a_cut_stream_is_refused(tmp_path, name):
    write_series(tmp_path, patient(), edit=compressed(SYNTAXES[name]))
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, patient()) and volume.warnings == ()
    for share in (0.02, 0.3, 0.7, 0.95):
        cut = compressed(SYNTAXES[name], lambda frame, share=share: frame[: int(len(frame) * share)])
        cut(ds := slice_dataset(patient()[5], 5))
        ds.save_as(tmp_path / name_of(5, 9), enforce_file_format=True)
        with refused(REFUSED):
            read_ct(tmp_path)


@pytest.mark.parametrize("name", ["JPEG-LS", "JPEG", "JPEG 2000", "HTJ2K"])
def test_a_stream_of_another_size(tmp_path, name):
    turned = slice_dataset(patient()[5].T, 5)
    encode(turned, SYNTAXES[name])
    frame = get_frame(turned.PixelData, 0, number_of_frames=1)
    assert stream_size(frame) == (40, 48)
    other, good = compressed(SYNTAXES[name], lambda _: frame), compressed(SYNTAXES[name])
    write_series(tmp_path, patient(), edit=lambda ds, i: (other if i == 5 else good)(ds, i))
    with refused(REFUSED):
        read_ct(tmp_path)


def test_a_decoders_warning_is_a_refusal(tmp_path):
    """A run more than a segment needs: the decoder would drop it and say so."""
    longer = compressed(uid.RLELossless, lambda frame: frame + bytes([0xF0, 7]))
    write_series(tmp_path, edit=lambda ds, i: (longer if i == 4 else compressed(uid.RLELossless))(ds, i))
    with warnings.catch_warnings(), refused("undecodable", "non-conformant padding"):
        warnings.filterwarnings("error", ".*padding")
        read_ct(tmp_path)


@pytest.mark.parametrize("syntax", [uid.JPEGLSLossless, uid.JPEG2000Lossless, uid.JPEGLosslessSV1])
@pytest.mark.parametrize("signed", [0, 1])
def test_a_radiograph_of_lossless_pixels(tmp_path, syntax, signed):
    grey = np.random.default_rng(0).integers(0, 4096, (40, 60)).astype(np.int16) - 2048 * signed
    path = write_radiograph(tmp_path / "f.dcm", grey, PixelRepresentation=signed)
    right, ds = read_radiograph(path), dcmread(path)
    compressed(syntax)(ds)
    ds.save_as(path)
    assert np.array_equal(read_radiograph(path), right)
    if syntax == uid.JPEGLSLossless:
        frame = get_frame(ds.PixelData, 0, number_of_frames=1)
        path.write_bytes(path.read_bytes().replace(frame, frame[:200] + bytes(200) + frame[400:]))
        with refused("undecodable"):
            read_radiograph(path)


@pytest.mark.parametrize("syntax, bits", [(uid.JPEGBaseline8Bit, 8), (uid.JPEGExtended12Bit, 12)])
def test_a_radiograph_of_lossy_jpeg(tmp_path, syntax, bits):
    grey = np.add.outer(np.arange(40), np.arange(64)).astype(np.uint16) << (bits - 7)
    path = write_radiograph(tmp_path / "f.dcm", grey, bits)
    right, ds = read_radiograph(path), dcmread(path)
    ds.file_meta.TransferSyntaxUID, ds.LossyImageCompression = syntax, "01"
    pixels, ds.BitsAllocated = (grey.astype(np.uint8), 8) if bits == 8 else (grey, 16)
    ds.PixelData = encapsulate([imagecodecs.jpeg8_encode(pixels, level=98, bitspersample=bits)])
    ds["PixelData"].is_undefined_length = True
    ds.save_as(path)
    assert np.abs(read_radiograph(path).astype(int) - right).max() <= 3


def test_a_slice_unlike_its_neighbours_is_noted_and_no_sound_one(tmp_path):
    """Half of a slice is shifted, as when a decoder lost its place; a decoder of JPEG 2000 complains of nothing."""
    hu = trunk()[8:18]
    damaged = hu.copy()
    damaged[4, :, :32] = np.roll(hu[4], 20, axis=0)[:, :32]
    for name, volume in (("good", hu), ("bad", damaged)):
        write_series(tmp_path / name, volume, edit=encoded(uid.JPEG2000Lossless))
    assert read_ct(tmp_path / "good").warnings == ()
    (note,) = read_ct(tmp_path / "bad").warnings
    assert note.reason == "unlike-neighbours" and note.text.startswith("1 slice(s)")
    each = np.tile(np.arange(30, dtype=np.int16)[:, None, None], (1, 64, 64))
    for sound in (chest(40, (64, 64)), trunk(), each * 60 - 1000, each % 2 * 900 - 900):
        assert unlike_neighbours(sound) == []


@pytest.mark.shared_data
def test_no_slice_of_a_real_series_is_unlike_its_neighbours(shared_data):
    hu = read_ct(shared_data / "lung_pet_ct_dx").hu
    assert unlike_neighbours(hu) == unlike_neighbours(hu[::2]) == unlike_neighbours(hu[1::2]) == []
    rng = np.random.default_rng(0)
    for i in rng.permutation(np.arange(1, 63))[:8]:
        damaged = hu.copy()
        damaged[i, 256:] = np.roll(hu[i, 256:], 40, axis=1)
        assert unlike_neighbours(damaged) == [i]
