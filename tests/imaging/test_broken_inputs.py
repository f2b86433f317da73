"""A corpus of broken inputs: each gives exactly its reason, or the right volume; none a crash, none a wrong volume.

Beside the kinds of :mod:`test_ct_refusals` (one change in the header of a series), these are whole inputs: folders,
archives, NIfTI files and radiographs.
"""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_dicom import (
    ORIGIN,
    SPACING,
    another_series,
    chest,
    enhanced_dataset,
    only,
    put,
    write_radiograph,
    write_series,
)
from PIL import Image
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.fileset import FileSet
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
    generate_uid,
)
from refused import refused

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.radiograph import read_radiograph

pytestmark = pytest.mark.filterwarnings("ignore")
Make = Callable[[Path], Path]
RIGHT = "the right volume"


def series(edit=lambda ds, i: None, hu=None) -> Make:
    def make(folder):
        write_series(folder / "s", hu, edit=edit)
        return folder / "s"

    return make


def rewritten(change: Callable[[bytes], bytes], at: int | None = None) -> Make:
    """A good series whose files (or one of them) are changed on disk."""

    def make(folder):
        write_series(folder / "s")
        for n, file in enumerate(sorted((folder / "s").iterdir())):
            if at in (None, n):
                file.write_bytes(change(file.read_bytes()))
        return folder / "s"

    return make


def beside(edit, of=range(12), prefix="x") -> Make:
    """A good series and further files in its folder."""

    def make(folder):
        write_series(folder / "s")
        write_series(folder / "s", edit=lambda ds, i: edit(ds, i) if i in of else Dataset(), prefix=prefix)
        return folder / "s"

    return make


def scout(ds, i):
    another_series(ds, 8)
    ds.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]


def jpeg_8_bit(ds, i):
    """A lossy JPEG of the windowed picture that claims to be Hounsfield units."""
    buffer = io.BytesIO()
    Image.fromarray((np.arange(480) % 256).astype(np.uint8).reshape(24, 20)).save(buffer, "JPEG", quality=60)
    ds.BitsAllocated = ds.BitsStored = 8
    ds.HighBit, ds.LossyImageCompression = 7, "01"
    ds.file_meta.TransferSyntaxUID, ds.PixelData = JPEGBaseline8Bit, encapsulate([buffer.getvalue()])


def native_under_a_compressed_name(ds, i):
    ds.file_meta.TransferSyntaxUID, ds.PixelData = JPEG2000Lossless, encapsulate([bytes(960)])


def compressed_under_a_native_name(folder):
    write_series(folder / "s", edit=lambda ds, i: ds.compress(RLELossless, generate_instance_uid=False))
    for file in (folder / "s").iterdir():
        old, new = RLELossless.encode(), ExplicitVRLittleEndian.encode()
        content = file.read_bytes()
        file.write_bytes(content.replace(old + b"\0" * (len(old) % 2), new.ljust(len(old) + len(old) % 2, b"\0"), 1))
    return folder / "s"


def nothing(folder):
    (folder / "s").mkdir()
    return folder / "s"


def named_dcm(content: bytes) -> Make:
    def make(folder):
        (folder / "x.dcm").write_bytes(content)
        return folder / "x.dcm"

    return make


def dead_link(folder):
    write_series(folder / "s")
    (folder / "s" / "a.dcm").symlink_to(folder / "nowhere.dcm")
    return folder / "s"


def pipe(folder):
    write_series(folder / "s")
    os.mkfifo(folder / "s" / "pipe.dcm")
    return folder / "s"


def packed(change=lambda archive: None, prefix="", cut: slice | None = None, flip=False) -> Make:
    """A zip of a good series."""

    def make(folder):
        write_series(folder / "s")
        file = folder / "s.zip"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for item in sorted((folder / "s").iterdir()):
                archive.write(item, f"{prefix}{item.name}")
            change(archive)
        content = bytearray(file.read_bytes())
        if flip:
            at = content.index(b"PK\x03\x04", 4) + 300
            content[at : at + 40] = bytes(b ^ 0xFF for b in content[at : at + 40])
        file.write_bytes(content[cut] if cut else content)
        return file

    return make


def bomb(archive):
    """A member that unpacks to 100 MB of zeros is not unpacked: it does not begin like DICOM."""
    with archive.open("zeros.dcm", "w") as member:
        for _ in range(100):
            member.write(bytes(1 << 20))


def a_lying_size(folder):
    """A zip whose directory claims that a member of a few bytes unpacks to nearly 4 GB."""
    file = packed()(folder)
    content = bytearray(file.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 24 : at + 28] = (0xFFFFFFF0).to_bytes(4, "little")
    file.write_bytes(content)
    return file


def encrypted(folder):
    file = packed()(folder)
    content = bytearray(file.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := content.find(mark, at + 1)) >= 0:
            content[at + place] |= 1
    file.write_bytes(content)
    return file


def disc(change: Callable[[Path], None]) -> Make:
    """A DICOMDIR with its files."""

    def make(folder):
        def patient(ds, i):
            put(PatientName="P", StudyDate="20200101", StudyTime="12", StudyID="1", AccessionNumber="")(ds, i)
            put(SeriesNumber=1, InstanceNumber=i + 1)(ds, i)

        write_series(folder / "s", edit=patient)
        files = FileSet()
        for file in (folder / "s").iterdir():
            files.add(file)
        files.write(folder / "disc")
        change(folder / "disc")
        return folder / "disc" / "DICOMDIR"

    return make


def outside(folder):
    """The first record of the directory names a file above the disc."""
    secret = folder.parent / "SECRET"
    first = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "DICOMDIR")[0]
    first.rename(secret)
    ds = dcmread(folder / "DICOMDIR")
    for record in ds.DirectoryRecordSequence:
        if "ReferencedFileID" in record and not folder.joinpath(*record.ReferencedFileID).exists():
            record.ReferencedFileID = ["..", "SECRET"]
    ds.save_as(folder / "DICOMDIR")


def images(folder):
    """The files of a disc from foot to head."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "DICOMDIR"]
    return sorted(files, key=lambda file: float(dcmread(file).ImagePositionPatient[2]))


def without(*gone) -> Callable[[Path], None]:
    def change(folder):
        for file in [images(folder)[i] for i in gone]:
            file.unlink()

    return change


def renamed(folder):
    for i, file in enumerate(images(folder)):
        file.rename(folder / f"slice{i}")


def in_lower_case(folder):
    for file in images(folder):
        lower = folder / str(file.relative_to(folder)).lower()
        lower.parent.mkdir(parents=True, exist_ok=True)
        file.rename(lower)


def enhanced(edit=lambda ds: None) -> Make:
    """One multi-frame file."""

    def make(folder):
        ds = enhanced_dataset(chest(), range(12))
        edit(ds)
        ds.save_as(folder / "enhanced.dcm", enforce_file_format=True)
        return folder / "enhanced.dcm"

    return make


def compress(syntax):
    def edit(ds):
        ds.compress(syntax, generate_instance_uid=False)

    return edit


def frames_without_end(ds):
    ds.PerFrameFunctionalGroupsSequence.extend(ds.PerFrameFunctionalGroupsSequence[:3])


def all_frames_at_one_place(ds):
    for frame in ds.PerFrameFunctionalGroupsSequence:
        frame.PlanePositionSequence[0].ImagePositionPatient = list(ORIGIN)


AFFINE = np.diag([-SPACING[2], -SPACING[1], SPACING[0], 1.0])


def nifti(values=None, affine=AFFINE, name="v.nii", change=None, edit=lambda image: None) -> Make:
    def make(folder):
        data = chest().transpose(2, 1, 0) if values is None else values
        image = nibabel.Nifti1Image(data, affine)
        edit(image)
        nibabel.save(image, folder / ("v.nii.gz" if name.endswith("gz") else "v.nii"))
        written = folder / ("v.nii.gz" if name.endswith("gz") else "v.nii")
        content = written.read_bytes()
        written.unlink()
        (folder / name).write_bytes(change(content) if change else content)
        return folder / name

    return make


def floats(share):
    values = np.ascontiguousarray(chest().transpose(2, 1, 0), np.float32)
    values.ravel()[: int(values.size * share)] = np.nan
    return values


def turned(degrees):
    """An affine whose z axis leans."""
    affine = AFFINE.copy()
    affine[1, 2] = SPACING[0] * np.tan(np.radians(degrees))
    return affine


CT: dict[str, tuple[str, Make]] = {
    "a good series": (RIGHT, series()),
    "nothing at all": ("no-image", lambda folder: folder / "nowhere"),
    "an empty folder": ("no-dicom", nothing),
    "a text file named .dcm": ("no-dicom", named_dcm(b"Findings: clear lungs. " * 20)),
    "an empty file named .dcm": ("no-dicom", named_dcm(b"")),
    "zeros named .dcm": ("no-dicom", named_dcm(bytes(200))),
    "files without a preamble": (RIGHT, rewritten(lambda b: b[132:])),
    "a preamble and nothing else": ("no-pixel-data", named_dcm(bytes(128) + b"DICM")),
    "a JPEG named .dcm": ("no-dicom", named_dcm(b"\xff\xd8\xff\xe0" + bytes(400))),
    "a NIfTI file named .dcm": ("no-dicom", nifti(name="v.dcm")),
    "a dead link in the folder": ("unreadable", dead_link),
    "a pipe in the folder": (RIGHT, pipe),
    "scouts beside the series": (RIGHT, beside(scout, of=(0, 1))),
    "secondary captures only": ("secondary-capture", series(put(SOPClassUID="1.2.840.10008.5.1.4.1.1.7.4"))),
    "positions that are no number": ("bad-header", rewritten(lambda b: b.replace(b"-11.0\\-22.0", b"NaN\\NaN    "))),
    "one position that is infinite": (
        "bad-header",
        rewritten(lambda b: b.replace(b"-11.0\\-22.0", b"inf\\-22.0  "), 3),
    ),
    "rows too few for the pixels": ("wrong-pixel-count", series(put(Rows=20))),
    "columns one too few": ("wrong-pixel-count", series(put(Columns=19))),
    "rows too many for the pixels": ("truncated", series(put(Rows=30))),
    "one slice with fewer rows": ("wrong-pixel-count", series(only(4, put(Rows=20)))),
    "8 bits that claim to be HU": ("lossy-8bit", series(jpeg_8_bit)),
    "12 bits at the top of 16": ("bad-header", series(put(HighBit=15))),
    "more bits stored than allocated": ("bad-header", series(put(BitsStored=24, HighBit=23))),
    "one bit allocated": ("wrong-pixel-count", series(put(BitsAllocated=1, BitsStored=1, HighBit=0))),
    "zeros under the name of JPEG 2000": ("undecodable", series(native_under_a_compressed_name)),
    "RLE under the name of raw pixels": ("wrong-pixel-count", compressed_under_a_native_name),
    "spacing in metres": ("implausible-spacing", series(put(PixelSpacing=[0.0008, 0.0007]))),
    "spacing in micrometres": ("implausible-spacing", series(put(PixelSpacing=[800, 700]))),
    "negative spacing": ("no-pixel-spacing", series(put(PixelSpacing=[-0.8, 0.7]))),
    "one spacing of two": ("bad-header", series(put(PixelSpacing=[0.8]))),
    "slices in one place": ("duplicate-slices", series(put(ImagePositionPatient=list(ORIGIN)))),
    "one slice without rescale": ("no-rescale", series(only(7, put(RescaleIntercept=None)))),
    "a picture of nothing but air": ("blank", series(hu=np.full((12, 24, 20), -1000, np.int16))),
    "a constant picture": ("implausible-hu", series(hu=np.full((12, 24, 20), 40, np.int16))),
    "too few slices": ("too-few-slices", series(hu=chest(5))),
    "two patients in one folder": (
        "mixed-patients",
        beside(lambda ds, i: (another_series(ds, 5), put(PatientID="Q")(ds, i))[0]),
    ),
    "two studies in one folder": (
        "several-studies",
        beside(lambda ds, i: (another_series(ds, 5), put(StudyInstanceUID="1.2.9")(ds, i))[0]),
    ),
    "two series under one UID": ("duplicate-slices", beside(put(SOPInstanceUID=generate_uid()))),
    "every file cut in its header": ("truncated", rewritten(lambda b: b[:420])),
    "one file cut in its pixels": ("truncated", rewritten(lambda b: b[:-11], 2)),
    "one file of zeros": ("unreadable", rewritten(lambda b: bytes(len(b)), 5)),
    "line ends changed by a text transfer": ("no-pixel-data", rewritten(lambda b: b.replace(b"\n", b"\r\n"))),
    "a deflated series": (
        RIGHT,
        series(lambda ds, i: put(TransferSyntaxUID=DeflatedExplicitVRLittleEndian)(ds.file_meta, i)),
    ),
    "a zip": (RIGHT, packed()),
    "a zip with names that climb": (RIGHT, packed(prefix="../../../outside/")),
    "a zip with absolute names": (RIGHT, packed(prefix="/outside/")),
    "a zip bomb beside the series": ("unreadable", packed(bomb)),
    "a zip that lies about a size": ("too-large", a_lying_size),
    "a zip cut in half": ("unreadable", packed(cut=slice(0, 4000))),
    "a zip with a damaged member": ("unreadable", packed(flip=True)),
    "an encrypted zip": ("unreadable", encrypted),
    "an empty zip": ("unreadable", lambda f: [(f / "s.zip").write_bytes(b""), f / "s.zip"][1]),
    "a text file named .zip": ("unreadable", lambda f: [(f / "s.zip").write_text("no archive"), f / "s.zip"][1]),
    "a DICOMDIR": (RIGHT, disc(lambda folder: None)),
    "a folder with a DICOMDIR": (RIGHT, lambda folder: disc(lambda f: None)(folder).parent),
    "a DICOMDIR that is cut": ("unreadable", disc(lambda f: (f / "DICOMDIR").write_bytes(b"no directory") and None)),
    "a DICOMDIR that names a file outside": ("missing-files", disc(outside)),
    "a DICOMDIR whose last file is lost": ("missing-files", disc(without(11))),
    "a folder with a DICOMDIR whose last file is lost": ("missing-files", lambda f: disc(without(11))(f).parent),
    "a DICOMDIR without its files": ("missing-files", disc(without(*range(12)))),
    "a folder of nothing but a DICOMDIR": ("missing-files", lambda f: disc(without(*range(12)))(f).parent),
    "a folder with a DICOMDIR of other names": (RIGHT, lambda f: disc(renamed)(f).parent),
    "a folder with a DICOMDIR in lower case": (RIGHT, lambda f: disc(in_lower_case)(f).parent),
    "a folder with a broken DICOMDIR": (
        RIGHT,
        lambda f: disc(lambda d: (d / "DICOMDIR").write_bytes(b"no directory") and None)(f).parent,
    ),
    "enhanced multi-frame": (RIGHT, enhanced()),
    "enhanced multi-frame, RLE": (RIGHT, enhanced(compress(RLELossless))),
    "enhanced with more groups than frames": ("truncated", enhanced(frames_without_end)),
    "enhanced with all frames at one place": ("duplicate-slices", enhanced(all_frames_at_one_place)),
    "enhanced without groups": ("no-position", enhanced(lambda ds: delattr(ds, "PerFrameFunctionalGroupsSequence"))),
    "NIfTI": (RIGHT, nifti()),
    "NIfTI, compressed": (RIGHT, nifti(name="v.nii.gz")),
    "NIfTI of one slice": ("not-a-volume", nifti(np.zeros((20, 24), np.int16))),
    "NIfTI over time": ("not-a-volume", nifti(np.zeros((20, 24, 12, 3), np.int16))),
    "NIfTI with a fourth axis of one": (RIGHT, nifti(chest().transpose(2, 1, 0)[..., None])),
    "NIfTI half without numbers": ("not-finite", nifti(floats(0.6))),
    "NIfTI with an affine of zeros": ("no-orientation", nifti(affine=None)),
    "NIfTI with a flat affine": ("no-pixel-spacing", nifti(change=lambda b: b[:312] + bytes(16) + b[328:])),
    "NIfTI with a leaning axis": ("gantry-tilt", nifti(affine=turned(15))),
    "NIfTI in metres": ("implausible-spacing", nifti(affine=np.diag([0.0007, 0.0008, 0.0025, 1]))),
    "NIfTI cut in its values": ("unreadable", nifti(change=lambda b: b[:3000])),
    "NIfTI cut in its header": ("unreadable", nifti(change=lambda b: b[:200])),
    "NIfTI, compressed, cut": ("unreadable", nifti(name="v.nii.gz", change=lambda b: b[:2000])),
    "NIfTI, compressed, cut in its header": ("unreadable", nifti(name="v.nii.gz", change=lambda b: b[:100])),
    "NIfTI named .nii.gz without compression": ("unreadable", nifti(name="x.nii.gz", change=gzip.decompress)),
    "DICOM named .nii": ("unreadable", lambda f: [write_series(f), (f / "003.dcm").rename(f / "v.nii")][1]),
    "NIfTI between 0 and 1": ("implausible-hu", nifti(np.random.default_rng(0).random((20, 24, 12), np.float32))),
    "NIfTI of zeros": ("implausible-hu", nifti(np.zeros((20, 24, 12), np.int16))),
    "NIfTI in colour": ("not-a-volume", nifti(np.zeros((9, 9, 9), [("R", "u1"), ("G", "u1"), ("B", "u1")]))),
    "NIfTI of 8 bits": ("lossy-8bit", nifti(np.zeros((9, 9, 9), np.uint8))),
    "NIfTI of few slices": ("too-few-slices", nifti(chest(3).transpose(2, 1, 0))),
    "no NIfTI": ("no-image", lambda folder: folder / "v.nii"),
}


@pytest.mark.parametrize("name", CT)
def test_ct(tmp_path, name):
    expected, make = CT[name]
    path = make(tmp_path)
    before = {file for file in tmp_path.parent.rglob("*") if file.name != "pipe.dcm"}
    if expected == RIGHT:
        assert np.array_equal(read_ct(path).hu, chest())
    else:
        with refused(expected) as error:
            read_ct(path)
        assert str(tmp_path) not in error.value.public
    assert {file for file in tmp_path.parent.rglob("*") if file.name != "pipe.dcm"} == before  # nothing is unpacked


GREY = (np.add.outer(np.arange(40), np.arange(60)) * 2).astype(np.uint8)


def picture(name, change=lambda image: image, cut=None, **options) -> Make:
    def make(folder):
        change(Image.fromarray(GREY)).save(folder / name, **options)
        if cut:
            (folder / name).write_bytes((folder / name).read_bytes()[:cut])
        return folder / name

    return make


def radiograph(values=None, **changes) -> Make:
    stored = (GREY.astype(np.uint16) << 4) if values is None else values
    return lambda folder: write_radiograph(folder / "f.dcm", stored, **changes)


def pages(folder):
    first = Image.fromarray(GREY)
    first.save(folder / "f.tif", save_all=True, append_images=[Image.fromarray(255 - GREY)])
    return folder / "f.tif"


def see_through(image):
    image = image.convert("RGBA")
    image.putalpha(0)
    return image


def noisy(image):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60), np.uint8))


COLOUR = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 1}


def float_tiff(folder):
    values = GREY.astype(np.float32)
    values[0, 0] = np.nan
    Image.fromarray(values).save(folder / "f.tif")
    return folder / "f.tif"


RADIOGRAPHS: dict[str, tuple[str, Make]] = {
    "PNG": (RIGHT, picture("f.png")),
    "a palette": (RIGHT, picture("f.png", lambda image: image.convert("P"))),
    "CMYK": (RIGHT, picture("f.tif", lambda image: image.convert("CMYK"))),
    "alpha": (RIGHT, picture("f.png", lambda image: image.convert("LA"))),
    "all transparent": (RIGHT, picture("f.png", see_through)),
    "a PNG named .jpg": (RIGHT, picture("f.jpg", format="PNG")),
    "a cut PNG": ("unreadable", picture("f.png", noisy, cut=900)),
    "a cut JPEG": ("unreadable", picture("f.jpg", cut=500, quality=100)),
    "an empty PNG": ("unreadable", lambda f: [(f / "f.png").write_bytes(b""), f / "f.png"][1]),
    "one pixel": ("blank", picture("f.png", lambda image: image.crop((0, 0, 1, 1)))),
    "a stamp": ("too-small", picture("f.png", lambda image: image.crop((0, 0, 12, 9)))),
    "all black": ("blank", picture("f.png", lambda image: image.point(lambda v: 0))),
    "black and white alone": ("not-a-radiograph", picture("f.png", lambda image: image.convert("1"))),
    "several pages": ("not-a-radiograph", pages),
    "values that are no number": ("not-finite", float_tiff),
    "DX": (RIGHT, radiograph()),
    "DX, inverted": (RIGHT, radiograph(4095 - (GREY.astype(np.uint16) << 4), PhotometricInterpretation="MONOCHROME1")),
    "DX, lateral": ("lateral-view", radiograph(ViewPosition="LL")),
    "DX by a palette": ("not-a-radiograph", radiograph(PhotometricInterpretation="PALETTE COLOR")),
    "DX of an unknown meaning": ("not-a-radiograph", radiograph(PhotometricInterpretation="GREYISH")),
    "DX without a meaning": ("not-a-radiograph", radiograph(PhotometricInterpretation=None)),
    "DX in colour": ("not-a-radiograph", radiograph(np.stack([GREY] * 3).astype(np.uint16), **COLOUR)),
    "DX of several frames": ("not-a-radiograph", radiograph(np.stack([GREY] * 4).astype(np.uint16), NumberOfFrames=4)),
    "DX without pixels": ("no-pixel-data", radiograph(PixelData=None)),
    "DX with too many rows": ("truncated", radiograph(Rows=50)),
    "DX with too few rows": ("wrong-pixel-count", radiograph(Rows=30)),
    "DX with fewer bits than its highest": ("bad-header", radiograph(BitsStored=11)),
    "DX with more bits than there are": ("bad-header", radiograph(BitsStored=17, HighBit=16)),
    "DX that calls unsigned values signed": ("bad-header", radiograph(PixelRepresentation=1)),
    "DX of signed values": (RIGHT, radiograph((GREY.astype(np.int16) << 4) - 2000, PixelRepresentation=1)),
    "DX without rows": ("bad-header", radiograph(Rows=None)),
    "DX with a window of no width": ("bad-header", radiograph(WindowCenter=2000, WindowWidth=0)),
    "DX with slope zero": ("blank", radiograph(RescaleSlope=0, RescaleIntercept=0)),
    "CT as a radiograph": ("not-a-radiograph", radiograph(Modality="CT")),
    "no modality": ("not-a-radiograph", radiograph(Modality=None)),
    "a folder": ("no-image", lambda folder: folder),
    "no file": ("no-image", lambda folder: folder / "f.jpg"),
    "text named .png": ("unreadable", lambda f: [(f / "f.png").write_text("no picture"), f / "f.png"][1]),
    "text named .dcm": ("unreadable", named_dcm(b"clear")),
}  # fmt: skip


@pytest.mark.parametrize("name", RADIOGRAPHS)
def test_radiographs(tmp_path, name):
    expected, make = RADIOGRAPHS[name]
    path = make(tmp_path)
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


RADIOGRAPH_NUMBERS = (*NUMBERS, "NumberOfFrames")


@settings(max_examples=60)
@given(st.sampled_from(RADIOGRAPH_NUMBERS), st.integers(0, 65535))
def test_any_number_in_a_radiographs_header_is_refused_or_read(tmp_path_factory, keyword, value):
    path = radiograph(**{keyword: value})(tmp_path_factory.mktemp("numbers"))
    try:
        assert read_radiograph(path).shape == GREY.shape
    except DataError as error:
        assert error.reason
