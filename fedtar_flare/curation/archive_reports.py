"""Reports of an export folder's studies: from a table, a folder of text files, or text files beside each study."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedtar_flare.core.errors import ConfigError, DataError, collecting
from fedtar_flare.curation.archive import Index, Study
from fedtar_flare.curation.documents import same_issuer
from fedtar_flare.data.sources.fields import date_of
from fedtar_flare.data.sources.manifest import without_mark
from fedtar_flare.data.sources.tables import open_table

FILE_NAME = re.compile(r'(?!\.{1,2}\Z)[^/\\:*?"<>|\0]+')
KEYS = ("study_instance_uid", "accession_number", "issuer", "patient_id", "study_date", "report")


class Report(NamedTuple):
    """The text or file of a report, its origin for messages, and the patient and issuer that the origin states."""

    origin: str
    content: str | Path
    patient_id: str = ""
    issuer: str = ""


ByKey = dict[tuple[str, ...], list[Report]]
"""Reports by ("uid", StudyInstanceUID), ("accession", AccessionNumber) or ("day", PatientID, date)."""


def join_reports(index: Index, reports: Path | None) -> int:
    """Give each study of an index its report.

    Left out are studies of several different reports (``ambiguous-report``), and those whose report is under an
    accession number of several patients or issuers (``ambiguous-accession-number``) unless study and report name the
    issuer; where the issuer is another one: ``report-of-another-issuer``.
    """
    if reports is not None and not reports.exists():
        raise ConfigError(f"{reports}: there is no such table or folder of reports")
    by_key: ByKey = defaultdict(list)
    if reports is not None and reports.is_dir():
        for file in sorted(reports.rglob("*.txt")):
            for kind in ("uid", "accession"):
                by_key[kind, file.stem].append(Report(str(file), file))
    elif reports is not None:
        by_key = reports_of_table(reports, index.problems)
    studies, index.studies = index.studies, []
    used: set[str] = set()
    for study in studies:
        with collecting(index.problems):
            if reports is None:
                study.report_file = _beside(study)
                if study.report_file is not None and study.report_file.stem == study.accession:
                    _by_number(study, [Report(str(study.report_file), "")], index.owners[study.accession])
            if matching := _matching(study, by_key, index.owners[study.accession]):
                contents = {report.content for report in matching}
                if len(contents) > 1:
                    origins = ", ".join(sorted(report.origin for report in matching)[:4])
                    text = f"study {study.uid}: {len(contents)} different reports ({origins})"
                    raise DataError(text, reason="ambiguous-report")
                content = contents.pop()
                study.report, study.report_file = (content, None) if isinstance(content, str) else ("", content)
            used |= {report.origin for report in matching}
            index.studies.append(study)
    return len({report.origin for some in by_key.values() for report in some} - used)


def _by_number(study: Study, reports: list[Report], owners: set[tuple[str, str]]) -> list[Report]:
    """Reports of the study's issuer and patient among those under its accession number; DataError where it is unclear.

    ``owners`` has the patients and issuers of all studies with this number.
    """
    issuer = study.issuer
    candidates = [r for r in reports if not (issuer and r.issuer) or same_issuer(issuer, r.issuer)]
    where = f"study {study.uid}: {reports[0].origin}"
    if not candidates:
        text = f"{where} is of issuer '{reports[0].issuer}', not '{issuer}'; if they are one, both must say it"
        raise DataError(text, reason="report-of-another-issuer")
    candidates = [report for report in candidates if report.patient_id in ("", study.patient_id)] or candidates
    for report in candidates:
        named = issuer and report.issuer
        fits = [(p, i) for p, i in owners if report.patient_id in ("", p) and (not named or same_issuer(i, issuer))]
        issuers = ({i for _, i in fits} | {r.issuer for r in reports if not named}) - {""}
        if len({p for p, _ in fits}) > 1 or not all(same_issuer(a, b) for a in issuers for b in issuers):
            text = f"{where} has an accession number of several patients or issuers; columns of these have to tell"
            raise DataError(text, reason="ambiguous-accession-number")
    return candidates


def _matching(study: Study, by_key: ByKey, owners: set[tuple[str, str]]) -> list[Report]:
    """The reports under the first key that has any."""
    day = study.acquired.date().isoformat()
    for key in (("uid", study.uid), ("accession", study.accession), ("day", study.patient_id, day)):
        reports = by_key.get(key, []) if key[1] else []
        if reports and key[0] == "accession":
            reports = _by_number(study, reports, owners)
        if any(report.patient_id not in ("", study.patient_id) for report in reports):
            text = f"study {study.uid}: {reports[0].origin} is the report of another patient"
            raise DataError(text, reason="report-of-another-patient")
        if reports:
            return reports
    return []


def _beside(study: Study) -> Path | None:
    names = [f"{name}.txt" for name in (study.accession, study.uid) if FILE_NAME.fullmatch(name)]
    folders = {path.parent for path in study.files}
    inside = [study.top, *(f for f in sorted(folders) if f.is_relative_to(study.top) and f != study.top)]
    between = [p for f in inside for p in f.parents if p.is_relative_to(study.top) and p not in inside]
    general = [folder / "report.txt" for folder in (*inside, *between)] if study.exclusive else []
    named = [folder / name for folder in (*inside, *between, *folders, study.top.parent) for name in names]
    return next((file for file in (*named, *general) if file.is_file()), None)


def reports_of_table(table: Path, problems: list[DataError]) -> ByKey:
    """Reports of a table's rows, under the first of the three keys that a row states."""
    by_key: ByKey = defaultdict(list)
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
        by_key[key].append(Report(where, row["report"], row.get("patient_id", ""), row.get("issuer", "")))
    return by_key


def _rows(table: Path, problems: list[DataError]) -> Iterator[tuple[int, dict[str, str]]]:
    """Row numbers and values; ``AccessionNumber``, ``Accession Number`` and ``accession_number`` are one column."""
    known = {key.replace("_", ""): key for key in KEYS}
    with open_table(table, "the table of reports") as opened:
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
        for number, row in opened.rows(problems):
            yield number, {names[name]: without_mark(value) for name, value in row.items()}
