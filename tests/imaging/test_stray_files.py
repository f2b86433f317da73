"""Files among slices that cannot be read as DICOM: a slice may be lost, so they are named and the series refused."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from make_dicom import another_series, chest, put, slice_dataset, write_series
from refused import refused

from fedtar_flare.imaging.pipeline import NOT_REMEMBERED
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.dicom_files import is_companion

pytestmark = pytest.mark.filterwarnings("ignore")
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "of no length": (lambda content: b"", "unreadable"),
    "with its first 4 KiB zeroed": (lambda content: bytes(4096) + content[4096:], "unreadable"),
    "all zeros": (lambda content: bytes(len(content)), "unreadable"),
    "a page of an error": (lambda content: b"<html>503 Service Unavailable</html>", "unreadable"),
    "cut in its header": (lambda content: content[:420], "truncated"),
    "cut before its series is named": (lambda content: content[: content.index(b"\x08\0\x60\0")], "no-pixel-data"),
    "cut between two elements": (lambda content: content[: content.index(b"\x28\0\x10\0")], "no-pixel-data"),
}


def series(folder: Path, slices=12) -> list[Path]:
    """The files of a series from foot to head."""
    for i, plane in enumerate(chest(slices, (48, 48))):
        folder.mkdir(exist_ok=True)
        slice_dataset(plane, i).save_as(folder / f"{i:03d}.dcm", enforce_file_format=True)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_damaged_slice_is_named_wherever_it_lies(tmp_path, kind, at):
    change, reason = DAMAGE[kind]
    file = series(tmp_path / "s")[at]
    file.write_bytes(change(file.read_bytes()))
    with refused(reason, f"{file.name}") as error:
        read_ct(tmp_path / "s")
    assert file.name not in error.value.public


def test_half_a_stack_without_content(tmp_path):
    for file in series(tmp_path / "s", 24)[12:]:
        file.write_bytes(b"")
    with refused("unreadable", r"12 file\(s\) beside its slices.*012\.dcm: empty"):
        read_ct(tmp_path / "s")


def test_a_slice_that_may_not_be_read(tmp_path, monkeypatch):
    """Not remembered: a permission changes nothing by which a file is known again."""
    locked, opened = series(tmp_path / "s")[11], Path.open

    def open_(self, *args, **options):
        if self == locked:
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", open_)
    with refused("no-permission", r"011\.dcm"):
        read_ct(tmp_path / "s")
    assert "no-permission" in NOT_REMEMBERED


def test_in_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        for i, file in enumerate(series(tmp_path / "s")):
            archive.writestr(f"a/{file.name}", file.read_bytes() if i < 11 else b"")
        archive.writestr("b/LIES", b"")
    with refused("unreadable", r"a/011\.dcm"):
        read_ct(tmp_path / "s.zip")


def test_another_folder_is_another_matter(tmp_path):
    """What lies beside another series, or beside none, is said and refuses nothing."""
    hu = write_series(tmp_path / "soft")
    write_series(tmp_path / "sharp", edit=lambda ds, i: (another_series(ds, 1), put(ConvolutionKernel="B70f")(ds))[1])
    (tmp_path / "sharp" / "x.dcm").write_bytes(b"")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "y.dcm").write_bytes(bytes(300))
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu)
    assert [note.reason for note in volume.warnings] == ["several-series", "unreadable"]
    assert "y.dcm: zeros" in volume.warnings[1].text
    (tmp_path / "soft" / "x.dcm").write_bytes(b"")
    (tmp_path / "sharp" / "x.dcm").unlink()
    volume = read_ct(tmp_path)  # the other series is whole
    assert "series-refused" in [note.reason for note in volume.warnings]


COMPANIONS = (
    "DICOMDIR LICENSE README VERSION .DS_Store ._001.dcm Thumbs.db a.txt b.XML c.json report.pdf key.jpg CT.nii.gz"
)
SUSPECTS = "001 IM000001 1.2.840.113619.2.55.3 001.dcm 001.IMA 001.dcm.gz 001.dcm.part I10 003.dcm.tmp"


def test_what_usually_lies_beside_slices_is_no_slice(tmp_path):
    assert [name for name in COMPANIONS.split() if not is_companion(name)] == []
    assert [name for name in SUSPECTS.split() if is_companion(name)] == []
    hu = write_series(tmp_path)
    for name in COMPANIONS.split():
        (tmp_path / name).write_bytes(b"something" * 20)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and volume.warnings == ()
