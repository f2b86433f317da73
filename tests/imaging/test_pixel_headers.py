"""The header of the pixel data: one VR, one length. Anything else would put other bytes where the pixels should be."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from broken import rle
from make_dicom import chest, write_radiograph, write_series
from pydicom.uid import ImplicitVRLittleEndian
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.pictures import read_radiograph

pytestmark = pytest.mark.filterwarnings("ignore")
PIXELS = struct.pack("<HH", 0x7FE0, 0x0010)
RIGHT = 24 * 20 * 2
GREY = (np.add.outer(np.arange(40), np.arange(60)) * 40).astype(np.uint16)
REFUSALS = ("bad-header", "wrong-pixel-count", "truncated", "unreadable", "no-pixel-data", "not-a-radiograph")


def implicit(ds, i):
    ds.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian


def with_header(content: bytes, vr: bytes = b"", length: int | None = None, implicit=False) -> bytes:
    """Another VR or length of the pixels; where it is longer, the file holds as much as it states."""
    at = content.rindex(PIXELS) + 4
    changed = content[:at] + vr + content[at + len(vr) :]
    if length is None:
        return changed
    at += 0 if implicit else 4
    more = max(0, length - RIGHT) if length < 1 << 20 else 0
    return changed[:at] + struct.pack("<L", length) + changed[at + 4 :] + bytes(more)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By transfer syntax, a series whose files are changed and put right again."""
    found = {}
    for name, edit in (("explicit", lambda ds, i: None), ("implicit", implicit), ("rle", rle)):
        folder = tmp_path_factory.mktemp(name)
        write_series(folder, edit=edit)
        found[name] = {file: file.read_bytes() for file in sorted(folder.iterdir())}
    return found


def read_changed(files: dict[Path, bytes], changed: int, **header) -> np.ndarray:
    try:
        for file, content in list(files.items())[:changed]:
            file.write_bytes(with_header(content, **header))
        return read_ct(next(iter(files)).parent).hu
    finally:
        for file, content in files.items():
            file.write_bytes(content)


ONE_BIT_OFF = {bytes(b ^ (bit if i == at else 0) for i, b in enumerate(vr)) for vr in (b"OW", b"OB") for at in (0, 1)
               for bit in (1 << n for n in range(8))}  # fmt: skip
OTHERS = sorted({*ONE_BIT_OFF, b"UN", b"OF", b"OL", b"SQ", b"US", b"UT"} - {b"OW", b"OB"})


@pytest.mark.parametrize("changed", [1, 12])
def test_another_vr_is_refused(written, changed):
    for vr in OTHERS:
        with refused(REFUSALS):
            read_changed(written["explicit"], changed, vr=vr)
    assert np.array_equal(read_changed(written["explicit"], changed, vr=b"OB"), chest())


@pytest.mark.parametrize("syntax", ["explicit", "implicit"])
@pytest.mark.parametrize("length", [0, RIGHT // 4, RIGHT // 2, RIGHT - 2, RIGHT + 1, RIGHT + 2, RIGHT + 38, 1 << 31])
def test_another_length_is_refused(written, syntax, length):
    with refused(REFUSALS):
        read_changed(written[syntax], 12, length=length, implicit=syntax == "implicit")


@pytest.mark.parametrize("vr, length", [(b"OX", None), (b"UN", None), (b"OB", 300)])
def test_compressed_pixels_are_of_bytes_and_of_unstated_length(written, vr, length):
    with refused(REFUSALS):
        read_changed(written["rle"], 1, vr=vr, length=length)


def test_half_the_length_and_filling_behind(tmp_path):
    """The file is as long as it should be; another element fills what the pixel data leaves. In a zip as well."""
    write_series(tmp_path / "s")
    half = RIGHT // 2
    filling = struct.pack("<HH2sHL", 0xFFFC, 0xFFFC, b"OB", 0, half - 12) + bytes(half - 12)
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        for file in (tmp_path / "s").iterdir():
            file.write_bytes(with_header(file.read_bytes()[: -len(filling)] + filling, length=half))
            archive.write(file, file.name)
    for path in (tmp_path / "s", tmp_path / "s.zip"):
        with refused(REFUSALS):
            read_ct(path)


def test_the_standards_padding_of_an_odd_length(tmp_path):
    """8-bit pixels alone can be of odd number; of 16 bits the length is always even, so that no padding is right."""
    values = (GREY[:39, :59] // 16).astype(np.uint8)
    eight = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7, "PixelData": values.tobytes() + b"\0"}
    assert read_radiograph(write_radiograph(tmp_path / "f.dcm", values, **eight)).shape == (39, 59)


@pytest.mark.parametrize("header", [*({"vr": vr} for vr in OTHERS), *({"length": n} for n in (0, 2400, 4798, 4802))])
def test_a_radiograph_with_another_header(tmp_path, header):
    path = write_radiograph(tmp_path / "f.dcm", GREY)
    path.write_bytes(with_header(path.read_bytes(), **header))
    with refused(REFUSALS):
        read_radiograph(path)
