"""A corpus of broken inputs: each gives exactly its reason, or the right volume; none a crash, none a wrong volume.

Nothing here is large: headers state sizes, files are sparse, and what they state is refused before it is allocated.
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable

import broken as mk
import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_dicom import ORIGIN, SPACING, another_series, chest, only, put, write_series
from pydicom.dataset import Dataset
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEG2000Lossless, generate_uid
from refused import refused

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers import bounded
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.pictures import read_radiograph

pytestmark = pytest.mark.filterwarnings("ignore")
RIGHT = "the right volume"
GREY, GREY16 = mk.GREY, mk.GREY.astype(np.uint16) << 4
X, Y, Z = ORIGIN


def place(z: Callable[[int], float], x=0.0):
    return lambda ds, i: put(ImagePositionPatient=[X + x * i, Y, Z + z(i)])(ds)


def drop(*gone):
    return lambda ds, i: Dataset() if i in gone else None


def each_at_one_place(ds):
    for frame in ds.PerFrameFunctionalGroupsSequence:
        frame.PlanePositionSequence[0].ImagePositionPatient = list(ORIGIN)


HEADERS = {
    "missing-slices": [drop(5), drop(3, 4), drop(2, 8)],
    "duplicate-slices": [
        only(5, put(ImagePositionPatient=[X, Y, Z + 4 * SPACING[0]])),
        put(ImagePositionPatient=list(ORIGIN)),
    ],
    "uneven-spacing": [place(lambda i: i * 2.5 + (i > 5) * 1.2), place(lambda i: 0.2 * i * i)],
    "gantry-tilt": [place(lambda i: 2.5 * i, x=0.3)],
    "shifted-slices": [only(5, put(ImagePositionPatient=[X + 9, Y, Z + 5 * SPACING[0]]))],
    "mixed-orientation": [
        only(5, put(ImageOrientationPatient=[0, 1, 0, 0, 0, -1])),
        only(5, put(ImageOrientationPatient=[-1, 0, 0, 0, 1, 0])),
    ],
    "mirrored": [put(ImageOrientationPatient=[-1, 0, 0, 0, 1, 0])],
    "mixed-size": [only(5, put(Rows=20, Columns=24))],
    "mixed-pixel-spacing": [only(5, put(PixelSpacing=[1.6, 1.4]))],
    "implausible-spacing": [put(PixelSpacing=[0.0008, 0.0007]), put(PixelSpacing=[800, 700])],
    "localizer": [put(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])],
    "secondary-capture": [
        put(SOPClassUID="1.2.840.10008.5.1.4.1.1.7"),
        put(SOPClassUID="1.2.840.10008.5.1.4.1.1.7.4"),
        put(ImageType=["DERIVED", "SECONDARY", "SCREEN SAVE"]),
        put(SamplesPerPixel=3, PhotometricInterpretation="RGB"),
    ],
    "not-ct": [put(Modality="MR"), put(Modality="PT"), put(Modality=None)],
    "no-pixel-data": [put(PixelData=None), only(5, put(PixelData=None))],
    "no-pixel-spacing": [
        put(PixelSpacing=None),
        only(5, put(PixelSpacing=None)),
        put(PixelSpacing=[0, 0.7]),
        put(PixelSpacing=[-0.8, 0.7]),
    ],
    "no-position": [put(ImagePositionPatient=None), only(5, put(ImagePositionPatient=None)), put(NumberOfFrames=2)],
    "no-orientation": [put(ImageOrientationPatient=None), put(ImageOrientationPatient=[1, 0, 0, 1, 0, 0])],
    "no-rescale": [put(RescaleIntercept=None), only(7, put(RescaleSlope=None)), put(RescaleSlope=0)],
    "lossy-8bit": [
        put(BitsAllocated=8, BitsStored=8, HighBit=7, PixelData=bytes(480)),
        put(BitsStored=8, HighBit=7),
        mk.jpeg_8_bit,
    ],
    "unsupported-transfer-syntax": [
        mk.under("1.2.840.10008.1.2.4.53", bytes(40)),
        mk.under("1.2.840.113619.5.2", b""),
    ],
    "undecodable": [mk.under(JPEG2000Lossless, bytes(960))],
    "truncated": [only(5, put(PixelData=bytes(20))), put(Rows=2000)],
    "wrong-pixel-count": [
        put(Rows=20),
        put(Columns=19),
        only(4, put(Rows=20)),
        put(BitsAllocated=1, BitsStored=1, HighBit=0),
    ],
    "too-few-slices": [drop(*range(5, 12))],
    "implausible-hu": [put(RescaleIntercept=2000)],
    "mixed-patients": [only(5, put(PatientID="another"))],
    "several-studies": [only(5, put(StudyInstanceUID="1.2.9"))],
    "bad-header": [
        put(BitsStored=20),
        put(BitsStored=24, HighBit=23),
        put(HighBit=15),
        put(Rows=None),
        put(Columns=0),
        put(PixelSpacing=[0.8]),
    ],
    "too-large": [lambda ds, i: (mk.rle(ds), put(Rows=65535, Columns=65535)(ds))[0]],
}
"""One change in the headers of a series; by the reason, those that give it."""
CT: dict[str, tuple[str, mk.Make]] = {
    "a good series": (RIGHT, mk.series()),
    "nothing at all": ("no-image", lambda folder: folder / "nowhere"),
    "an empty folder": ("no-dicom", lambda folder: [(folder / "s").mkdir(), folder / "s"][1]),
    "a text file named .dcm": ("no-dicom", mk.file("x.dcm", b"Findings: clear lungs. " * 20)),
    "an empty file named .dcm": ("no-dicom", mk.file("x.dcm", b"")),
    "zeros named .dcm": ("no-dicom", mk.file("x.dcm", bytes(200))),
    "files without a preamble": (RIGHT, mk.rewritten(lambda b: b[132:])),
    "a preamble and nothing else": ("no-pixel-data", mk.file("x.dcm", mk.MARK)),
    "a JPEG named .dcm": ("no-dicom", mk.file("x.dcm", b"\xff\xd8\xff\xe0" + bytes(400))),
    "a NIfTI file named .dcm": ("no-dicom", mk.nifti(name="v.dcm")),
    "a dead link in the folder": ("unreadable", mk.a_dead_link),
    "a pipe in the folder": (RIGHT, mk.a_pipe),
    "positions that are no number": ("bad-header", mk.rewritten(lambda b: b.replace(b"-11.0\\-22.0", b"NaN\\NaN    "))),
    "one infinite position": ("bad-header", mk.rewritten(lambda b: b.replace(b"-11.0\\-22.0", b"inf\\-22.0  "), 3)),
    "RLE under the name of raw pixels": ("wrong-pixel-count", mk.rewritten(mk.as_raw_pixels, edit=mk.rle)),
    "RLE whose file is cut": (("truncated", "undecodable"), mk.rewritten(lambda b: b[:-200], 4, mk.rle)),
    "a picture of nothing but air": ("blank", mk.series(hu=np.full((12, 24, 20), -1000, np.int16))),
    "a constant picture": ("implausible-hu", mk.series(hu=np.full((12, 24, 20), 40, np.int16))),
    "few slices across the body": ("too-few-slices", mk.series(hu=chest(3))),
    "two patients in one folder": (
        "mixed-patients",
        mk.beside(lambda ds, i: (another_series(ds, 5), put(PatientID="Q")(ds, i))[0]),
    ),
    "two series under one UID": ("duplicate-slices", mk.beside(put(SOPInstanceUID=generate_uid()))),
    "every file cut in its header": ("truncated", mk.rewritten(lambda b: b[:420])),
    "one file cut in its pixels": ("truncated", mk.rewritten(lambda b: b[:-11], 2)),
    "line ends changed by a text transfer": ("no-pixel-data", mk.rewritten(lambda b: b.replace(b"\n", b"\r\n"))),
    "a deflated series": (
        RIGHT,
        mk.series(lambda ds, i: put(TransferSyntaxUID=DeflatedExplicitVRLittleEndian)(ds.file_meta, i)),
    ),
    "zeros with a mark": ("unreadable", mk.zeros(8 << 20)),
    "zeros behind meta information": ("unreadable", mk.zeros(8 << 20, mk.with_meta(b"\x08\0\x60\0CS\x02\0CT"))),
    "one meta element again and again": ("unreadable", mk.zeros(3 << 20, mk.MARK + b"\2\0\1\0UI\0\0" * 200_000)),
    "a sequence of empty items": ("unreadable", mk.zeros(0x200000, mk.EMPTY_ITEMS)),
    "a private element of 1.5 GiB": ("too-large", mk.long_element(3 << 29, alone=True)),
    "a private element of 600 MiB": (RIGHT, mk.long_element(600 << 20)),
    "a private element of 600 MiB beside RLE": (RIGHT, mk.long_element(600 << 20, compressed=True)),
    "a deflated dataset of zeros": ("too-large", mk.deflated_zeros),
    "a zip": (RIGHT, mk.packed()),
    "a zip with names that climb": (RIGHT, mk.packed(prefix="../../../outside/")),
    "a zip with absolute names": (RIGHT, mk.packed(prefix="/outside/")),
    "a zip bomb beside the series": ("unreadable", mk.packed(mk.bomb)),
    "a zip cut in half": ("unreadable", mk.packed(edit=lambda b: b[:4000])),
    "a zip with a damaged member": ("unreadable", mk.packed(edit=mk.flipped)),
    "an encrypted zip": ("unreadable", mk.packed(edit=mk.at_each(b"PK\1\2", 8, 1, 1))),
    "members of 1.9 GiB": ("too-large", mk.packed(edit=mk.at_each(b"PK\1\2", 24, 1_900 << 20))),
    "members larger than they state": ("unreadable", mk.packed(edit=mk.at_each(b"PK\1\2", 24, 400))),
    "a directory of 3 GiB": ("too-large", mk.packed(edit=mk.at_each(b"PK\5\6", 12, 3 << 30))),
    "a member that unpacks a thousandfold": ("too-large", mk.a_member_of_zeros),
    "a method that unpacks without a bound": ("unreadable", mk.packed(method=zipfile.ZIP_BZIP2)),
    "an empty zip": ("unreadable", mk.file("s.zip", b"")),
    "a text file named .zip": ("unreadable", mk.file("s.zip", b"no archive")),
    "a DICOMDIR": (RIGHT, mk.disc(whole=False)),
    "a folder with a DICOMDIR": (RIGHT, mk.disc()),
    "a DICOMDIR that is cut": ("unreadable", mk.disc(mk.cut_directory, whole=False)),
    "a DICOMDIR that names a file outside": ("missing-files", mk.disc(mk.naming_a_file_outside, whole=False)),
    "a DICOMDIR whose last file is lost": ("missing-files", mk.disc(mk.losing(11), whole=False)),
    "a folder with a DICOMDIR whose last file is lost": ("missing-files", mk.disc(mk.losing(11))),
    "a DICOMDIR without its files": ("missing-files", mk.disc(mk.losing(*range(12)), whole=False)),
    "a folder of nothing but a DICOMDIR": ("missing-files", mk.disc(mk.losing(*range(12)))),
    "a folder with a DICOMDIR of other names": (RIGHT, mk.disc(mk.renamed)),
    "a folder with a DICOMDIR in lower case": (RIGHT, mk.disc(mk.in_lower_case)),
    "a folder with a broken DICOMDIR": (RIGHT, mk.disc(mk.cut_directory)),
    "enhanced multi-frame, RLE": (RIGHT, mk.enhanced(mk.rle)),
    "enhanced with more groups than frames": (
        "truncated",
        mk.enhanced(lambda ds: ds.PerFrameFunctionalGroupsSequence.extend(ds.PerFrameFunctionalGroupsSequence[:3])),
    ),
    "enhanced with all frames at one place": ("duplicate-slices", mk.enhanced(each_at_one_place)),
    "enhanced without groups": ("no-position", mk.enhanced(lambda ds: delattr(ds, "PerFrameFunctionalGroupsSequence"))),
    "NIfTI": (RIGHT, mk.nifti()),
    "NIfTI, compressed": (RIGHT, mk.nifti(name="v.nii.gz")),
    "NIfTI of one slice": ("not-a-volume", mk.nifti(np.zeros((20, 24), np.int16))),
    "NIfTI over time": ("not-a-volume", mk.nifti(np.zeros((20, 24, 12, 3), np.int16))),
    "NIfTI with a fourth axis of one": (RIGHT, mk.nifti(chest().transpose(2, 1, 0)[..., None])),
    "NIfTI half without numbers": ("not-finite", mk.nifti(mk.without_numbers(0.6))),
    "NIfTI with an affine of zeros": ("no-orientation", mk.nifti(affine=None)),
    "NIfTI with a flat affine": ("no-pixel-spacing", mk.nifti(change=lambda b: b[:312] + bytes(16) + b[328:])),
    "NIfTI with a leaning axis": ("gantry-tilt", mk.nifti(affine=mk.leaning(15))),
    "NIfTI in metres": ("implausible-spacing", mk.nifti(affine=np.diag([0.0007, 0.0008, 0.0025, 1]))),
    "NIfTI cut in its values": ("unreadable", mk.nifti(change=lambda b: b[:3000])),
    "NIfTI cut in its header": ("unreadable", mk.nifti(change=lambda b: b[:200])),
    "NIfTI, compressed, cut": ("unreadable", mk.nifti(name="v.nii.gz", change=lambda b: b[:2000])),
    "NIfTI, compressed, cut in its header": ("unreadable", mk.nifti(name="v.nii.gz", change=lambda b: b[:100])),
    "NIfTI named .nii.gz without compression": ("unreadable", mk.nifti(name="x.nii.gz", change=gzip.decompress)),
    "DICOM named .nii": ("unreadable", lambda f: [write_series(f), (f / "003.dcm").rename(f / "v.nii")][1]),
    "NIfTI between 0 and 1": ("implausible-hu", mk.nifti(np.random.default_rng(0).random((20, 24, 12), np.float32))),
    "NIfTI of zeros": ("implausible-hu", mk.nifti(np.zeros((20, 24, 12), np.int16))),
    "NIfTI in colour": ("not-a-volume", mk.nifti(np.zeros((9, 9, 9), [("R", "u1"), ("G", "u1"), ("B", "u1")]))),
    "NIfTI of 8 bits": ("lossy-8bit", mk.nifti(np.zeros((9, 9, 9), np.uint8))),
    "NIfTI of few slices": ("too-few-slices", mk.nifti(chest(3).transpose(2, 1, 0))),
    "no NIfTI": ("no-image", lambda folder: folder / "v.nii"),
    "NIfTI of 300 gigavoxels": ("too-large", mk.nifti_header((32767, 32767, 300))),
    "the same, packed to 200 bytes": ("too-large", mk.nifti_header((32767, 32767, 300), name="v.nii.gz")),
    "NIfTI of more dimensions": ("too-large", mk.nifti_header((512, 512, 300, 32767))),
    "NIfTI without its voxels": ("unreadable", mk.nifti_header((900, 900, 900))),
    "NIfTI without its voxels, packed": ("unreadable", mk.nifti_header((900, 900, 900), name="v.nii.gz")),
    "NIfTI whose voxels begin far behind": ("unreadable", mk.nifti_header(offset=2e9)),
    "NIfTI whose voxels begin far behind, packed": ("unreadable", mk.nifti_header(offset=1e5, name="v.nii.gz")),
    **{f"{why} {n}": (why, mk.series(edit)) for why, edits in HEADERS.items() for n, edit in enumerate(edits)},
}  # fmt: skip


@pytest.mark.parametrize("name", CT)
def test_ct(tmp_path, monkeypatch, name):
    monkeypatch.setattr(bounded, "ELEMENT_READS", 20_000)
    expected, write = CT[name]
    path = write(tmp_path)
    before = {file for file in tmp_path.parent.rglob("*") if file.name != "pipe.dcm"}
    if expected == RIGHT:
        assert np.array_equal(read_ct(path).hu, chest())
    else:
        with refused(expected) as error:
            read_ct(path)
        assert str(tmp_path) not in error.value.public
    assert {file for file in tmp_path.parent.rglob("*") if file.name != "pipe.dcm"} == before  # nothing is unpacked


def test_a_packed_nifti_that_goes_on_behind_its_voxels_is_given_up_at_once(tmp_path):
    image = nibabel.Nifti1Image(np.full((8, 8, 8), -1000, np.int16), np.eye(4)).to_bytes()
    with refused("unreadable", "goes on behind"):
        read_ct(mk.file("v.nii.gz", gzip.compress(image + bytes(8 << 20)))(tmp_path))


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.97, 0.999, *range(180, 900, 36)])
def test_files_cut_anywhere_are_refused(tmp_path, kept):
    path = mk.rewritten(lambda b: b[: int(len(b) * kept) if kept < 1 else kept])(tmp_path)
    with refused(("truncated", "unreadable", "no-pixel-data")):
        read_ct(path)


COLOUR = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 1}
RADIOGRAPHS: dict[str, tuple[str | tuple[str, ...], mk.Make]] = {
    "PNG": (RIGHT, mk.picture("f.png")),
    "a palette": (RIGHT, mk.picture("f.png", lambda image: image.convert("P"))),
    "CMYK": (RIGHT, mk.picture("f.tif", lambda image: image.convert("CMYK"))),
    "alpha": (RIGHT, mk.picture("f.png", lambda image: image.convert("LA"))),
    "all transparent": (RIGHT, mk.picture("f.png", mk.see_through)),
    "a PNG named .jpg": (RIGHT, mk.picture("f.jpg", format="PNG")),
    "a cut PNG": ("unreadable", mk.picture("f.png", mk.noise, cut=900)),
    "a cut JPEG": ("unreadable", mk.picture("f.jpg", cut=500, quality=100)),
    "an empty PNG": ("unreadable", mk.file("f.png", b"")),
    "one pixel": ("blank", mk.picture("f.png", lambda image: image.crop((0, 0, 1, 1)))),
    "a stamp": ("too-small", mk.picture("f.png", lambda image: image.crop((0, 0, 12, 9)))),
    "all black": ("blank", mk.picture("f.png", lambda image: image.point(lambda v: 0))),
    "black and white alone": ("not-a-radiograph", mk.picture("f.png", lambda image: image.convert("1"))),
    "several pages": ("not-a-radiograph", mk.pages),
    "values that are no number": ("not-finite", mk.picture("f.tif", mk.not_finite)),
    "a float TIFF of 13000 x 13000": ("too-large", mk.stated_picture("f.tif", 13_000, 13_000)),
    "a PNG of 6000 x 6000": ("too-large", mk.stated_picture("f.png", 6_000, 6_000)),
    "a PNG of 10 gigapixels": ("unreadable", mk.stated_picture("f.png", 100_000, 100_000)),
    "DX": (RIGHT, mk.radiograph()),
    "DX, inverted": (RIGHT, mk.radiograph(4095 - GREY16, PhotometricInterpretation="MONOCHROME1")),
    "DX, lateral": ("lateral-view", mk.radiograph(ViewPosition="LL")),
    "DX by a palette": ("not-a-radiograph", mk.radiograph(PhotometricInterpretation="PALETTE COLOR")),
    "DX of an unknown meaning": ("not-a-radiograph", mk.radiograph(PhotometricInterpretation="GREYISH")),
    "DX without a meaning": ("not-a-radiograph", mk.radiograph(PhotometricInterpretation=None)),
    "DX in colour": ("not-a-radiograph", mk.radiograph(np.stack([GREY] * 3).astype(np.uint16), **COLOUR)),
    "DX of several frames": ("not-a-radiograph", mk.radiograph(np.stack([GREY16] * 4), NumberOfFrames=4)),
    "DX of two billion frames": ("not-a-radiograph", mk.radiograph(NumberOfFrames=2_000_000_000)),
    "DX without pixels": ("no-pixel-data", mk.radiograph(PixelData=None)),
    "DX with too many rows": ("truncated", mk.radiograph(Rows=50)),
    "DX with too few rows": ("wrong-pixel-count", mk.radiograph(Rows=30)),
    "DX of 65535 x 65535": ("too-large", mk.radiograph(Rows=65535, Columns=65535)),
    "DX with fewer bits than its highest": ("bad-header", mk.radiograph(BitsStored=11)),
    "DX with more bits than there are": ("bad-header", mk.radiograph(BitsStored=17, HighBit=16)),
    "DX that calls unsigned values signed": ("bad-header", mk.radiograph(PixelRepresentation=1)),
    "DX of signed values": (RIGHT, mk.radiograph((GREY.astype(np.int16) << 4) - 2000, PixelRepresentation=1)),
    "DX without rows": ("bad-header", mk.radiograph(Rows=None)),
    "DX with a window of no width": ("bad-header", mk.radiograph(WindowCenter=2000, WindowWidth=0)),
    "DX with slope zero": ("blank", mk.radiograph(RescaleSlope=0, RescaleIntercept=0)),
    "CT as a radiograph": ("not-a-radiograph", mk.radiograph(Modality="CT")),
    "no modality": ("not-a-radiograph", mk.radiograph(Modality=None)),
    "a UID that is no transfer syntax": ("unsupported-transfer-syntax", mk.without_transfer_syntax),
    "zeros with a mark": (("unreadable", "not-a-radiograph"), mk.zeros(8 << 20)),
    "a folder": ("no-image", lambda folder: folder),
    "no file": ("no-image", lambda folder: folder / "f.jpg"),
    "text named .png": ("unreadable", mk.file("f.png", b"no picture")),
    "text named .dcm": ("unreadable", mk.file("f.dcm", b"clear")),
}  # fmt: skip


@pytest.mark.parametrize("name", RADIOGRAPHS)
def test_radiographs(tmp_path, monkeypatch, name):
    monkeypatch.setattr(bounded, "ELEMENT_READS", 20_000)
    expected, write = RADIOGRAPHS[name]
    path = write(tmp_path)
    if expected == RIGHT:
        read = read_radiograph(path)
        assert read.shape == GREY.shape and read.dtype == np.uint8
        assert "DX" in name or np.abs(read.astype(int) - GREY).max() <= 1  # a DX radiograph is stretched
        assert np.corrcoef(read.ravel(), GREY.ravel())[0, 1] > 0.999
        return
    with refused(expected):
        read_radiograph(path)


NUMBERS = ("Rows", "Columns", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "SamplesPerPixel")


@settings(max_examples=60)
@given(st.sampled_from(NUMBERS), st.integers(0, 65535), st.booleans())
def test_any_number_in_a_header_field_is_refused_or_changes_nothing(tmp_path_factory, keyword, value, everywhere):
    """Sizes and bits: what is read after all has the values of the unchanged series, but for the sign of the values."""
    folder = tmp_path_factory.mktemp("numbers")
    hu = write_series(folder, edit=lambda ds, i: setattr(ds, keyword, value) if everywhere or i == 5 else None)
    try:
        volume = read_ct(folder)
    except DataError as error:
        assert error.reason
        return
    if keyword == "PixelRepresentation" and value == 1:
        assert "unused-bits" in {note.reason for note in volume.warnings}  # said, since nobody can know better
    elif keyword == "SamplesPerPixel" and not everywhere:
        assert len(volume.hu) in (11, 12)
    else:
        assert np.array_equal(volume.hu, hu)


@settings(max_examples=60)
@given(st.sampled_from((*NUMBERS, "NumberOfFrames")), st.integers(0, 65535))
def test_any_number_in_a_radiographs_header_is_refused_or_read(tmp_path_factory, keyword, value):
    path = mk.radiograph(**{keyword: value})(tmp_path_factory.mktemp("numbers"))
    try:
        assert read_radiograph(path).shape == GREY.shape
    except DataError as error:
        assert error.reason
