"""Studies that would take a process down: what they state is refused before anything of that size is allocated.

Nothing here is large: headers state sizes, files are sparse.
"""

from __future__ import annotations

import gzip
import struct
import zipfile
import zlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import nibabel
import numpy as np
import pytest
from make_dicom import chest, write_radiograph, write_series
from PIL import Image
from pydicom.uid import DeflatedExplicitVRLittleEndian, RLELossless
from refused import refused

from fedtar_flare.data.cohort import Visit
from fedtar_flare.errors import DataError
from fedtar_flare.imaging import limits
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.pipeline import InputConfig, prepare_visits
from fedtar_flare.imaging.readers import bounded
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.radiograph import read_radiograph

pytestmark = pytest.mark.filterwarnings("ignore")
Make = Callable[[Path], Path]
MARK = bytes(128) + b"DICM"
GREY = (np.add.outer(np.arange(40), np.arange(60)) * 40).astype(np.uint16)


def nifti(shape=(4, 4, 4), *, offset=352.0, extension=0, name="v.nii") -> Make:
    def make(folder):
        header = nibabel.Nifti1Header()
        header.set_data_shape(shape)
        header.set_data_dtype(np.int16)
        header["vox_offset"], header["sform_code"], header["magic"] = offset, 1, b"n+1"
        header["srow_x"], header["srow_y"], header["srow_z"] = np.eye(4)[:3]
        after = struct.pack("<4b2i", 1, 0, 0, 0, extension, 4) if extension else bytes(4)
        content = header.binaryblock + after
        (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        return folder / name

    return make


def rle(rows, columns) -> Make:
    def edit(ds, i):
        ds.compress(RLELossless, generate_instance_uid=False)
        ds.Rows, ds.Columns = rows, columns

    def make(folder):
        write_series(folder / "s", edit=edit)
        return folder / "s"

    return make


def zeros(size, start=MARK) -> Make:
    """A sparse file of zeros behind a start."""

    def make(folder):
        with (folder / "zeros.dcm").open("wb") as file:
            file.write(start)
            file.truncate(size)
        return folder / "zeros.dcm"

    return make


def empty_items(folder):
    """One sequence of undefined length, of many empty items."""
    sequence = b"\x08\x00\x10\x11SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\0\0\0\0" * 200_000
    return zeros(0x200000, with_meta(sequence))(folder)


def with_meta(rest: bytes, syntax: bytes = b"1.2.840.10008.1.2.1\0") -> bytes:
    meta = b"\x02\0\x10\0UI" + struct.pack("<H", len(syntax)) + syntax
    return MARK + b"\x02\0\0\0UL\x04\0" + struct.pack("<L", len(meta)) + meta + rest


def long_element(size, syntax=None, alone=False) -> Make:
    """A series whose first slice holds a private element of this many bytes (sparse) before its pixels."""

    def make(folder):
        def edit(ds, i):
            ds.add_new(0x00430010, "LO", "MAKER")
            ds.add_new(0x00431001, "OB", b"HERE")
            if syntax:
                ds.compress(syntax, generate_instance_uid=False)

        write_series(folder / "s", edit=edit)
        first = sorted((folder / "s").iterdir())[0]
        content = first.read_bytes()
        place = content.index(b"HERE")
        with first.open("wb") as file:
            file.write(content[: place - 4] + struct.pack("<L", size))
            file.seek(size, 1)
            file.write(content[place + 4 :])
        return first if alone else folder / "s"

    return make


def deflated(folder):
    """A dataset of 48 MiB of zeros, deflated to 48 kB."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = packer.compress(bytes(48 << 20)) + packer.flush()
    syntax = DeflatedExplicitVRLittleEndian.encode()
    (folder / "d.dcm").write_bytes(with_meta(packed, syntax + b"\0" * (len(syntax) % 2)))
    return folder / "d.dcm"


def packed(change: Callable[[zipfile.ZipFile], None] = lambda archive: None, method=zipfile.ZIP_DEFLATED) -> Make:
    """A zip of a good series and of what is added to it."""

    def make(folder):
        write_series(folder / "s")
        with zipfile.ZipFile(folder / "s.zip", "w", method) as archive:
            for file in sorted((folder / "s").iterdir()):
                archive.write(file, file.name)
            change(archive)
        return folder / "s.zip"

    return make


def stating(size, place=b"PK\x01\x02", at=24) -> Make:
    """A zip whose directory states another size of each member, or of itself."""

    def make(folder):
        file = packed()(folder)
        content = bytearray(file.read_bytes())
        found = content.find(place)
        while found >= 0:
            content[found + at : found + at + 4] = struct.pack("<L", size)
            found = content.find(place, found + 4)
        file.write_bytes(content)
        return file

    return make


def unpacks_to_much(folder):
    """A member of 20 MiB of zeros behind a mark, packed to 20 kB."""
    with zipfile.ZipFile(folder / "s.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.dcm", MARK + bytes(20 << 20))
    return folder / "s.zip"


CT: dict[str, tuple[str, Make]] = {
    "NIfTI of 300 gigavoxels": ("too-large", nifti((32767, 32767, 300))),
    "the same, packed to 200 bytes": ("too-large", nifti((32767, 32767, 300), name="v.nii.gz")),
    "NIfTI of more dimensions": ("too-large", nifti((512, 512, 300, 32767))),
    "NIfTI without its voxels": ("unreadable", nifti((900, 900, 900))),
    "NIfTI without its voxels, packed": ("unreadable", nifti((900, 900, 900), name="v.nii.gz")),
    "NIfTI whose voxels begin far behind": ("unreadable", nifti(offset=2e9)),
    "NIfTI whose voxels begin far behind, packed": ("unreadable", nifti(offset=1e5, name="v.nii.gz")),
    "NIfTI with a long extension": ("unreadable", nifti(extension=2_000_000_000, name="v.nii.gz", offset=368.0)),
    "RLE of 65535 x 65535": ("too-large", rle(65535, 65535)),
    "zeros with a mark": ("unreadable", zeros(8 << 20)),
    "zeros behind meta information": ("unreadable", zeros(8 << 20, with_meta(b"\x08\0\x60\0CS\x02\0CT"))),
    "one meta element again and again": ("unreadable", zeros(3 << 20, MARK + b"\2\0\1\0UI\0\0" * 200_000)),
    "a sequence of empty items": ("unreadable", empty_items),
    "a private element of 1.5 GiB": ("too-large", long_element(3 << 29, alone=True)),
    "a deflated dataset of zeros": ("too-large", deflated),
    "members of 1.9 GiB": ("too-large", stating(1_900 << 20)),
    "a directory of 3 GiB": ("too-large", stating(3 << 30, b"PK\5\6", 12)),
    "a member that unpacks a thousandfold": ("too-large", unpacks_to_much),
    "a method that unpacks without a bound": ("unreadable", packed(method=zipfile.ZIP_BZIP2)),
    "a private element of 600 MiB": ("right", long_element(600 << 20)),
    "a private element of 600 MiB beside RLE": ("right", long_element(600 << 20, RLELossless)),
}  # fmt: skip


@pytest.mark.parametrize("name", CT)
def test_ct(tmp_path, monkeypatch, name):
    monkeypatch.setattr(bounded, "ELEMENT_READS", 20_000)
    expected, make = CT[name]
    path = make(tmp_path)
    if expected == "right":
        assert np.array_equal(read_ct(path).hu, chest())
        return
    with refused(expected):
        read_ct(path)


def picture(name, width, height, change: Callable[[bytes], bytes] = lambda content: content) -> Make:
    """A picture whose header states another size."""

    def make(folder):
        Image.fromarray(GREY.astype(np.float32) if name.endswith("tif") else GREY.astype(np.uint8)).save(folder / name)
        content = bytearray((folder / name).read_bytes())
        if name.endswith("tif"):
            for tag, value in ((256, width), (257, height)):
                place = next(i for i in range(4, len(content)) if content[i : i + 2] == struct.pack("<H", tag))
                content[place + 2 : place + 12] = struct.pack("<HLL", 4, 1, value)
        else:
            content[16:24] = struct.pack(">2L", width, height)
            content[29:33] = struct.pack(">L", zlib.crc32(content[12:29]))
        (folder / name).write_bytes(content)
        return folder / name

    return make


def radiograph(**changes) -> Make:
    return lambda folder: write_radiograph(folder / "f.dcm", GREY, **changes)


def no_transfer_syntax(folder):
    path = radiograph()(folder)
    path.write_bytes(path.read_bytes().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.5.1.4\0"))
    return path


RADIOGRAPHS: dict[str, tuple[str, Make]] = {
    "a float TIFF of 13000 x 13000": ("too-large", picture("f.tif", 13_000, 13_000)),
    "a PNG of 6000 x 6000": ("too-large", picture("f.png", 6_000, 6_000)),
    "a PNG of 10 gigapixels": ("unreadable", picture("f.png", 100_000, 100_000)),
    "DX of 65535 x 65535": ("too-large", radiograph(Rows=65535, Columns=65535)),
    "DX of two billion frames": ("not-a-radiograph", radiograph(NumberOfFrames=2_000_000_000)),
    "a UID that is no transfer syntax": ("unsupported-transfer-syntax", no_transfer_syntax),
    "zeros with a mark": (("unreadable", "not-a-radiograph"), zeros(8 << 20)),
}


@pytest.mark.parametrize("name", RADIOGRAPHS)
def test_radiographs(tmp_path, monkeypatch, name):
    monkeypatch.setattr(bounded, "ELEMENT_READS", 20_000)
    expected, make = RADIOGRAPHS[name]
    path = make(tmp_path)
    with refused(expected):
        read_radiograph(path)


def test_the_sites_limits_hold(tmp_path):
    study, archive = packed()(tmp_path).with_suffix(""), tmp_path / "s.zip"
    path = picture("f.png", 60, 40)(tmp_path)
    for limit, value, image in (
        ("voxels", 12 * 24 * 20 - 1, study),
        ("pixels", 24 * 20 - 1, study),
        ("file_bytes", 900, study),
        ("archive_bytes", 12 * 900, archive),
        ("archive_members", 11, archive),
    ):
        with applied(Limits(**{limit: value})), refused("too-large", limit):
            read_ct(image)
    with applied(Limits(pixels=2399)), refused("too-large", "pixels"):
        read_radiograph(path)
    with applied(Limits(voxels=12 * 24 * 20, pixels=24 * 20, archive_members=12)):
        assert read_ct(archive).hu.shape == read_ct(study).hu.shape == (12, 24, 20)
    with applied(Limits(pixels=2400)):
        assert read_radiograph(path).shape == (40, 60)


def test_an_archive_states_too_little(tmp_path):
    """The stated size of a member is never exceeded, whatever is in it."""
    with refused("unreadable"):
        read_ct(stating(400)(tmp_path))


def test_a_limit_ends_with_its_block(tmp_path, monkeypatch):
    clock = iter((0.0, 1.0, 3.0))
    monkeypatch.setattr(limits.time, "monotonic", lambda: next(clock))
    with applied(Limits(seconds_per_study=2)):
        limits.check_time("a study")
        with refused("too-slow", "a study: not read within 2 s"):
            limits.check_time("a study")
    assert limits.current() == Limits()


def test_one_hostile_study_among_good_ones(tmp_path):
    hostile = {reason: tmp_path / str(n) for n, reason in enumerate(("too-large", "no-pixel-data"))}
    for place in hostile.values():
        place.mkdir()
    images = [nifti((32767, 32767, 300))(hostile["too-large"]), zeros(2 << 20)(hostile["no-pixel-data"])]
    good = tmp_path / "good"
    write_series(good, chest(size=(64, 64)))
    visits = [
        Visit("P", f"v{n}", datetime(2020, 1, n + 1), image, "Clear.", "ct") for n, image in enumerate([*images, good])
    ]
    config = InputConfig(image_size=16, slices=4)
    done = prepare_visits(visits, config, tmp_path / "cache", workers=1)
    assert {visit.visit_id: error.reason for visit, error in done.errors.items()} == {
        "v0": "too-large",
        "v1": "no-pixel-data",
    }
    tight = Limits(voxels=10)
    refused_all = prepare_visits(visits, config, tmp_path / "cache2", workers=1, limits=tight)
    assert refused_all.errors[visits[2]].reason == "too-large"
    again = prepare_visits(visits, config, tmp_path / "cache2", workers=1)  # the limit was raised
    assert visits[2] not in again.errors and isinstance(again.errors[visits[0]], DataError)


def test_a_packed_nifti_that_goes_on_behind_its_voxels_is_given_up_at_once(tmp_path):
    image = nibabel.Nifti1Image(np.full((8, 8, 8), -1000, np.int16), np.eye(4)).to_bytes()
    file = tmp_path / "v.nii.gz"
    file.write_bytes(gzip.compress(image + bytes(8 << 20)))
    with refused("unreadable", "goes on behind"):
        read_ct(file)
