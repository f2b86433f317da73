"""A hospital's DICOM export folder (any naming, any depth, zips, with or without DICOMDIR) to a manifest of studies.

Headers alone tell the files apart: patients by PatientID and its issuer, studies by StudyInstanceUID, dated by
StudyDate, else AcquisitionDate, else SeriesDate. A study that a manifest cannot hold is left out and counted by reason.
"""

import hashlib
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, collecting, within
from fedtar_flare.core.text import UNFIT_IN_ID
from fedtar_flare.curation.archive_files import IMAGES, REJECTED, File, all_headers, studies_below
from fedtar_flare.curation.documents import Identifier, fullest, one_identity, same_issuer
from fedtar_flare.data.cohort import Modality
from fedtar_flare.data.sources.fields import age_at, age_of, date_of
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.data.sources.reading import by_reason, left_out_lines

FRONTAL = {"PA": 0, "AP": 1}  # rank of a view among a study's radiographs; all others follow
Holders = dict[Path, set[str]]
"""UIDs of the studies that have images (or any files) in a folder, zip or file, or below."""


@dataclass
class Study:
    """A future row of a manifest.

    ``top`` is the study's highest folder, ``exclusive`` if no other study, of whatever kind, has files in it.
    """

    patient_id: str  # with its issuer, where several issuers have used it
    patients: tuple[Identifier, ...]  # the patient's own identifier, and others of the same patient
    uid: str
    orders: tuple[Identifier, ...]  # accession numbers of its images
    acquired: datetime
    image: Path
    modality: Modality
    age: float | None
    sex: str
    files: list[Path]
    top: Path
    exclusive: bool = False
    report: str = ""
    report_file: Path | None = None


@dataclass
class Index:
    """Content of an export folder."""

    studies: list[Study] = field(default_factory=list)  # by date, those that a manifest can hold
    problems: list[DataError] = field(default_factory=list)  # one for each other study, and for stray files
    notes: Counter[str] = field(default_factory=Counter)  # by reason, files ignored within studies
    by_number: dict[str, list[File]] = field(default_factory=lambda: defaultdict(list))  # all, by accession number
    by_patient: dict[str, list[File]] = field(default_factory=lambda: defaultdict(list))  # by PatientID
    files: int = 0  # number of all files
    dicom: int = 0  # and of DICOM files
    spare: list[str] = field(default_factory=list)  # origins of reports that belong to no study

    def lines(self) -> list[str]:
        """What was left out, for people."""
        such = f"{len(self.spare)}, such as: {'; '.join(self.spare[:3])}"
        return [*left_out_lines(self.problems), *([f"  reports that belong to no study: {such}"] if self.spare else [])]

    def rejected(self) -> dict[str, int]:
        """Reason to number."""
        return by_reason(self.problems)


def index_folder(
    folder: Path,
    *,
    modality: Modality | None = None,
    links: Path | None = None,
    workers: int = 1,
    say: Any = None,
    every: float = 15.0,
) -> Index:
    """Find the studies below a folder."""
    from fedtar_flare.imaging.readers.dicom_files import files_below

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    paths = [path for path in files_below(folder) if links is None or not path.is_relative_to(links)]
    index = Index(files=len(paths))
    files, index.problems, lost = all_headers(paths, workers, say, every)
    index.problems += _unseen(folder)
    index.dicom = len(files)
    if not files:
        text = f"{folder}: no DICOM file among {len(paths)} file(s)"
        raise DataError("\n".join([text, *left_out_lines(index.problems)]), reason="no-dicom")
    files = sorted(files, key=lambda file: (file.sop, file.path))  # so that the order of paths changes nothing
    gone = frozenset().union(*(file.rejects for file in files))
    files = [file._replace(kind=REJECTED) if file.sop in gone and file.kind in IMAGES else file for file in files]
    holders, owners = studies_below(files, images=True), studies_below(files, images=False)
    groups: dict[str, list[File]] = defaultdict(list)
    for file in files:
        index.by_number[file.order.value].append(file)
        index.by_patient[file.patient.value].append(file)
        if file.study:
            groups[file.study].append(file)
        elif file.kind in IMAGES:
            index.problems.append(DataError(f"{file.path}: no StudyInstanceUID", reason="no-study-uid"))
    for uid, group in groups.items():
        with collecting(index.problems):
            cut = [Path(file.path) for file in group if file.kind == "no-pixel-data" and not file.in_zip]
            study = _study(uid, group, holders, links, lost.get(uid, []) + cut, index.notes)
            while study.top != folder and owners[study.top.parent] - {""} == {uid}:
                study.top = study.top.parent
            study.exclusive = owners[study.top] - {""} == {uid}
            index.studies.append(study)
    counts = Counter(study.modality for study in index.studies)
    wanted = modality or ("radiograph" if counts["radiograph"] > counts["ct"] else "ct")
    for study in index.studies:
        if study.modality != wanted:
            text = f"study {study.uid}: {study.modality}, and this manifest is of {wanted}"
            index.problems.append(DataError(text, reason="other-modality"))
    index.studies = [study for study in index.studies if study.modality == wanted]
    _tell_patients_apart(index)
    index.studies.sort(key=lambda study: (study.acquired, _hash(study.uid)))
    return index


def _unseen(folder: Path) -> list[DataError]:
    """A problem for each folder below that is not looked into."""
    closed: list[OSError] = []
    below = [Path(top) / name for top, names, _ in os.walk(folder, onerror=closed.append) for name in names]
    links = [f"{path}: a link to a folder, which is not followed" for path in below if path.is_symlink()]
    problems = [DataError(f"{text}; copy what it leads to", reason="linked-folder") for text in links]
    return problems + [
        DataError(f"{e.filename}: cannot be listed ({e.strerror})", reason="no-permission") for e in closed
    ]


def write_manifest(index: Index, manifest: Path) -> int:
    """Write the studies that have a report, and count the others as problems (``no-report``)."""
    rows, written = [], []
    folder = manifest.absolute().parent
    for study in index.studies:
        with collecting(index.problems):
            rows.append(_row(study, folder))
            written.append(study)
    if not rows:
        text = "no study has images and a report (of --reports, else report.txt beside them)"
        raise DataError("\n".join([text, *index.lines()]), reason="no-patient")
    index.studies = written
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(manifest, rows)
    return len(rows)


def _row(study: Study, folder: Path) -> dict[str, str]:
    if not study.report.strip() and study.report_file is None:
        numbers = ", ".join(order.value for order in study.orders)
        text = f"study {study.uid} (accession '{numbers}') of {study.acquired:%Y-%m-%d}: no report"
        raise DataError(text, reason="no-report")
    return {
        "patient_id": study.patient_id,
        "study_datetime": study.acquired.isoformat(sep=" ", timespec="seconds"),
        "image": _cell(study.image, folder),
        "report": study.report.strip(),
        "report_path": _cell(study.report_file, folder) if study.report_file else "",
        "age": "" if study.age is None else f"{study.age:.2f}".rstrip("0").rstrip("."),
        "sex": study.sex,
    }


def _study(
    uid: str, files: list[File], holders: Holders, links: Path | None, lost: list[Path], notes: Counter[str]
) -> Study:
    """One study of its files; ``lost`` are unreadable files that a folder of links gets too."""
    slices = [file for file in files if file.kind == "ct"]
    radiographs = [file for file in files if file.kind == "radiograph"]
    where = f"study {uid} ({files[0].path})"
    used = slices or radiographs
    if not used:
        kinds = Counter(file.kind for file in files)
        reason = REJECTED if kinds[REJECTED] else kinds.most_common(1)[0][0]
        raise DataError(f"{where}: none of {len(files)} file(s) is a CT slice or a radiograph", reason=reason)
    if radiographs and slices:
        notes["radiograph-beside-ct"] += len(radiographs)
    notes.update(file.kind for file in files if file.kind not in IMAGES)
    patients = {file.patient for file in used}
    if not one_identity(patients):
        raise DataError(f"{where}: files of several patients", reason="mixed-patients")
    if not (patient := fullest(patients)).value:
        raise DataError(f"{where}: no PatientID", reason="no-patient-id")
    orders = {file.order for file in used if file.order.value} or {file.order for file in files if file.order.value}
    if any(UNFIT_IN_ID.search(identifier.value) for identifier in (patient, *orders)):
        text = f"{where}: PatientID or accession number in another character set than SpecificCharacterSet names"
        raise DataError(text, reason="bad-charset")
    sexes = {file.sex for file in used} - {""}
    if len(sexes) > 1:
        raise DataError(f"{where}: F in one file and M in another", reason="conflicting-sex")
    acquired = _acquired(used, where, notes)
    image = _image_path(uid, slices, holders, links, lost, where) if slices else _frontal(radiographs, where, notes)
    try:
        age = age_of(used[0].age)
        age = age_at(used[0].birth_date, acquired) if age is None else age
    except DataError as error:
        if error.reason == "age-out-of-range":
            raise DataError(f"{where}: {error}", reason=error.reason) from error
        age = None
        notes["bad-age"] += 1
    return Study(
        patient_id=patient.value,
        patients=(patient, *sorted({other for file in used for other in file.others})),
        uid=uid,
        orders=tuple(sorted(orders)),
        acquired=acquired,
        image=image,
        modality="ct" if slices else "radiograph",
        age=age,
        sex="".join(sexes),
        files=sorted({Path(file.path) for file in files}),
        top=Path(used[0].path).parent,
    )


def _frontal(radiographs: Sequence[File], where: str, notes: Counter[str]) -> Path:
    frontal = [radiograph for radiograph in radiographs if not radiograph.view.endswith("-view")]
    if not frontal:
        reason = min(radiograph.view for radiograph in radiographs)
        raise DataError(f"{where}: no frontal radiograph ({reason})", reason=reason)
    if len(frontal) > 1:
        notes["further-radiographs"] += len(frontal) - 1
    best = min(frontal, key=lambda f: (FRONTAL.get(f.view, 2), _hash(f.sop)))
    if best.in_zip:
        raise DataError(f"{where}: a radiograph in a zip archive; unpack it", reason="radiograph-in-zip")
    return Path(best.path)


def _acquired(files: Sequence[File], where: str, notes: Counter[str]) -> datetime:
    """The earliest moment that the files state; a time that cannot be read is midnight, and counted."""
    stated = {(file.date, file.time) for file in files if file.date}
    if not stated:
        raise DataError(f"{where}: no StudyDate, AcquisitionDate or SeriesDate", reason="no-date")
    moments = []
    for date, time in stated:
        with within(where):
            day = date_of(date)
        try:
            moments.append(date_of(f"{date}{time.ljust(4, '0')}") if len(time) >= 2 else day)
        except DataError:
            notes["bad-time"] += 1
            moments.append(day)
    return min(moments)


def _image_path(
    uid: str, slices: list[File], holders: Holders, links: Path | None, lost: list[Path], where: str
) -> Path:
    """The path that holds this study and no other, made of symbolic links where there is none."""
    paths = sorted({Path(file.path) for file in slices})
    if any(file.in_zip for file in slices):
        if len(paths) > 1 or holders[paths[0]] != {uid}:
            raise DataError(f"{where}: one zip archive should hold one whole study; unpack it", reason="shared-folder")
        return paths[0]
    common = paths[0] if len(paths) == 1 else Path(os.path.commonpath(paths))
    if holders[common] == {uid}:
        return common
    if links is None:
        reason = REJECTED if REJECTED in holders[common] else "shared-folder"
        what = "images that a key object rejects" if reason == REJECTED else f"{len(holders[common])} studies"
        raise DataError(f"{where}: {common} holds {what}; --links makes a folder of this study alone", reason=reason)
    folder = links / f"study-{_hash(uid)[:16]}"
    temporary = folder.with_name(f".{folder.name}.part")  # made whole or not at all
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for i, path in enumerate([*paths, *lost]):
        (temporary / f"{i:05d}.dcm").symlink_to(path.absolute())
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder


def _tell_patients_apart(index: Index) -> None:
    """Name the patients of one PatientID with its issuers; where it may be of two people otherwise, none is used."""
    studies, index.studies = index.studies, []
    used = {study.uid for study in studies}
    for study in studies:
        own, files = study.patients[0], index.by_patient[study.patient_id]
        people = {file.patient for file in files}
        if own.issuer and not one_identity(people):
            people = {other for other in people if same_issuer(own.issuer, other.issuer)}
            study.patient_id = f"{own.value}^^^{fullest(people).issuer}"
        files = [file for file in files if file.study in used and file.patient in people]
        conflicts = {
            "ambiguous-patient-id": not one_identity(people),
            "conflicting-birth-date": len({file.birth_date for file in files} - {""}) > 1,
            "conflicting-sex": len({file.sex for file in files} - {""}) > 1,
        }
        with collecting(index.problems):
            for reason in (reason for reason, conflict in conflicts.items() if conflict):
                text = f"study {study.uid}: two people under the one PatientID {study.patient_id}?"
                raise DataError(text, reason=reason)
            index.studies.append(study)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cell(path: Path, folder: Path) -> str:
    """A path as a manifest has it; DataError for one that a table does not give back as it is."""
    path = path.absolute()
    text = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    if text != text.strip() or text.encode(errors="replace").decode() != text:
        raise DataError(f"{path}: its name is not UTF-8, or has a space at an end: rename it", reason="bad-name")
    return text
