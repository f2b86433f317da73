"""Headers of an export folder's DICOM files, read in parallel."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedtar_flare.core.errors import DataError, collecting, decoding
from fedtar_flare.core.text import Progress
from fedtar_flare.curation.documents import Identifier
from fedtar_flare.data.sources.fields import sex_of, stated
from fedtar_flare.imaging.readers.dicom_tags import first, text_of, words

IMAGES = ("ct", "radiograph")
KEYWORDS = """
    SOPClassUID SOPInstanceUID StudyInstanceUID SeriesInstanceUID PatientID PatientBirthDate PatientAge PatientSex
    AccessionNumber StudyDate StudyTime AcquisitionDate AcquisitionTime SeriesDate SeriesTime Modality ImageType
    Rows SamplesPerPixel IssuerOfAccessionNumberSequence IssuerOfPatientID IssuerOfPatientIDQualifiersSequence
    OtherPatientIDs OtherPatientIDsSequence ConceptNameCodeSequence CurrentRequestedProcedureEvidenceSequence
    ContentSequence"""
REJECTIONS = {"113001", "113037", "113038", "113039"}  # titles of key objects: quality, safety, worklist, retention
REJECTED = "rejected-instance"
CHUNK = 200  # files that a worker reads at a time


class File(NamedTuple):
    """The header of one DICOM file; ``kind`` is one of ``IMAGES``, or the reason why the file is no image."""

    path: str
    in_zip: bool
    kind: str
    patient: Identifier
    others: frozenset[Identifier]  # further identifiers of the patient
    study: str
    order: Identifier  # accession number
    date: str  # without dots
    time: str  # without colons
    birth_date: str  # without dots
    age: str
    sex: str  # F, M or empty
    view: str  # of a frontal radiograph PA, AP or empty; else the reason why it is not frontal
    sop: str
    rejects: frozenset[str]  # instances that this key object rejects


class Headers(NamedTuple):
    """Headers of some files."""

    files: list[File]
    problems: list[DataError]  # of files that cannot be read
    broken: list[str]  # paths of unreadable files that may be slices
    strays: list[str]  # paths of files that are neither DICOM nor usual companions of it


def read_headers(paths: list[str]) -> Headers:
    """Headers of DICOM files, also in zips (a worker's task)."""
    from pydicom.tag import Tag

    from fedtar_flare.imaging.readers.dicom_files import is_companion, read_header, sources
    from fedtar_flare.imaging.readers.pictures import VIEW_KEYWORDS

    tags = [Tag(keyword) for keyword in f"{KEYWORDS} {VIEW_KEYWORDS}".split()]
    headers = Headers([], [], [], [])
    for path in paths:
        before = len(headers.problems)
        if Path(path).name.upper().startswith("DICOMDIR"):  # its files are among the others
            continue
        with collecting(headers.problems), sources(Path(path)) as opened:
            for source in opened:
                with collecting(headers.problems):
                    if (header := read_header(source, tags)) is not None:
                        headers.files.append(_file(header))
                    elif source.member.lower().endswith(".zip"):
                        raise DataError(f"{source.name}: a zip in a zip is not read; unpack it", reason="no-dicom")
                    elif source.archive is None and not is_companion(source.path.name):
                        headers.strays.append(path)
        if len(headers.problems) > before and not is_companion(Path(path).name):
            headers.broken.append(path)
    return headers


def all_headers(
    paths: Sequence[Path], workers: int, say: Any, every: float
) -> tuple[list[File], list[DataError], dict[str, list[Path]]]:
    """The headers of all DICOM files, in the order of their paths; problems; and the unreadable files of each study.

    An unreadable file belongs to a study if its folder has slices of that study only. A file among slices that is not
    DICOM is a problem, since it may be a lost slice.
    """
    from fedtar_flare.imaging.readers.dicom_files import compressed
    from fedtar_flare.imaging.workers import each

    chunks = [{"paths": [str(path) for path in paths[i : i + CHUNK]]} for i in range(0, len(paths), CHUNK)]
    progress = Progress("header", len(paths), say or (lambda line: None), every)
    headers: dict[int, Headers] = {}
    for i, outcome in each(read_headers, chunks, workers):
        if isinstance(outcome, DataError):
            raise outcome
        headers[i] = outcome
        progress(sum(len(chunks[j]["paths"]) for j in headers))
    in_order = [headers[i] for i in sorted(headers)]
    files = [file for batch in in_order for file in batch.files]
    problems = [problem for batch in in_order for problem in batch.problems]
    owners: dict[Path, set[str]] = defaultdict(set)
    for file in files:
        if file.kind == "ct" and not file.in_zip:
            owners[Path(file.path).parent].add(file.study)
    strays = [path for batch in in_order for path in map(Path, batch.strays)]
    problems += compressed(path for path in strays if path.parent not in owners)
    strays = [path for path in strays if path.parent in owners]
    for path in strays:
        text = f"{path}: not DICOM, and among slices of {len(owners[path.parent])} study(ies): a lost slice?"
        problems.append(DataError(text, reason="unreadable"))
    lost: dict[str, list[Path]] = defaultdict(list)
    nameless = [Path(file.path) for file in files if file.kind == "no-pixel-data" and not file.study]
    for path in [Path(path) for batch in in_order for path in batch.broken] + nameless + strays:
        if len(studies := owners[path.parent]) == 1:
            lost[next(iter(studies))].append(path)
    return files, problems, lost


def studies_below(files: Sequence[File], *, images: bool) -> dict[Path, set[str]]:
    """For each folder (and zip, and file) the studies that have files in it or below.

    With ``images`` only images count, and REJECTED stands for those that are rejected.
    """
    direct: dict[Path, set[str]] = defaultdict(set)
    for file in files:
        if not images or file.kind in (*IMAGES, REJECTED):
            direct[Path(file.path)].add(REJECTED if images and file.kind == REJECTED else file.study)
    holders: dict[Path, set[str]] = defaultdict(set)
    for path, studies in direct.items():
        for folder in (path, *path.parents):
            holders[folder] |= studies
    return holders


def issuer_of(dataset: Any, of: str = "AccessionNumber") -> str:
    """Who issued it (or the PatientID): the local name, the universal one, both as ``LOCAL|UNIVERSAL``, or nothing."""
    patient = of == "PatientID"
    item = (dataset.get("IssuerOfPatientIDQualifiersSequence" if patient else f"IssuerOf{of}Sequence") or [{}])[0]
    local = dataset.get("IssuerOfPatientID") if patient else item.get("LocalNamespaceEntityID")
    return "|".join(str(name).strip(" \0") for name in (local, item.get("UniversalEntityID")) if name)


def _others(dataset: Any) -> Iterator[Identifier]:
    """The patient's other identifiers; the retired list of them names no issuers."""
    names = dataset.get("OtherPatientIDs") or ()
    yield from (Identifier(name) for name in ([names] if isinstance(names, str) else names))
    for item in dataset.get("OtherPatientIDsSequence") or ():
        yield Identifier(text_of(item, "PatientID"), issuer_of(item, "PatientID"))


def _file(header: Any) -> File:
    from fedtar_flare.imaging.readers.dicom_slices import CAPTURES, LOCALIZERS, SECONDARY_CAPTURE
    from fedtar_flare.imaging.readers.pictures import view_of

    dataset = header.dataset
    with decoding(f"{header.source.name}: its identifiers or references cannot be read", "bad-header"):
        patient = Identifier(stated(text_of(dataset, "PatientID")), issuer_of(dataset, "PatientID"))
        order = Identifier(stated(text_of(dataset, "AccessionNumber")), issuer_of(dataset))
        others = frozenset(_others(dataset))
        rejects = frozenset[str]()
        titles = {first(title, "CodeValue") for title in dataset.get("ConceptNameCodeSequence") or ()}
        if first(dataset, "Modality") == "KO" and titles & REJECTIONS:  # by its evidence or its content
            references = (item for item in dataset.iterall() if item.keyword == "ReferencedSOPInstanceUID")
            rejects = frozenset(str(item.value) for item in references)
    modality, image_type = first(dataset, "Modality"), set(words(dataset, "ImageType"))
    if not header.has_pixels:
        kind = "no-pixel-data"
    elif CAPTURES & image_type:
        kind = "secondary-capture"
    elif modality in ("CR", "DX"):  # of any class: many archives export films as secondary captures
        kind = "radiograph"
    elif first(dataset, "SOPClassUID").startswith(SECONDARY_CAPTURE):
        kind = "secondary-capture"
    else:
        kind = "not-ct-or-radiograph" if modality != "CT" else "localizer" if LOCALIZERS & image_type else "ct"
    view = ""
    if kind == "radiograph":
        try:
            lateral = view_of(dataset, "").side == "lateral"
            view = "lateral-view" if lateral else first(dataset, "ViewPosition").upper()
        except DataError as error:
            view = error.reason
    dates, times = ([first(dataset, f"{name}{kind}") for name in ("Study", "Acquisition", "Series")]
                    for kind in ("Date", "Time"))  # fmt: skip
    return File(
        path=str(header.source.path),
        in_zip=header.source.archive is not None,
        kind=kind,
        patient=patient,
        others=others - {Identifier()},
        study=first(dataset, "StudyInstanceUID"),
        order=order,
        date=next(filter(None, dates), "").replace(".", ""),
        time=next(filter(None, times), "").replace(":", ""),
        birth_date=first(dataset, "PatientBirthDate").replace(".", ""),
        age=first(dataset, "PatientAge"),
        sex=sex_of(first(dataset, "PatientSex")) or "",
        view=view,
        sop=first(dataset, "SOPInstanceUID"),
        rejects=rejects,
    )
