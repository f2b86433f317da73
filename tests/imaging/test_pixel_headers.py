"""The header of the pixel data: one VR, one length. Anything else would put other bytes where the pixels should be."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from make_dicom import chest, write_radiograph, write_series
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.radiograph import read_radiograph

pytestmark = pytest.mark.filterwarnings("ignore")
PIXELS = struct.pack("<HH", 0x7FE0, 0x0010)
RIGHT = 24 * 20 * 2
GREY = (np.add.outer(np.arange(40), np.arange(60)) * 40).astype(np.uint16)


def with_header(file: Path, vr: bytes | None = None, length: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    at = content.rindex(PIXELS) + 4
    if vr is not None:
        content[at : at + 2] = vr
    if length is not None:
        content[at + 4 : at + 8] = struct.pack("<L", length)
    file.write_bytes(content)


def flipped(vr: bytes) -> list[bytes]:
    """Every VR that differs in one bit."""
    return [bytes(b ^ (1 << bit if i == at else 0) for i, b in enumerate(vr)) for at in (0, 1) for bit in range(8)]


REFUSALS = ("bad-header", "wrong-pixel-count", "truncated", "unreadable", "no-pixel-data")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Series whose files are changed and put right again: by syntax, the folder and the files' contents."""
    found = {}
    for syntax in (ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless):

        def edit(ds, i, syntax=syntax):
            if syntax == RLELossless:
                ds.compress(RLELossless, generate_instance_uid=False)
            else:
                ds.file_meta.TransferSyntaxUID = syntax

        folder = tmp_path_factory.mktemp("written")
        write_series(folder, edit=edit)
        found[syntax] = folder, {file: file.read_bytes() for file in sorted(folder.iterdir())}
    return found


@contextmanager
def changed(written, syntax, change: Callable[[Path], None], everywhere=True):
    folder, files = written[syntax]
    for file in list(files)[: None if everywhere else 1]:
        change(file)
    yield folder
    for file, content in files.items():
        file.write_bytes(content)


OTHERS = sorted({*flipped(b"OW"), *flipped(b"OB"), b"UN", b"OF", b"OL", b"SQ", b"US", b"UT"} - {b"OW", b"OB"})


@pytest.mark.parametrize("everywhere", [False, True])
def test_another_vr_is_refused(written, everywhere):
    for vr in OTHERS:
        change = partial(with_header, vr=vr)
        with changed(written, ExplicitVRLittleEndian, change, everywhere) as folder, refused(REFUSALS):
            read_ct(folder)
    with changed(written, ExplicitVRLittleEndian, partial(with_header, vr=b"OB"), everywhere) as folder:
        assert np.array_equal(read_ct(folder).hu, chest())


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian], ids=["explicit", "implicit"])
def test_another_length_is_refused(written, syntax):
    """Also when the file holds as much as it states."""

    def change(file, length):
        content = file.read_bytes()
        at = content.rindex(PIXELS) + (8 if syntax == ExplicitVRLittleEndian else 4)
        file.write_bytes(content[:at] + struct.pack("<L", length) + content[at + 4 :] + bytes(more))

    for length in (0, RIGHT // 4, RIGHT // 2, RIGHT - 2, RIGHT + 1, RIGHT + 2, RIGHT + 38, 1 << 31):
        more = max(0, length - RIGHT) if length < 1 << 20 else 0
        with changed(written, syntax, partial(change, length=length)) as folder, refused(REFUSALS):
            read_ct(folder)


@pytest.mark.parametrize("vr, length", [(b"OX", None), (b"UN", None), (b"OB", 300)])
def test_compressed_pixels_are_of_bytes_and_of_unstated_length(written, vr, length):
    change = partial(with_header, vr=vr, length=length)
    with changed(written, RLELossless, change, everywhere=False) as folder, refused(REFUSALS):
        read_ct(folder)


def test_half_the_length_and_filling_behind(tmp_path):
    """The file is as long as it should be; another element fills what the pixel data leaves."""
    write_series(tmp_path)
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        half = RIGHT // 2 - 12
        filling = struct.pack("<HH2sHL", 0xFFFC, 0xFFFC, b"OB", 0, half) + bytes(half)
        file.write_bytes(content[: -len(filling)] + filling)
        with_header(file, length=RIGHT // 2)
    with refused(REFUSALS):
        read_ct(tmp_path)


def test_the_standards_padding_of_an_odd_length(tmp_path):
    """8-bit pixels alone can be of odd number; of 16 bits the length is always even, so that no padding is right."""
    path = write_radiograph(tmp_path / "f.dcm", GREY[:39, :59], BitsAllocated=8, BitsStored=8, HighBit=7)
    values = (GREY[:39, :59] // 16).astype(np.uint8)
    write_radiograph(path, values, BitsAllocated=8, BitsStored=8, HighBit=7, PixelData=values.tobytes() + b"\0")
    assert read_radiograph(path).shape == (39, 59)


def test_a_radiograph_with_another_vr(tmp_path):
    path = write_radiograph(tmp_path / "f.dcm", GREY)
    content = path.read_bytes()
    for vr in OTHERS:
        path.write_bytes(content)
        with_header(path, vr)
        with refused((*REFUSALS, "not-a-radiograph")):
            read_radiograph(path)


@pytest.mark.parametrize("length", [0, 40 * 60, 40 * 60 * 2 - 2, 40 * 60 * 2 + 2])
def test_a_radiograph_with_another_length(tmp_path, length):
    path = write_radiograph(tmp_path / "f.dcm", GREY)
    path.write_bytes(path.read_bytes() + bytes(2))
    with_header(path, length=length)
    with refused(REFUSALS):
        read_radiograph(path)


def test_in_an_archive(tmp_path):
    write_series(tmp_path / "s")
    with_header(sorted((tmp_path / "s").iterdir())[3], length=RIGHT // 2)
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        for file in (tmp_path / "s").iterdir():
            archive.write(file, file.name)
    with refused(REFUSALS):
        read_ct(tmp_path / "s.zip")
