"""Makers of images, most of them broken (each writes into a folder and returns the path to read), and their check."""

from __future__ import annotations

import gzip
import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
import pytest
from make_dicom import ORIGIN, SPACING, Edit, chest, encoded, enhanced_dataset, name_of, put, write_series
from PIL import Image
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.fileset import FileSet
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEGBaseline8Bit, RLELossless
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct

Make = Callable[[Path], Path]
MARK = bytes(128) + b"DICM"
GREY = (np.add.outer(np.arange(40), np.arange(60)) * 2).astype(np.uint8)
AFFINE = np.diag([-SPACING[2], -SPACING[1], SPACING[0], 1.0])
AFFINE[:3, 3] = [-ORIGIN[0], -ORIGIN[1], ORIGIN[2]]


class Right(NamedTuple):
    """The volume of :func:`chest` is read, at this distance of slices, and exactly this is noted."""

    notes: tuple[str, ...] = ()
    step: float = SPACING[0]


def check_ct(folder: Path, expected: Right | str | tuple[str, ...], make: Make, said: str = ".") -> None:
    """What ``make`` writes is read as expected, or refused for one of the expected reasons; texts match ``said``."""
    path = make(folder)
    before = set(folder.rglob("*"))
    if isinstance(expected, Right):
        volume = read_ct(path)
        assert set(folder.rglob("*")) == before  # nothing is unpacked
        assert volume.hu.dtype == np.int16 and np.array_equal(volume.hu, chest())
        notes = tuple(note.reason for note in volume.warnings)
        assert notes == expected.notes, volume.warnings
        assert not expected.notes or re.search(said, "\n".join(note.text for note in volume.warnings))
        assert volume.spacing_mm == pytest.approx((expected.step, *SPACING[1:]), abs=0.02)
        assert np.abs(volume.affine - AFFINE @ np.diag([1, 1, expected.step / SPACING[0], 1])).max() < 0.02
        return
    with refused(expected, said) as error:
        read_ct(path)
    assert set(folder.rglob("*")) == before
    assert str(folder) not in error.value.public and ".dcm" not in error.value.public


rle = encoded(RLELossless)
UNCHANGED: Edit = lambda ds, i: None  # noqa: E731


def series(edit: Edit = UNCHANGED, hu=None, change: Callable[[Path], object] = lambda folder: None) -> Make:
    def make(folder):
        write_series(folder / "s", hu, edit=edit)
        change(folder / "s")
        return folder / "s"

    return make


def rewritten(change: Callable[[bytes], bytes], *slices: int, edit: Edit = UNCHANGED) -> Make:
    """A series whose files (or those of some slices) are changed on disk."""
    names = [name_of(i) for i in slices or range(12)]
    return series(edit, change=lambda s: [(s / name).write_bytes(change((s / name).read_bytes())) for name in names])


def beside(edit: Edit, hu=None, first: Edit = UNCHANGED, prefix="x") -> Make:
    """A good series and further files in its folder, of other values."""
    other = chest()[::-1] if hu is None else hu
    return series(first, change=lambda s: write_series(s, other, edit=edit, prefix=prefix))


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


def packed(added=(), prefix="", method=zipfile.ZIP_DEFLATED, edit: Callable[[bytes], bytes] = bytes) -> Make:
    """A zip of a series and of what is added to it; ``edit`` changes its bytes."""

    def make(folder):
        files = {f"{prefix}{item.name}": item.read_bytes() for item in sorted(series()(folder).iterdir())}
        with zipfile.ZipFile(folder / "s.zip", "w", method) as archive:
            for name, content in (files | dict(added)).items():
                archive.writestr(name, content)
        return file("s.zip", edit((folder / "s.zip").read_bytes()))(folder)

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


def disc(change: Callable[[Path], object] = lambda folder: None, whole=True) -> Make:
    """A DICOMDIR with its files, or the folder of both."""

    def patient(ds, i):
        put(PatientName="P", StudyDate="20200101", StudyTime="12", StudyID="1", AccessionNumber="")(ds, i)
        put(SeriesNumber=1, InstanceNumber=i + 1)(ds, i)

    def make(folder):
        write_series(folder / "s", edit=patient)
        files = FileSet()
        for i in range(12):
            files.add(folder / "s" / name_of(i))
        files.write(folder / "disc")
        change(folder / "disc")
        return folder / "disc" if whole else folder / "disc" / "DICOMDIR"

    return make


def _slices(folder):
    """The files of a disc from foot to head."""
    return sorted(folder.rglob("IM*"))


def naming_a_file_outside(folder):
    """The first record of the directory names a file above the disc."""
    _slices(folder)[0].rename(folder.parent / "SECRET")
    ds = dcmread(folder / "DICOMDIR")
    for record in ds.DirectoryRecordSequence:
        if "ReferencedFileID" in record and not folder.joinpath(*record.ReferencedFileID).exists():
            record.ReferencedFileID = ["..", "SECRET"]
    ds.save_as(folder / "DICOMDIR")


def losing(*gone) -> Callable[[Path], object]:
    return lambda folder: [lost.unlink() for lost in [_slices(folder)[i] for i in gone]]


def renamed(folder):
    for i, slice_ in enumerate(_slices(folder)):
        slice_.rename(folder / f"slice{i}")


def in_lower_case(folder):
    for path in sorted(set(folder.rglob("*")) - {folder / "DICOMDIR"}, reverse=True):  # files before their folders
        path.rename(path.with_name(path.name.lower()))


def cut_directory(folder):
    (folder / "DICOMDIR").write_bytes(b"no directory")


def enhanced(edit: Callable[[Dataset], object] = lambda ds: None, order=range(12)) -> Make:
    """One multi-frame file."""

    def make(folder):
        ds = enhanced_dataset(chest(), order)
        edit(ds)
        ds.save_as(folder / "enhanced.dcm", enforce_file_format=True)
        return folder / "enhanced.dcm"

    return make


def nifti(values=None, affine=AFFINE, name="v.nii", change: Callable[[bytes], bytes] = bytes) -> Make:
    content = nibabel.Nifti1Image(chest().transpose(2, 1, 0) if values is None else values, affine).to_bytes()
    return file(name, change(gzip.compress(content) if name.endswith("gz") else content))


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
        path = file("zeros.dcm", start)(folder)
        os.truncate(path, size)
        return path

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
        before, after = first.read_bytes().split(b"HERE")
        with first.open("wb") as sparse:
            sparse.write(before[:-4] + struct.pack("<L", size))
            sparse.seek(size, 1)
            sparse.write(after)
        return first if alone else folder / "s"

    return make


def deflated_zeros(preamble=True) -> Make:
    """A dataset of 48 MiB of zeros, deflated to 48 kB."""
    packer, syntax = zlib.compressobj(wbits=-zlib.MAX_WBITS), DeflatedExplicitVRLittleEndian.encode()
    content = with_meta(packer.compress(bytes(48 << 20)) + packer.flush(), syntax + b"\0" * (len(syntax) % 2))
    return file("d.dcm", content if preamble else content[len(MARK) :])


PIXELS = b"\xe0\x7f\x10\0"
BYTES = 24 * 20 * 2
FLIPPED = {(int.from_bytes(vr, "big") ^ 1 << bit).to_bytes(2, "big") for vr in (b"OW", b"OB") for bit in range(16)}
OTHER_VRS = {b"UN", b"OF", b"OL", b"SQ", b"US", b"UT"} | FLIPPED - {b"OW", b"OB"}
HEADER = ("bad-header", "wrong-pixel-count", "truncated", "unreadable", "no-pixel-data", "not-a-radiograph")


def stating(vr: bytes = b"", length: int | None = None, implicit=False, right=BYTES) -> Callable[[bytes], bytes]:
    """Another VR or length of the pixels; where it is longer, the file holds as much as it states."""

    def change(content):
        at = content.rindex(PIXELS) + 4
        content = content[:at] + vr + content[at + len(vr) :]
        if length is None:
            return content
        at += 0 if implicit else 4
        more = max(0, length - right) if length < 1 << 20 else 0
        return content[:at] + length.to_bytes(4, "little") + content[at + 4 :] + bytes(more)

    return change
