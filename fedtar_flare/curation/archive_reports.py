"""Reports of an export folder's studies: from a table, a folder of text files, or text files beside each study."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedtar_flare.curation.archive import Index, Study
from fedtar_flare.data.sources.fields import date_of
from fedtar_flare.data.sources.manifest import as_meant
from fedtar_flare.data.sources.tables import own_table
from fedtar_flare.errors import ConfigError, DataError, collecting

FILE_NAME = re.compile(r'(?!\.{1,2}\Z)[^/\\:*?"<>|\0]+')
KEYS = ("study_instance_uid", "accession_number", "patient_id", "study_date", "report")


class Report(NamedTuple):
    """The text or file of a report, where it was found, and whose it says it is."""

    origin: str
    content: str | Path
    patient_id: str = ""


Found = dict[tuple[str, ...], list[Report]]
"""By ("uid", StudyInstanceUID), ("accession", AccessionNumber) or ("day", PatientID, date)."""


def join_reports(index: Index, reports: Path | None) -> int:
    """Give each study its report; a study with several different ones is left out (``ambiguous-report``), and so is one
    whose report is under an accession number that several patients have (``ambiguous-accession-number``).

    ``reports`` is a CSV table with the column ``report`` and one of ``study_instance_uid``, ``accession_number``, or
    ``patient_id`` with ``study_date``; a folder with ``<AccessionNumber>.txt`` or ``<StudyInstanceUID>.txt``; or None:
    such files, or ``report.txt``, beside each study. Returns how many reports belong to no study. Raises ConfigError
    without such a table or folder, or if a column is missing.
    """
    if reports is not None and not reports.exists():
        raise ConfigError(f"{reports}: there is no such table or folder of reports")
    found: Found = {}
    if reports is not None:
        found = _from_folder(reports) if reports.is_dir() else _from_table(reports, index.problems)
    studies, index.studies = index.studies, []
    used: set[str] = set()
    for study in studies:
        with collecting(index.problems):
            patients, issuers = index.owners[study.accession], index.owners[study.accession][study.patient_id]
            alone = len(patients) <= 1 and len(issuers) <= 1
            if reports is None:
                study.report_file = _beside(study)
                if not alone and study.report_file is not None and study.report_file.stem == study.accession:
                    raise _several(study, str(study.report_file))
            own = _of(study, found, alone, len(issuers) <= 1)
            if own:
                study.report, study.report_file = _one(own, study)
            used |= {report.origin for report in own}
            index.studies.append(study)
    return len({report.origin for some in found.values() for report in some} - used)


def _several(study: Study, origin: str) -> DataError:
    text = f"study {study.uid}: {origin} is of accession number {study.accession} of several patients or issuers"
    told = "a column patient_id, or of issuers study_instance_uid, says whose it is"
    return DataError(f"{text}; {told}", reason="ambiguous-accession-number")


def _of(study: Study, found: Found, alone: bool, alone_with_patient: bool) -> list[Report]:
    """The reports under the first key that has any; the accession number is unique ``alone``, or with the patient."""
    day = study.acquired.date().isoformat()
    for key in (("uid", study.uid), ("accession", study.accession), ("day", study.patient_id, day)):
        own = found.get(key, []) if key[1] else []
        if own and key[0] == "accession" and not alone:
            if not alone_with_patient or not all(report.patient_id for report in own):
                raise _several(study, own[0].origin)
            own = [report for report in own if report.patient_id == study.patient_id]
        if any(report.patient_id not in ("", study.patient_id) for report in own):
            text = f"study {study.uid}: {own[0].origin} says that its report is another patient's"
            raise DataError(text, reason="report-of-another-patient")
        if own:
            return own
    return []


def _one(reports: Sequence[Report], study: Study) -> tuple[str, Path | None]:
    contents = {report.content for report in reports}
    if len(contents) > 1:
        origins = ", ".join(sorted(report.origin for report in reports)[:4])
        text = f"study {study.uid}: {len(contents)} different reports ({origins})"
        raise DataError(text, reason="ambiguous-report")
    content = contents.pop()
    return (content, None) if isinstance(content, str) else ("", content)


def _beside(study: Study) -> Path | None:
    names = [f"{name}.txt" for name in (study.accession, study.uid) if FILE_NAME.fullmatch(name)]
    folders = {path.parent for path in study.files}
    alone = [study.top, *(f for f in sorted(folders) if f.is_relative_to(study.top) and f != study.top)]
    between = [p for f in alone for p in f.parents if p.is_relative_to(study.top) and p not in alone]
    own = [folder / "report.txt" for folder in (*alone, *between)] if study.alone else []
    named = [folder / name for folder in (*alone, *between, *folders, study.top.parent) for name in names]
    return next((file for file in (*named, *own) if file.is_file()), None)


def _from_folder(folder: Path) -> Found:
    found: Found = defaultdict(list)
    for file in sorted(folder.rglob("*.txt")):
        for kind in ("uid", "accession"):
            found[kind, file.stem].append(Report(str(file), file))
    return found


def _from_table(table: Path, problems: list[DataError]) -> Found:
    found: Found = defaultdict(list)
    for number, row in _rows(table, problems):
        if not row.get("report"):
            continue
        where = f"{table}, row {number}"
        key: tuple[str, ...] = ("none", where)
        if row.get("study_instance_uid"):
            key = "uid", row["study_instance_uid"]
        elif row.get("accession_number"):
            key = "accession", row["accession_number"]
        elif row.get("patient_id") and row.get("study_date"):
            try:
                key = "day", row["patient_id"], date_of(row["study_date"]).date().isoformat()
            except DataError as error:
                raise ConfigError(f"{where}, column 'study_date': {error}") from error
        found[key].append(Report(where, row["report"], row.get("patient_id", "")))
    return found


def _rows(table: Path, problems: list[DataError]) -> Iterator[tuple[int, dict[str, str]]]:
    """Row numbers and values; ``AccessionNumber``, ``Accession Number`` and ``accession_number`` are one column."""
    known = {key.replace("_", ""): key for key in KEYS}
    with own_table(table, "the table of reports") as opened:
        names = {name: known.get(re.sub(r"[^a-z]", "", name.lower()), name) for name in opened.columns}
        columns = set(names.values())
        keys = {"study_instance_uid", "accession_number"} & columns or {"patient_id", "study_date"} <= columns
        if "report" not in columns or not keys:
            raise ConfigError(
                f"{table}: needs the column 'report' and one of 'study_instance_uid', 'accession_number' or "
                f"'patient_id' with 'study_date' (there is: {', '.join(names) or 'nothing'})"
            )
        if len(columns) < len(names):
            raise ConfigError(f"{table}: two columns mean the same (there is: {', '.join(names)})")
        for number, row in opened.rows(problems, str(table)):
            yield number, {names[name]: as_meant(value) for name, value in row.items()}
