"""Damaged compressed streams: one decoder decides, a warning is a refusal, and gross damage that none sees is noted."""

import warnings

import imagecodecs
import numpy as np
import pytest
from make_dicom import chest, compress, name_of, slice_dataset, trunk, write_radiograph, write_series
from pydicom import dcmread
from pydicom.encaps import encapsulate, get_frame
from pydicom.uid import (
    HTJ2KLossless,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)
from refused import refused

from fedtar_flare.core.errors import DataError
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.decoders import stream_size
from fedtar_flare.imaging.readers.pictures import read_radiograph
from fedtar_flare.imaging.readers.volume import unlike_neighbours

SYNTAXES = {"RLE": RLELossless, "JPEG-LS": JPEGLSLossless, "JPEG": JPEGLosslessSV1, "JPEG 2000": JPEG2000Lossless}
SYNTAXES |= {"HTJ2K": HTJ2KLossless}


def patient() -> np.ndarray:
    """A body of nine slices with noise, larger than the least size that the encoder of JPEG 2000 takes."""
    noise = np.random.default_rng(0).integers(-20, 20, (9, 48, 40), dtype=np.int16)
    return np.ascontiguousarray(trunk(size=48)[6:15, :, 4:44]) + noise


def compressed(syntax, change=None):
    """An edit that compresses a slice, and changes the stream."""

    def edit(ds, i=0):
        compress(ds, syntax)
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
    compress(turned, SYNTAXES[name])
    frame = get_frame(turned.PixelData, 0, number_of_frames=1)
    assert stream_size(frame) == (40, 48)
    other, good = compressed(SYNTAXES[name], lambda _: frame), compressed(SYNTAXES[name])
    write_series(tmp_path, patient(), edit=lambda ds, i: (other if i == 5 else good)(ds, i))
    with refused(REFUSED):
        read_ct(tmp_path)


def test_a_flipped_bit_of_jpeg_ls_is_refused_or_of_few_voxels(tmp_path):
    """The last codes of a stream are those that nothing behind them checks; other streams carry no redundancy."""
    write_series(tmp_path, patient(), edit=compressed(JPEGLSLossless))
    rng, file, right = np.random.default_rng(0), tmp_path / name_of(0, 9), patient()
    content = file.read_bytes()
    frame = get_frame(dcmread(file).PixelData, 0, number_of_frames=1)
    for _ in range(20):
        changed = bytearray(content)
        changed[content.index(frame) + int(rng.integers(len(frame)))] ^= 1 << int(rng.integers(8))
        file.write_bytes(changed)
        try:
            assert int((read_ct(tmp_path).hu != right).sum()) <= 40, "a row of the slice"
        except DataError as error:
            assert error.reason in REFUSED, str(error)


def test_a_decoders_warning_is_a_refusal(tmp_path):
    """A run more than a segment needs: the decoder would drop it and say so."""
    longer = compressed(RLELossless, lambda frame: frame + bytes([0xF0, 7]))
    write_series(tmp_path, edit=lambda ds, i: (longer if i == 4 else compressed(RLELossless))(ds, i))
    with warnings.catch_warnings(), refused("undecodable", "non-conformant padding"):
        warnings.filterwarnings("error", ".*padding")
        read_ct(tmp_path)


@pytest.mark.parametrize("syntax", [JPEGLSLossless, JPEG2000Lossless, JPEGLosslessSV1])
@pytest.mark.parametrize("signed", [0, 1])
def test_a_radiograph_of_lossless_pixels(tmp_path, syntax, signed):
    grey = np.random.default_rng(0).integers(0, 4096, (40, 60)).astype(np.int16) - 2048 * signed
    path = write_radiograph(tmp_path / "f.dcm", grey, PixelRepresentation=signed)
    right, ds = read_radiograph(path), dcmread(path)
    compressed(syntax)(ds)
    ds.save_as(path)
    assert np.array_equal(read_radiograph(path), right)
    if syntax == JPEGLSLossless:
        frame = get_frame(ds.PixelData, 0, number_of_frames=1)
        path.write_bytes(path.read_bytes().replace(frame, frame[:200] + bytes(200) + frame[400:]))
        with refused("undecodable"):
            read_radiograph(path)


@pytest.mark.parametrize("syntax, bits", [(JPEGBaseline8Bit, 8), (JPEGExtended12Bit, 12)])
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


def test_a_slice_unlike_its_neighbours_is_noted(tmp_path):
    """Half of a slice is shifted, as when a decoder lost its place; a decoder of JPEG 2000 complains of nothing."""
    hu = trunk()[8:18]
    damaged = hu.copy()
    damaged[4, :, :32] = np.roll(hu[4], 20, axis=0)[:, :32]
    for name, volume in (("good", hu), ("bad", damaged)):
        write_series(tmp_path / name, volume, edit=lambda ds, i: compress(ds, JPEG2000Lossless))
    assert read_ct(tmp_path / "good").warnings == ()
    (note,) = read_ct(tmp_path / "bad").warnings
    assert note.reason == "unlike-neighbours" and note.text.startswith("1 slice(s)")


def test_no_sound_slice_is_unlike_its_neighbours():
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
