"""Broken CT input: each kind has its own reason, and none becomes a silently wrong volume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_dicom import ORIGIN, SPACING, another_series, chest, only, put, slice_dataset, write_series
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from refused import refused

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.ct import read_ct


def place(z=None, x=0.0):
    return lambda ds, i: put(ImagePositionPatient=[ORIGIN[0] + x * i, ORIGIN[1], ORIGIN[2] + z(i)])(ds)


def drop(*gone):
    return lambda ds, i: Dataset() if i in gone else None


def eight_bits(ds, i):
    ds.BitsAllocated = ds.BitsStored = 8
    ds.HighBit, ds.PixelData = 7, bytes(ds.Rows * ds.Columns)


def unknown_syntax(uid):
    def edit(ds, i):
        ds.file_meta.TransferSyntaxUID = uid
        if not ds.file_meta.TransferSyntaxUID.is_private:
            ds.PixelData = encapsulate([bytes(40)])

    return edit


BROKEN = {
    "missing-slices": [drop(5), drop(3, 4), drop(2, 8)],
    "duplicate-slices": [only(5, put(ImagePositionPatient=[ORIGIN[0], ORIGIN[1], ORIGIN[2] + 4 * SPACING[0]]))],
    "uneven-spacing": [place(lambda i: i * 2.5 + (i > 5) * 1.2), place(lambda i: 0.2 * i * i)],
    "gantry-tilt": [place(lambda i: 2.5 * i, x=0.3)],
    "shifted-slices": [only(5, put(ImagePositionPatient=[ORIGIN[0] + 9, ORIGIN[1], ORIGIN[2] + 5 * SPACING[0]]))],
    "mixed-orientation": [only(5, put(ImageOrientationPatient=[0, 1, 0, 0, 0, -1]))],
    "mixed-size": [only(5, put(Rows=20, Columns=24))],
    "mixed-pixel-spacing": [only(5, put(PixelSpacing=[1.6, 1.4]))],
    "localizer": [put(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])],
    "secondary-capture": [
        put(SOPClassUID="1.2.840.10008.5.1.4.1.1.7"),
        put(ImageType=["DERIVED", "SECONDARY", "SCREEN SAVE"]),
        put(SamplesPerPixel=3, PhotometricInterpretation="RGB"),
    ],
    "not-ct": [put(Modality="MR"), put(Modality="PT"), put(Modality=None)],
    "no-pixel-data": [put(PixelData=None), only(5, put(PixelData=None))],
    "no-pixel-spacing": [put(PixelSpacing=None), only(5, put(PixelSpacing=None)), put(PixelSpacing=[0, 0.7])],
    "no-position": [put(ImagePositionPatient=None), only(5, put(ImagePositionPatient=None)), put(NumberOfFrames=2)],
    "no-orientation": [put(ImageOrientationPatient=None), put(ImageOrientationPatient=[1, 0, 0, 1, 0, 0])],
    "no-rescale": [put(RescaleIntercept=None), put(RescaleSlope=None), put(RescaleSlope=0)],
    "lossy-8bit": [eight_bits, put(BitsStored=8, HighBit=7)],
    "unsupported-transfer-syntax": [unknown_syntax("1.2.840.10008.1.2.4.53"), unknown_syntax("1.2.840.113619.5.2")],
    "truncated": [only(5, put(PixelData=bytes(20))), put(Rows=2000)],
    "too-few-slices": [drop(*range(5, 12))],
    "implausible-hu": [put(RescaleIntercept=2000)],
    "mixed-patients": [only(5, put(PatientID="another"))],
    "several-studies": [only(5, put(StudyInstanceUID="1.2.9"))],
    "bad-header": [put(BitsStored=20), put(Rows=None), put(Columns=0)],
}


@pytest.mark.parametrize("reason, n", [(reason, n) for reason, kinds in BROKEN.items() for n in range(len(kinds))])
def test_each_kind_of_broken_series_has_its_reason(tmp_path, reason, n):
    write_series(tmp_path, edit=BROKEN[reason][n])
    with refused(reason) as error:
        read_ct(tmp_path)
    assert str(tmp_path) not in error.value.public


def test_the_unknown_transfer_syntax_is_named(tmp_path):
    write_series(tmp_path, edit=unknown_syntax("1.2.840.10008.1.2.4.53"))
    with pytest.raises(DataError, match=r"1\.2\.840\.10008\.1\.2\.4\.53"):
        read_ct(tmp_path)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.97, 0.999])
def test_a_file_cut_anywhere_is_refused(tmp_path, kept):
    write_series(tmp_path, chest(12, (64, 64)))
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * kept)])
    with refused("truncated"):
        read_ct(tmp_path)


@pytest.mark.parametrize("length", range(180, 900, 36))
def test_a_header_cut_anywhere_is_refused(tmp_path, length):
    write_series(tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:length])
    with refused(("truncated", "unreadable", "no-pixel-data")):
        read_ct(tmp_path)


@pytest.mark.filterwarnings("ignore:End of file")
def test_a_cut_compressed_file_is_refused(tmp_path):
    write_series(tmp_path, edit=lambda ds, i: ds.compress("1.2.840.10008.1.2.5", generate_instance_uid=False))
    file = sorted(tmp_path.iterdir())[4]
    file.write_bytes(file.read_bytes()[:-200])
    with refused(("truncated", "undecodable")):
        read_ct(tmp_path)


def test_a_tilt_and_uneven_gaps_are_named_at_once(tmp_path):
    write_series(tmp_path, edit=place(lambda i: i * 2.5 + (i > 5) * 1.2, x=0.5))
    with refused("uneven-spacing", "slice distances from .* the gantry was tilted by"):
        read_ct(tmp_path)


def scouts(of):
    """A frontal and a lateral scout; some scanners do not call them so."""

    def edit(ds, i):
        if i > 1:
            return of(ds, i)
        ds.ImageOrientationPatient = [1, 0, 0, 0, 0, -1] if i else [0, 1, 0, 0, 0, -1]
        return None

    return edit


def dose_report(ds, i):
    another_series(ds, 9)
    ds.Modality, ds.SOPClassUID = "SR", "1.2.840.10008.5.1.4.1.1.88.67"
    del ds.PixelData, ds.Rows
    return None


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("beside", [lambda ds, i: Dataset(), dose_report])
def test_a_folder_of_scouts_says_so(tmp_path, named, beside):
    def edit(ds, i):
        if named and i < 2:
            ds.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
        return scouts(beside)(ds, i)

    write_series(tmp_path, edit=edit)
    with refused("localizer"):
        read_ct(tmp_path)


def test_few_slices_across_the_body_are_no_scouts(tmp_path):
    write_series(tmp_path, chest(3))
    with refused("too-few-slices"):
        read_ct(tmp_path)


def another_pixel(ds, i):
    ds.PixelData = ds.PixelData[:-2] + b"\x11\x01"


@pytest.mark.parametrize(
    "change",
    [
        another_pixel,
        put(RescaleIntercept=-1000),
        put(PixelSpacing=[0.8, 0.71]),
        put(ImageOrientationPatient=[0, 1, 0, -1, 0, 0]),
        lambda ds, i: (another_pixel(ds, i), ds.compress("1.2.840.10008.1.2.5", generate_instance_uid=False)),
    ],
)
def test_copies_that_show_something_else_are_refused_by_name(tmp_path, change):
    """Which file is right, their names do not tell."""
    write_series(tmp_path)
    write_series(tmp_path, edit=lambda ds, i: change(ds, i) and None if i == 5 else Dataset(), prefix="copy-")
    name = next(file.name for file in tmp_path.iterdir() if file.name.startswith("copy"))
    with refused("conflicting-copies", f"{name[5:]} and .*{name}"):
        read_ct(tmp_path)


def test_a_copy_in_another_transfer_syntax_is_a_copy(tmp_path):
    hu = write_series(tmp_path)
    rle = {"edit": lambda ds, i: ds.compress("1.2.840.10008.1.2.5", generate_instance_uid=False), "prefix": "copy-"}
    write_series(tmp_path, **rle)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and [note.reason for note in volume.warnings] == ["copies"]


def test_a_damaged_slice_condemns_its_series_and_another_one_is_read(tmp_path):
    hu = chest()
    write_series(tmp_path, hu, edit=only(11, put(ImagePositionPatient=None)))

    def sharp(ds, i):
        another_series(ds, 1)
        ds.ConvolutionKernel = "B70f"

    write_series(tmp_path, hu[::-1], edit=sharp, prefix="b")
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu[::-1])
    assert [note.reason for note in volume.warnings] == ["several-series", "series-refused"]
    assert "no-position" in volume.warnings[1].text


@pytest.fixture(scope="module")
def good_series(tmp_path_factory):
    """Makes new folders with the files of :func:`write_series`, which are built once."""
    made = tmp_path_factory.mktemp("made")
    write_series(made)
    files = {file.name: file.read_bytes() for file in made.iterdir()}

    def make():
        folder = tmp_path_factory.mktemp("good")
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    return make


KEYWORDS = ["ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "RescaleSlope", "RescaleIntercept"]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*KEYWORDS, "SliceThickness", "AcquisitionNumber"]),
    st.binary(max_size=24),
    st.integers(0, 11),
    st.booleans(),
)
def test_whatever_stands_in_a_header_it_is_read_or_refused(good_series, keyword, value, at, everywhere):
    """Broken bytes in the geometry or rescale of one slice or of all: a whole volume or a reason, never a crash."""
    folder, hu = good_series(), chest()
    for file in sorted(folder.iterdir())[: 12 if everywhere else 1]:
        content = bytearray(file.read_bytes())
        tag = int(slice_dataset(hu[0], 0).data_element(keyword).tag)
        head = (tag >> 16).to_bytes(2, "little") + (tag & 0xFFFF).to_bytes(2, "little")
        start = content.index(head) + 8
        length = int.from_bytes(content[start - 2 : start], "little")
        content[start : start + length] = value.ljust(length, b" ")[:length]
        file.write_bytes(content)
    try:
        volume = read_ct(folder)
    except DataError as error:
        assert error.reason
        return
    assert volume.hu.shape == hu.shape and np.isfinite(volume.affine).all()


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 950), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_read_or_refused(good_series, flips):
    folder = good_series()
    file = sorted(folder.iterdir())[3]
    content = bytearray(file.read_bytes())
    for at, value in flips:
        content[at] = value
    file.write_bytes(content)
    try:
        assert read_ct(folder).hu.dtype == np.int16
    except DataError as error:
        assert error.reason


def test_a_rescale_that_differs_between_slices_is_noted(tmp_path):
    write_series(tmp_path, edit=only(5, put(RescaleIntercept=-1000)))
    assert [note.reason for note in read_ct(tmp_path).warnings] == ["mixed-rescale"]


def test_duplicate_places_with_one_uid_are_no_copies(tmp_path):
    write_series(tmp_path, edit=put(SOPInstanceUID="1.2.3.4.1"))
    assert len(read_ct(tmp_path).hu) == 12
