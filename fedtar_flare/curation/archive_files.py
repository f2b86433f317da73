"""What the headers of an export folder's DICOM files say, read in parallel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from fedtar_flare.errors import DataError
from fedtar_flare.progress import Progress

KEYWORDS = """
    SOPClassUID SOPInstanceUID StudyInstanceUID SeriesInstanceUID PatientID PatientBirthDate PatientAge PatientSex
    AccessionNumber StudyDate StudyTime AcquisitionDate AcquisitionTime SeriesDate SeriesTime Modality ImageType
    ViewPosition Rows SamplesPerPixel
"""
READ_HEADERS = "fedtar_flare.curation.archive_files:read_headers"
CHUNK = 200
"""Files that a worker reads at a time."""


@dataclass(frozen=True)
class File:
    """What one DICOM file says of itself; ``kind`` is ``ct``, ``radiograph`` or the reason why it is neither."""

    path: str
    in_zip: bool
    kind: str
    patient_id: str
    study: str
    accession: str
    date: str
    time: str
    birth_date: str
    age: str
    sex: str
    view: str
    sop: str


def read_headers(paths: list[str]) -> dict[str, Any]:
    """Headers of DICOM files, also in zips (a worker's task).

    Returns ``files`` (:class:`File` as dictionaries) and ``problems`` ([text, reason] of files that cannot be read).
    """
    from pydicom.tag import Tag

    from fedtar_flare.imaging.readers.dicom_files import Source, read_header

    tags = [Tag(keyword) for keyword in KEYWORDS.split()]
    files: list[dict[str, Any]] = []
    problems: list[list[str]] = []
    for path in map(Path, paths):
        with ExitStack() as stack:
            found = [Source(path)]
            if path.suffix.lower() == ".zip":
                try:
                    archive = stack.enter_context(ZipFile(path))
                except (BadZipFile, OSError, ValueError) as error:
                    problems.append([f"{path}: not a readable zip archive ({error})", "unreadable"])
                    continue
                found = [Source(path, archive, info.filename) for info in archive.infolist() if not info.is_dir()]
            for source in found:
                if Path(source.member or path).name.upper().startswith("DICOMDIR"):
                    continue
                try:
                    if (header := read_header(source, tags)) is not None:
                        files.append(asdict(_file(header)))
                except DataError as error:
                    problems.append([str(error), error.reason])
    return {"files": files, "problems": problems}


def all_headers(paths: Sequence[Path], workers: int, say: Any, every: float) -> tuple[list[File], list[DataError]]:
    """All DICOM files among these, in the order of their paths, and why others cannot be read."""
    from fedtar_flare.imaging.workers import each

    chunks = [{"paths": [str(path) for path in paths[i : i + CHUNK]]} for i in range(0, len(paths), CHUNK)]
    progress = Progress("header", len(paths), say or (lambda line: None), every)
    got: dict[int, Any] = {}
    read = 0
    for i, outcome in each(READ_HEADERS, chunks, workers):
        if isinstance(outcome, DataError):
            raise outcome
        got[i] = outcome
        read += len(chunks[i]["paths"])
        progress(read)
    files = [File(**one) for i in sorted(got) for one in got[i]["files"]]
    problems = [DataError(text, reason=reason) for i in sorted(got) for text, reason in got[i]["problems"]]
    return files, problems


def studies_below(files: Sequence[File]) -> dict[Path, set[str]]:
    """For each folder (and zip, and file) the studies that have images in it or below."""
    direct: dict[Path, set[str]] = defaultdict(set)
    for file in files:
        if file.kind in ("ct", "radiograph"):
            direct[Path(file.path)].add(file.study)
    holders: dict[Path, set[str]] = defaultdict(set)
    for path, studies in direct.items():
        for place in (path, *path.parents):
            holders[place] |= studies
    return holders


def _file(header: Any) -> File:
    from fedtar_flare.imaging.readers.dicom_slices import CAPTURES, LOCALIZERS, SECONDARY_CAPTURE
    from fedtar_flare.imaging.readers.dicom_tags import first, words

    dataset = header.dataset
    modality, image_type = first(dataset, "Modality"), set(words(dataset, "ImageType"))
    if not header.has_pixels:
        kind = "no-pixel-data"
    elif first(dataset, "SOPClassUID").startswith(SECONDARY_CAPTURE) or CAPTURES & image_type:
        kind = "secondary-capture"
    elif modality == "CT":
        kind = "localizer" if LOCALIZERS & image_type else "ct"
    else:
        kind = "radiograph" if modality in ("CR", "DX") else "not-ct-or-radiograph"
    date, time = "", ""
    for name in ("Study", "Acquisition", "Series"):
        date = date or first(dataset, f"{name}Date")
        time = time or first(dataset, f"{name}Time")

    def said(keyword: str) -> str:
        value = dataset.get(keyword)  # decoded by the file's own character set
        return "" if value is None else str(value).strip(" \0")

    return File(
        path=str(header.source.path),
        in_zip=header.source.archive is not None,
        kind=kind,
        patient_id=said("PatientID"),
        study=first(dataset, "StudyInstanceUID"),
        accession=said("AccessionNumber"),
        date=date,
        time=time,
        birth_date=first(dataset, "PatientBirthDate"),
        age=first(dataset, "PatientAge"),
        sex=first(dataset, "PatientSex"),
        view=first(dataset, "ViewPosition").upper(),
        sop=first(dataset, "SOPInstanceUID"),
    )
