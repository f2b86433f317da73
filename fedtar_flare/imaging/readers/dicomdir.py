"""The directory of a DICOM disc (DICOMDIR): the files that it names, and which of them are lost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydicom import dcmread
from pydicom.dataset import Dataset

from fedtar_flare.errors import DataError, decoding
from fedtar_flare.imaging.readers.dicom_tags import text
from fedtar_flare.imaging.readers.metered import metered


def entries(path: Path) -> list[tuple[Path, str, bool]]:
    """The files that a DICOMDIR refers to, the series of each, and whether it is there; none without a DICOMDIR.

    Files outside the directory's own folder are never read, and count as not there.
    """
    if not path.is_file():
        return []
    with decoding(f"{path}: not a readable DICOMDIR"):
        with path.open("rb") as file:
            records = dcmread(metered(file, str(path), path.stat().st_size)).DirectoryRecordSequence
        series = _series_of(records)
        folder, found = path.parent.resolve(), []
        for record in records:
            if "ReferencedFileID" in record:
                name = record.ReferencedFileID
                target = path.parent.joinpath(*([name] if isinstance(name, str) else name))
                there = target.is_file() and target.resolve().is_relative_to(folder)
                found.append((target, series.get(record.seq_item_tell, ""), there))
    return found


def lost(path: Path, files: Sequence[Path]) -> list[tuple[Path, str]]:
    """The files, and the series of each, that a folder has lost of the series that its DICOMDIR names.

    Series whose files were all renamed, or left behind, are not meant; nor are names that a file system wrote in lower
    case.
    """
    named: list[tuple[Path, str, bool]] = []
    with suppress(DataError):  # the files are there, whatever their directory is worth
        named = entries(path)
    known = {str(file).lower() for file in files}
    here = {of for file, of, there in named if there or str(file).lower() in known}
    return [
        (file, of)
        for file, of, there in named
        if not there and str(file).lower() not in known and (of in here or len(files) == 1)
    ]


def _series_of(records: Sequence[Dataset]) -> dict[int | None, str]:
    """The SeriesInstanceUID above each image record, by the record's place in the file."""
    by_place = {record.seq_item_tell: record for record in records}
    series: dict[int | None, str] = {}
    for record in records:
        if record.get("DirectoryRecordType") != "SERIES":
            continue
        place = record.get("OffsetOfReferencedLowerLevelDirectoryEntity")
        while place in by_place and place not in series:
            series[place] = text(record, "SeriesInstanceUID")
            place = by_place[place].get("OffsetOfTheNextDirectoryRecord")
    return series
