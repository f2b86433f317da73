"""A corpus of broken inputs: each gives exactly its reason, or the right volume; none a crash, none a wrong volume.

Nothing here is large: headers state sizes, files are sparse, and what they state is refused before it is allocated.
"""

import gzip
import io
import os
import struct
import zipfile
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace

import broken as mk
import numpy as np
import pytest
from broken import Right, check_ct
from make_dicom import ORIGIN, chest, drop, encoded, only, put, then, write_series
from PIL import Image
from pydicom import dcmread, dcmwrite
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian, ImplicitVRLittleEndian, JPEG2000Lossless
from refused import refused
from tables import cases

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cohort import Visit
from fedtar_flare.imaging import limits
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.pipeline import Size, prepare_visits
from fedtar_flare.imaging.readers import dicom_files
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.pictures import read_radiograph

pytestmark = pytest.mark.filterwarnings("ignore")
X, Y, Z = ORIGIN


def place(z: Callable[[int], float], x=0.0):
    return lambda ds, i: put(ImagePositionPatient=[X + x * i, Y, Z + z(i)])(ds)


def each_at_one_place(ds):
    for frame in ds.PerFrameFunctionalGroupsSequence:
        frame.PlanePositionSequence[0].ImagePositionPatient = list(ORIGIN)


def three_groups_more(ds):
    ds.PerFrameFunctionalGroupsSequence.extend(ds.PerFrameFunctionalGroupsSequence[:3])


def without_meta(preamble: bytes, implicit: bool, little: bool) -> mk.Make:
    """A series whose files begin with the dataset, or have a preamble alone before it."""

    def change(content):
        ds = dcmread(io.BytesIO(content))
        ds.PixelData = ds.PixelData if little else np.frombuffer(ds.PixelData, "<u2").byteswap().tobytes()
        del ds.file_meta, ds.preamble
        dcmwrite(file := io.BytesIO(), ds, implicit_vr=implicit, little_endian=little, force_encoding=True)
        return preamble + file.getvalue()

    return mk.rewritten(change)


def change(of=None, **tags):
    """These attributes of slice ``of``, by default of all."""
    return put(**tags) if of is None else only(of, put(**tags))


EDITS = [(why, change(**tags)) for why, of in cases(__file__, "headers.yaml").items() for tags in of]
EDITS += [("missing-slices", drop(*gone)) for gone in ((5,), (3, 4), (2, 8))]
EDITS += [("uneven-spacing", place(z)) for z in (lambda i: i * 2.5 + (i > 5) * 1.2, lambda i: 0.2 * i * i)]
EDITS += [
    ("lossy-8bit", mk.jpeg_8_bit),
    ("lossy-8bit", put(BitsAllocated=8, BitsStored=8, HighBit=7, PixelData=bytes(480))),
    ("gantry-tilt", place(lambda i: 2.5 * i, x=0.3)),
    ("unsupported-transfer-syntax", mk.under("1.2.840.10008.1.2.4.53", bytes(40))),
    ("unsupported-transfer-syntax", mk.under("1.2.840.113619.5.2", b"")),
    ("undecodable", mk.under(JPEG2000Lossless, bytes(960))),
    ("truncated", only(5, put(PixelData=bytes(20)))),
    ("too-few-slices", drop(*range(5, 12))),
    ("too-large", then(mk.rle, put(Rows=65535, Columns=65535))),
]
CT: dict[str, tuple] = {
    "a good series": (Right(), mk.series()),
    "nothing at all": ("no-image", lambda folder: folder / "nowhere"),
    "an empty folder": ("no-dicom", lambda folder: [(folder / "s").mkdir(), folder / "s"][1]),
    "a text file named .dcm": ("no-dicom", mk.file("x.dcm", b"Findings: clear lungs. " * 20)),
    "an empty file named .dcm": ("no-dicom", mk.file("x.dcm", b"")),
    "zeros named .dcm": ("no-dicom", mk.file("x.dcm", bytes(200))),
    "files without a preamble": (Right(), mk.rewritten(lambda b: b[132:])),
    **{
        f"no meta information, {name}{', a preamble' * bool(preamble)}": (Right(), without_meta(preamble, *encoding))
        for preamble in (b"", mk.MARK)
        for name, encoding in {"implicit": (True, True), "little": (False, True), "big": (False, False)}.items()
    },
    "a preamble and nothing else": ("no-pixel-data", mk.file("x.dcm", mk.MARK)),
    "a JPEG named .dcm": ("no-dicom", mk.file("x.dcm", b"\xff\xd8\xff\xe0" + bytes(400))),
    "a NIfTI file named .dcm": ("no-dicom", mk.nifti(name="v.dcm")),
    "a dead link in the folder": ("unreadable", mk.series(change=lambda s: (s / "a.dcm").symlink_to(s / "nowhere"))),
    "a pipe in the folder": (Right(), mk.series(change=lambda s: os.mkfifo(s / "pipe.dcm"))),
    "positions that are no number": ("bad-header", mk.rewritten(lambda b: b.replace(b"-11.0\\-22.0", b"NaN\\NaN    "))),
    "one infinite position": ("bad-header", mk.rewritten(lambda b: b.replace(b"-11.0\\-22.0", b"inf\\-22.0  "), 3)),
    "a picture of nothing but air": ("blank", mk.series(hu=np.full((12, 24, 20), -1000, np.int16))),
    "a constant picture": ("implausible-hu", mk.series(hu=np.full((12, 24, 20), 40, np.int16))),
    "few slices across the body": ("too-few-slices", mk.series(hu=chest(3))),
    "every file cut in its header": ("truncated", mk.rewritten(lambda b: b[:420])),
    "one file cut in its pixels": ("truncated", mk.rewritten(lambda b: b[:-11], 2)),
    "line ends changed by a text transfer": ("no-pixel-data", mk.rewritten(lambda b: b.replace(b"\n", b"\r\n"))),
    "deflated": (Right(), mk.series(encoded(DeflatedExplicitVRLittleEndian))),
    "implicit VR": (Right(), mk.series(encoded(ImplicitVRLittleEndian))),
    "big endian": (Right(), mk.series(encoded(ExplicitVRBigEndian))),
    "RLE": (Right(), mk.series(mk.rle)),
    "zeros with a mark": ("unreadable", mk.zeros(8 << 20)),
    "zeros behind meta information": ("unreadable", mk.zeros(8 << 20, mk.with_meta(b"\x08\0\x60\0CS\x02\0CT"))),
    "one meta element again and again": ("unreadable", mk.zeros(3 << 20, mk.MARK + b"\2\0\1\0UI\0\0" * 200_000)),
    "a sequence of empty items": ("unreadable", mk.zeros(0x200000, mk.EMPTY_ITEMS)),
    "a private element of 1.5 GiB": ("too-large", mk.long_element(3 << 29, alone=True)),
    "a private element of 600 MiB": (Right(), mk.long_element(600 << 20)),
    "a private element of 600 MiB beside RLE": (Right(), mk.long_element(600 << 20, compressed=True)),
    "a deflated dataset of zeros": ("too-large", mk.deflated_zeros()),
    "the same without a preamble": ("too-large", mk.deflated_zeros(preamble=False)),
    "a zip": (Right(), mk.packed()),
    "a zip with names that climb": (Right(), mk.packed(prefix="../../../outside/")),
    "a zip with absolute names": (Right(), mk.packed(prefix="/outside/")),
    "a zip bomb beside the series": ("unreadable", mk.packed({"zeros.dcm": bytes(30 << 20)})),
    "a zip cut in half": ("unreadable", mk.packed(edit=lambda b: b[:4000])),
    "a zip with a damaged member": ("unreadable", mk.packed(edit=mk.flipped)),
    "an encrypted zip": ("unreadable", mk.packed(edit=mk.at_each(b"PK\1\2", 8, 1, 1))),
    "members without a name": ("unreadable", mk.packed(edit=mk.at_each(b"PK\1\2", 46, 0, 1))),
    "members of 1.9 GiB": ("too-large", mk.packed(edit=mk.at_each(b"PK\1\2", 24, 1_900 << 20))),
    "members larger than they state": ("unreadable", mk.packed(edit=mk.at_each(b"PK\1\2", 24, 400))),
    "a directory of 3 GiB": ("too-large", mk.packed(edit=mk.at_each(b"PK\5\6", 12, 3 << 30))),
    "a member that unpacks a thousandfold": ("too-large", mk.packed({"z.dcm": mk.MARK + bytes(20 << 20)})),
    "a method that unpacks without a bound": ("unreadable", mk.packed(method=zipfile.ZIP_BZIP2)),
    "an empty zip": ("unreadable", mk.file("s.zip", b"")),
    "a text file named .zip": ("unreadable", mk.file("s.zip", b"no archive")),
    "a DICOMDIR": (Right(), mk.disc(whole=False)),
    "a folder with a DICOMDIR": (Right(), mk.disc()),
    "a DICOMDIR that is cut": ("unreadable", mk.disc(mk.cut_directory, whole=False)),
    "a DICOMDIR that names a file outside": ("missing-files", mk.disc(mk.naming_a_file_outside, whole=False)),
    "a DICOMDIR whose last file is lost": ("missing-files", mk.disc(mk.losing(11), whole=False)),
    "a folder with a DICOMDIR whose last file is lost": ("missing-files", mk.disc(mk.losing(11))),
    "a DICOMDIR without its files": ("missing-files", mk.disc(mk.losing(*range(12)), whole=False)),
    "a folder of nothing but a DICOMDIR": ("missing-files", mk.disc(mk.losing(*range(12)))),
    "a folder with a DICOMDIR of other names": (Right(), mk.disc(mk.renamed)),
    "a folder with a DICOMDIR in lower case": (Right(), mk.disc(mk.in_lower_case)),
    "a folder with a broken DICOMDIR": (Right(), mk.disc(mk.cut_directory)),
    "enhanced multi-frame": (Right(), mk.enhanced(order=np.random.default_rng(1).permutation(12))),
    "enhanced multi-frame, RLE": (Right(), mk.enhanced(mk.rle)),
    "enhanced with more groups than frames": ("truncated", mk.enhanced(three_groups_more)),
    "enhanced with all frames at one place": ("duplicate-slices", mk.enhanced(each_at_one_place)),
    "enhanced without groups": ("no-position", mk.enhanced(lambda ds: delattr(ds, "PerFrameFunctionalGroupsSequence"))),
    "NIfTI": (Right(), mk.nifti()),
    "NIfTI, compressed": (Right(), mk.nifti(name="v.nii.gz")),
    "NIfTI of one slice": ("not-a-volume", mk.nifti(np.zeros((20, 24), np.int16))),
    "NIfTI over time": ("not-a-volume", mk.nifti(np.zeros((20, 24, 12, 3), np.int16))),
    "NIfTI with a fourth axis of one": (Right(), mk.nifti(chest().transpose(2, 1, 0)[..., None])),
    "NIfTI half without numbers": ("not-finite", mk.nifti(mk.without_numbers(0.6))),
    "NIfTI with an affine of zeros": ("no-orientation", mk.nifti(affine=None)),
    "NIfTI with a flat affine": ("no-pixel-spacing", mk.nifti(change=lambda b: b[:312] + bytes(16) + b[328:])),
    "NIfTI with a leaning axis": ("gantry-tilt", mk.nifti(affine=mk.leaning(15))),
    "NIfTI in metres": ("implausible-spacing", mk.nifti(affine=np.diag([0.0007, 0.0008, 0.0025, 1]))),
    "NIfTI cut in its values": ("unreadable", mk.nifti(change=lambda b: b[:3000])),
    "NIfTI, compressed, cut in its header": ("unreadable", mk.nifti(name="v.nii.gz", change=lambda b: b[:100])),
    "NIfTI, compressed, that goes on behind its voxels": (
        "unreadable", mk.nifti(name="v.nii.gz", change=lambda b: gzip.compress(gzip.decompress(b) + bytes(8 << 20))),
        "goes on behind",
    ),
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
    **{f"{why} {n}": (why, mk.series(edit)) for n, (why, edit) in enumerate(EDITS)},
}  # fmt: skip


IMPLICIT = encoded(ImplicitVRLittleEndian)
OTHER_LENGTHS = (0, mk.BYTES // 4, mk.BYTES // 2, mk.BYTES - 2, mk.BYTES + 1, mk.BYTES + 2, mk.BYTES + 38, 1 << 31)


def half_and_filling(content):
    """Half of the pixels, and another element in the room of the others: the file is as long as it should be."""
    filling = struct.pack("<HH2sHL", 0xFFFC, 0xFFFC, b"OB", 0, mk.BYTES // 2 - 12) + bytes(mk.BYTES // 2 - 12)
    return mk.stating(length=mk.BYTES // 2)(content[: -len(filling)] + filling)


PIXEL_HEADERS = {
    "bytes": (Right(), mk.rewritten(mk.stating(b"OB"))),
    **{f"{vr!r} once": (mk.HEADER, mk.rewritten(mk.stating(vr), 5)) for vr in sorted(mk.OTHER_VRS)},
    **{f"{vr!r}": (mk.HEADER, mk.rewritten(mk.stating(vr))) for vr in (b"UN", b"OX", b"OF", b"SQ")},
    **{f"{length} bytes": (mk.HEADER, mk.rewritten(mk.stating(length=length))) for length in OTHER_LENGTHS},
    **{
        f"{n} bytes, implicit VR": (mk.HEADER, mk.rewritten(mk.stating(length=n, implicit=True), edit=IMPLICIT))
        for n in OTHER_LENGTHS
    },
    **{
        f"RLE as {vr!r}": (mk.HEADER, mk.rewritten(mk.stating(vr, length), 5, edit=mk.rle))
        for vr, length in {b"OX": None, b"UN": None, b"OB": 300}.items()
    },
    "half and filling": (mk.HEADER, mk.rewritten(half_and_filling)),
}  # fmt: skip
"""The pixel data have one VR and one length; anything else would put other bytes where the pixels should be."""


@pytest.mark.parametrize("name", CT | PIXEL_HEADERS)
def test_ct(tmp_path, monkeypatch, name):
    monkeypatch.setattr(dicom_files, "ELEMENT_READS", 20_000)
    folder = tmp_path / "some" / "where" / "deep"
    folder.mkdir(parents=True)
    check_ct(folder, *(CT | PIXEL_HEADERS)[name])
    assert sorted(tmp_path.iterdir()) == [tmp_path / "some"]  # nothing is unpacked


def test_the_sites_limits_hold(tmp_path):
    study, archive, path = mk.packed()(tmp_path).with_suffix(""), tmp_path / "s.zip", tmp_path / "f.png"
    Image.fromarray(mk.GREY).save(path)
    for limit, value, read, image in (
        ("voxels", 12 * 24 * 20 - 1, read_ct, study), ("pixels", 24 * 20 - 1, read_ct, study),
        ("file_bytes", 900, read_ct, study), ("archive_bytes", 12 * 900, read_ct, archive),
        ("archive_members", 11, read_ct, archive), ("pixels", 40 * 60 - 1, read_radiograph, path),
    ):  # fmt: skip
        with applied(Limits(**{limit: value})), refused("too-large", limit):
            read(image)
    with applied(Limits(voxels=12 * 24 * 20, pixels=24 * 20, archive_members=12)):
        assert read_ct(archive).hu.shape == read_ct(study).hu.shape == (12, 24, 20)
    with applied(Limits(pixels=40 * 60)):
        assert read_radiograph(path).shape == (40, 60)


def test_a_limit_ends_with_its_block(monkeypatch):
    clock = iter((0.0, 1.0, 3.0))
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with applied(Limits(seconds_per_study=2)):
        limits.check_time("a study")
        with refused("too-slow", "a study: not read within 2 s"):
            limits.check_time("a study")
    assert limits.current() == Limits()


@pytest.mark.parametrize("broken", [mk.deflated_zeros(), mk.deflated_zeros(preamble=False), mk.zeros(8 << 20)])
def test_who_asks_for_headers_alone_unpacks_no_bomb_and_gets_no_traceback(tmp_path, broken):
    broken(tmp_path)
    assert not [*dicom_files.headers(tmp_path)]


def test_one_hostile_study_among_good_ones(tmp_path):
    images = [mk.nifti_header((32767, 32767, 300))(tmp_path), mk.zeros(1 << 16)(tmp_path), tmp_path / "good"]
    write_series(images[2], chest(size=(64, 64)))
    visits = [Visit("P", f"v{n}", datetime(2020, 1, n + 1), image, "Clear.", "ct") for n, image in enumerate(images)]
    config = Size(16, 4)
    errors = prepare_visits(visits, config, tmp_path / "cache", workers=1).errors
    assert {v: e.reason for v, e in errors.items()} == {visits[0]: "too-large", visits[1]: "no-pixel-data"}
    tight = prepare_visits(visits, config, tmp_path / "cache2", workers=1, limits=Limits(voxels=10))
    assert tight.errors[visits[2]].reason == "too-large"
    again = prepare_visits(visits, config, tmp_path / "cache2", workers=1)  # the limit was raised
    assert visits[2] not in again.errors and isinstance(again.errors[visits[0]], DataError)
