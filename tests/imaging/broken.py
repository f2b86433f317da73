"""Makers of broken images: each writes into a folder and returns the path to read."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
from make_dicom import SPACING, chest, enhanced_dataset, put, write_radiograph, write_series
from PIL import Image
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.fileset import FileSet
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, JPEGBaseline8Bit, RLELossless

Make = Callable[[Path], Path]
MARK = bytes(128) + b"DICM"
GREY = (np.add.outer(np.arange(40), np.arange(60)) * 2).astype(np.uint8)
AFFINE = np.diag([-SPACING[2], -SPACING[1], SPACING[0], 1.0])


def rle(ds, i=0):
    ds.compress(RLELossless, generate_instance_uid=False)


def series(edit=lambda ds, i: None, hu=None) -> Make:
    def make(folder):
        write_series(folder / "s", hu, edit=edit)
        return folder / "s"

    return make


def rewritten(change: Callable[[bytes], bytes], at: int | None = None, edit=lambda ds, i: None) -> Make:
    """A series whose files (or one of them) are changed on disk."""

    def make(folder):
        write_series(folder / "s", edit=edit)
        for n, file in enumerate(sorted((folder / "s").iterdir())):
            if at in (None, n):
                file.write_bytes(change(file.read_bytes()))
        return folder / "s"

    return make


def beside(edit) -> Make:
    """A good series and further files in its folder."""

    def make(folder):
        write_series(folder / "s")
        write_series(folder / "s", edit=edit, prefix="x")
        return folder / "s"

    return make


def file(name: str, content: bytes) -> Make:
    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def jpeg_8_bit(ds, i):
    """A lossy JPEG of the windowed picture that claims to be Hounsfield units."""
    buffer = io.BytesIO()
    Image.fromarray((np.arange(480) % 256).astype(np.uint8).reshape(24, 20)).save(buffer, "JPEG", quality=60)
    put(BitsAllocated=8, BitsStored=8, HighBit=7, LossyImageCompression="01")(ds)
    ds.file_meta.TransferSyntaxUID, ds.PixelData = JPEGBaseline8Bit, encapsulate([buffer.getvalue()])


def under(syntax, content: bytes):
    """Whatever it is, under the name of a transfer syntax."""

    def edit(ds, i):
        ds.file_meta.TransferSyntaxUID = syntax
        if not ds.file_meta.TransferSyntaxUID.is_private:
            ds.PixelData = encapsulate([content])

    return edit


def as_raw_pixels(content: bytes) -> bytes:
    """RLE under the name of raw pixels."""
    old, new = RLELossless.encode(), ExplicitVRLittleEndian.encode()
    return content.replace(old + b"\0" * (len(old) % 2), new.ljust(len(old) + len(old) % 2, b"\0"), 1)


def a_dead_link(folder):
    write_series(folder / "s")
    (folder / "s" / "a.dcm").symlink_to(folder / "nowhere.dcm")
    return folder / "s"


def a_pipe(folder):
    write_series(folder / "s")
    os.mkfifo(folder / "s" / "pipe.dcm")
    return folder / "s"


def packed(
    change=lambda archive: None, prefix="", method=zipfile.ZIP_DEFLATED, edit: Callable[[bytes], bytes] = bytes
) -> Make:
    """A zip of a good series and of what is added to it; ``edit`` changes its bytes."""

    def make(folder):
        write_series(folder / "s")
        with zipfile.ZipFile(folder / "s.zip", "w", method) as archive:
            for item in sorted((folder / "s").iterdir()):
                archive.write(item, f"{prefix}{item.name}")
            change(archive)
        (folder / "s.zip").write_bytes(edit((folder / "s.zip").read_bytes()))
        return folder / "s.zip"

    return make


def at_each(mark: bytes, place: int, number: int, size: int = 4) -> Callable[[bytes], bytes]:
    """Another number at a place behind each mark."""
    new = number.to_bytes(size, "little")

    def edit(content):
        parts = content.split(mark)
        return mark.join([parts[0], *(p[: place - 4] + new + p[place - 4 + len(new) :] for p in parts[1:])])

    return edit


def flipped(content: bytes) -> bytes:
    """Damage in the packed bytes of the second member."""
    at = content.index(b"PK\x03\x04", 4) + 300
    return content[:at] + bytes(b ^ 0xFF for b in content[at : at + 40]) + content[at + 40 :]


def bomb(archive):
    """A member that unpacks to 100 MB of zeros is not unpacked: it does not begin like DICOM."""
    with archive.open("zeros.dcm", "w") as member:
        for _ in range(100):
            member.write(bytes(1 << 20))


def disc(change: Callable[[Path], object] = lambda folder: None, whole=True) -> Make:
    """A DICOMDIR with its files, or the folder of both."""

    def patient(ds, i):
        put(PatientName="P", StudyDate="20200101", StudyTime="12", StudyID="1", AccessionNumber="")(ds, i)
        put(SeriesNumber=1, InstanceNumber=i + 1)(ds, i)

    def make(folder):
        write_series(folder / "s", edit=patient)
        files = FileSet()
        for slice_ in (folder / "s").iterdir():
            files.add(slice_)
        files.write(folder / "disc")
        change(folder / "disc")
        return folder / "disc" if whole else folder / "disc" / "DICOMDIR"

    return make


def naming_a_file_outside(folder):
    """The first record of the directory names a file above the disc."""
    secret = folder.parent / "SECRET"
    sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "DICOMDIR")[0].rename(secret)
    ds = dcmread(folder / "DICOMDIR")
    for record in ds.DirectoryRecordSequence:
        if "ReferencedFileID" in record and not folder.joinpath(*record.ReferencedFileID).exists():
            record.ReferencedFileID = ["..", "SECRET"]
    ds.save_as(folder / "DICOMDIR")


def _slices(folder):
    """The files of a disc from foot to head."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "DICOMDIR"]
    return sorted(files, key=lambda slice_: float(dcmread(slice_).ImagePositionPatient[2]))


def losing(*gone) -> Callable[[Path], None]:
    def change(folder):
        for lost in [_slices(folder)[i] for i in gone]:
            lost.unlink()

    return change


def renamed(folder):
    for i, slice_ in enumerate(_slices(folder)):
        slice_.rename(folder / f"slice{i}")


def in_lower_case(folder):
    for slice_ in _slices(folder):
        lower = folder / str(slice_.relative_to(folder)).lower()
        lower.parent.mkdir(parents=True, exist_ok=True)
        slice_.rename(lower)


def cut_directory(folder):
    (folder / "DICOMDIR").write_bytes(b"no directory")


def enhanced(edit: Callable[[Dataset], object] = lambda ds: None) -> Make:
    """One multi-frame file."""

    def make(folder):
        ds = enhanced_dataset(chest(), range(12))
        edit(ds)
        ds.save_as(folder / "enhanced.dcm", enforce_file_format=True)
        return folder / "enhanced.dcm"

    return make


def nifti(values=None, affine=AFFINE, name="v.nii", change: Callable[[bytes], bytes] = bytes) -> Make:
    def make(folder):
        image = nibabel.Nifti1Image(chest().transpose(2, 1, 0) if values is None else values, affine)
        written = folder / ("v.nii.gz" if name.endswith("gz") else "v.nii")
        nibabel.save(image, written)
        content = written.read_bytes()
        written.unlink()
        return file(name, change(content))(folder)

    return make


def nifti_header(shape=(4, 4, 4), *, offset=352.0, name="v.nii") -> Make:
    """A header that states much, and nothing behind it."""
    header = nibabel.Nifti1Header()
    header.set_data_shape(shape)
    header.set_data_dtype(np.int16)
    header["vox_offset"], header["sform_code"], header["magic"] = offset, 1, b"n+1"
    header["srow_x"], header["srow_y"], header["srow_z"] = np.eye(4)[:3]
    content = header.binaryblock + bytes(4)
    return file(name, gzip.compress(content) if name.endswith("gz") else content)


def without_numbers(share):
    values = np.ascontiguousarray(chest().transpose(2, 1, 0), np.float32)
    values.ravel()[: int(values.size * share)] = np.nan
    return values


def leaning(degrees):
    """An affine whose z axis leans."""
    affine = AFFINE.copy()
    affine[1, 2] = SPACING[0] * np.tan(np.radians(degrees))
    return affine


def with_meta(rest: bytes, syntax: bytes = b"1.2.840.10008.1.2.1\0") -> bytes:
    meta = b"\x02\0\x10\0UI" + struct.pack("<H", len(syntax)) + syntax
    return MARK + b"\x02\0\0\0UL\x04\0" + struct.pack("<L", len(meta)) + meta + rest


def zeros(size, start=MARK) -> Make:
    """A sparse file of zeros behind a start."""

    def make(folder):
        with (folder / "zeros.dcm").open("wb") as sparse:
            sparse.write(start)
            sparse.truncate(size)
        return folder / "zeros.dcm"

    return make


EMPTY_ITEMS = with_meta(b"\x08\x00\x10\x11SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\0\0\0\0" * 200_000)
"""One sequence of undefined length, of many empty items."""


def long_element(size, compressed=False, alone=False) -> Make:
    """A series whose first slice holds a private element of this many bytes (sparse) before its pixels."""

    def edit(ds, i):
        ds.add_new(0x00430010, "LO", "MAKER")
        ds.add_new(0x00431001, "OB", b"HERE")
        if compressed:
            rle(ds)

    def make(folder):
        write_series(folder / "s", edit=edit)
        first = sorted((folder / "s").iterdir())[0]
        content = first.read_bytes()
        place = content.index(b"HERE")
        with first.open("wb") as sparse:
            sparse.write(content[: place - 4] + struct.pack("<L", size))
            sparse.seek(size, 1)
            sparse.write(content[place + 4 :])
        return first if alone else folder / "s"

    return make


def deflated_zeros(folder):
    """A dataset of 48 MiB of zeros, deflated to 48 kB."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    content = packer.compress(bytes(48 << 20)) + packer.flush()
    syntax = DeflatedExplicitVRLittleEndian.encode()
    return file("d.dcm", with_meta(content, syntax + b"\0" * (len(syntax) % 2)))(folder)


def a_member_of_zeros(folder):
    """20 MiB of zeros behind a mark, packed to 20 kB."""
    with zipfile.ZipFile(folder / "s.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.dcm", MARK + bytes(20 << 20))
    return folder / "s.zip"


def picture(name, change=lambda image: image, cut=None, **options) -> Make:
    def make(folder):
        change(Image.fromarray(GREY)).save(folder / name, **options)
        (folder / name).write_bytes((folder / name).read_bytes()[:cut])
        return folder / name

    return make


def stated_picture(name, width, height) -> Make:
    """A picture whose header states another size."""

    def make(folder):
        Image.fromarray(GREY.astype(np.float32) if name.endswith("tif") else GREY).save(folder / name)
        content = bytearray((folder / name).read_bytes())
        if name.endswith("tif"):
            for tag, value in ((256, width), (257, height)):
                place = next(i for i in range(4, len(content)) if content[i : i + 2] == struct.pack("<H", tag))
                content[place + 2 : place + 12] = struct.pack("<HLL", 4, 1, value)
        else:
            content[16:24] = struct.pack(">2L", width, height)
            content[29:33] = struct.pack(">L", zlib.crc32(content[12:29]))
        return file(name, bytes(content))(folder)

    return make


def radiograph(values=None, **changes) -> Make:
    stored = (GREY.astype(np.uint16) << 4) if values is None else values
    return lambda folder: write_radiograph(folder / "f.dcm", stored, **changes)


def without_transfer_syntax(folder):
    path = radiograph()(folder)
    path.write_bytes(path.read_bytes().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.5.1.4\0"))
    return path


def pages(folder):
    first = Image.fromarray(GREY)
    first.save(folder / "f.tif", save_all=True, append_images=[Image.fromarray(255 - GREY)])
    return folder / "f.tif"


def see_through(image):
    image = image.convert("RGBA")
    image.putalpha(0)
    return image


def noise(image):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60), np.uint8))


def not_finite(image):
    values = GREY.astype(np.float32)
    values[0, 0] = np.nan
    return Image.fromarray(values)
