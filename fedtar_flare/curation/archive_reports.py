"""Reports of an export folder's studies: from a table, a folder of text files, or text files beside each study."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedtar_flare.core.errors import ConfigError, DataError, collecting
from fedtar_flare.curation.archive import Index, Study
from fedtar_flare.curation.documents import NOBODY, Identifier, may_be_same, one_identity
from fedtar_flare.data.sources.fields import date_of, markup, stated
from fedtar_flare.data.sources.manifest import without_mark
from fedtar_flare.data.sources.tables import open_table

REPORT = "report"
KEYS = ["study_instance_uid", "accession_number", "issuer", "patient_id", "patient_issuer", "study_date", "report"]


class Report(NamedTuple):
    """The text or file of a report, its origin for messages, and the patient and accession number that it states."""

    origin: str
    content: str | Path
    patient: Identifier = NOBODY
    order: Identifier = NOBODY


ByKey = dict[tuple[str, ...], list[Report]]
"""Reports by ("uid", StudyInstanceUID), ("accession", AccessionNumber) or ("day", PatientID, date)."""


def join_reports(index: Index, reports: Path | None) -> None:
    """Give each study of an index its report, and find the reports that belong to none.

    A study whose report is not certain is left out under a reason: ``docs/how-to/from-pacs.md`` has them.
    """
    if reports is not None and not reports.exists():
        raise ConfigError(f"{reports}: there is no such table or folder of reports")
    by_key: ByKey = defaultdict(list)
    if reports is not None and reports.is_dir():
        texts = (file for file in reports.rglob("*") if file.suffix.lower() == ".txt" and not file.is_dir())
        for file in sorted(texts):
            by_key["uid", file.stem].append(Report(str(file), file))
            by_key["accession", file.stem].append(Report(str(file), file, order=Identifier(file.stem)))
    elif reports is not None:
        by_key = reports_of_table(reports, index.problems)
        for some in by_key.values():  # so that the reason for leaving a study out does not hang on the order of rows
            some.sort(key=lambda report: (report.patient, report.order))
    studies, index.studies = index.studies, []
    used, beside = set[str](), dict[Path, dict[str, list[Path]]]()
    for study in studies:
        with collecting(index.problems):
            matching = _matching(study, by_key if reports else _beside(study, beside), index)
            if len(contents := {report.content for report in matching}) > 1:
                origins = ", ".join(sorted(report.origin for report in matching)[:4])
                text = f"study {study.uid}: {len(contents)} different reports ({origins})"
                raise DataError(text, reason="ambiguous-report")
            for content in contents:
                study.report, study.report_file = (content, None) if isinstance(content, str) else ("", content)
            used |= {report.origin for report in matching}
            index.studies.append(study)
    known = dict.fromkeys(report.origin for some in by_key.values() for report in some)
    index.spare = [origin for origin in known if origin not in used]


def _matching(study: Study, by_key: ByKey, index: Index) -> Sequence[Report]:
    """The reports that name the study or one of its accession numbers, else the patient and the day."""
    numbered = [(order, by_key.get(("accession", order.value), [])) for order in study.orders]
    if matching := [*by_key.get(("uid", study.uid), [])]:  # what names the number alone may be about this study, too
        matching += [
            r for order, some in numbered for r in some if may_be_same(order, r.order) and _is_of(r, study.patients)
        ]
    else:
        matching = [report for order, some in numbered for report in _by_number(study, order, some, index)]
    if any(not _is_of(report, study.patients) for report in matching):
        raise _unclear(study, matching[0], "is the report of another patient", "report-of-another-patient")
    named = {report.order.value for report in matching} - {""}
    if named and {order.value for order in study.orders} - named:
        raise _unclear(study, matching[0], "is about some of its accession numbers alone", "several-accession-numbers")
    return matching or _by_day(study, by_key, index)


def _is_of(report: Report, patients: Iterable[Identifier]) -> bool:
    """Whether a report may be of the patient with these identifiers."""
    return not report.patient.value or any(may_be_same(report.patient, patient) for patient in patients)


def _unclear(study: Study, report: Report, why: str, reason: str) -> DataError:
    return DataError(f"study {study.uid}: {report.origin} {why}", reason=reason)


def _by_number(study: Study, order: Identifier, reports: list[Report], index: Index) -> list[Report]:
    """Those reports under an accession number that are the study's; DataError where that is unclear."""
    candidates = [report for report in reports if may_be_same(order, report.order)]
    if reports and not candidates:
        why = f"is of issuer '{reports[0].order.issuer}', not '{order.issuer}'; if they are one, both must say it"
        raise _unclear(study, reports[0], why, "report-of-another-issuer")
    candidates = [report for report in candidates if _is_of(report, study.patients)] or candidates
    for report in candidates:
        named = order.issuer and report.order.issuer
        fits = [o for o in index.by_number[order.value] if not named or may_be_same(o.order, order)]
        fits = [o for o in fits if _is_of(report, {o.patient, *o.others})]
        issuers = {o.order.issuer for o in fits} | {r.order.issuer for r in reports if not named}
        if not (one_identity({o.patient for o in fits}) and one_identity({Identifier("", i) for i in issuers})):
            why = "has an accession number of several patients or issuers; columns of these have to tell"
            raise _unclear(study, report, why, "ambiguous-accession-number")
        if len({owner.study for owner in fits}) > 1:
            why = "has an accession number of several studies; study_instance_uid has to tell which one it is about"
            raise _unclear(study, report, why, "accession-number-of-several-studies")
    return candidates


def _by_day(study: Study, by_key: ByKey, index: Index) -> list[Report]:
    """The patient's reports of the day; DataError where the patient or the study is unclear."""
    own, day = study.patients[0], study.acquired.date().isoformat()
    reports = [report for report in by_key.get(("day", own.value, day), []) if may_be_same(report.patient, own)]
    for report in reports:
        files = index.by_patient[own.value]
        if own.issuer and report.patient.issuer:
            files = [file for file in files if may_be_same(file.patient, own)]
        if not one_identity({file.patient for file in files} | {report.patient}):
            raise _unclear(study, report, "names a patient_id of several issuers", "ambiguous-patient-id")
        digits = day.replace("-", "")  # a date that is missing or cut may be this one
        if len({file.study for file in files if digits.startswith(file.date.replace("-", "")[:8])} | {study.uid}) > 1:
            why = "names a day of several studies: add study_instance_uid"
            raise _unclear(study, report, why, "several-studies-that-day")
    return reports


def _beside(study: Study, texts: dict[Path, dict[str, list[Path]]]) -> ByKey:
    """The first text file that lies with a study, under the key that its name is; ``texts`` are those listed so far.

    ``Report.TXT`` is as good as ``report.txt``, and both together are two reports. Numbers that differ in case are two.
    """
    numbers = {order.value for order in study.orders}
    folders = {path.parent for path in study.files}
    inside = [study.top, *(f for f in sorted(folders) if f.is_relative_to(study.top) and f != study.top)]
    between = [p for f in inside for p in f.parents if p.is_relative_to(study.top) and p not in inside]
    general = [(folder, REPORT) for folder in (*inside, *between)] if study.exclusive else []
    around = (*inside, *between, *sorted(folders), study.top.parent)
    for folder, stem in (*((folder, name) for folder in around for name in (*sorted(numbers), study.uid)), *general):
        if folder not in texts:
            texts[folder] = defaultdict(list)
            for file in sorted(file for file in folder.glob("*.[tT][xX][tT]") if file.is_file()):
                texts[folder][REPORT if file.stem.lower() == REPORT else file.stem].append(file)
        if files := texts[folder].get(stem):
            named = stem in numbers
            key = ("accession", stem) if named else ("uid", study.uid)
            return {key: [Report(str(file), file, order=Identifier(stem) if named else NOBODY) for file in files]}
    return {}


def reports_of_table(table: Path, problems: list[DataError]) -> ByKey:
    """Reports of a table's rows, under the first of the three keys that a row states."""
    by_key: ByKey = defaultdict(list)
    for number, row in _rows(table, problems):
        if not row["report"]:
            continue
        where = f"{table}, row {number}"
        if reason := markup(row["report"]):
            problems.append(DataError(f"{where}: the report is no plain text", reason=reason))
            continue
        key: tuple[str, ...] = ("none", where)
        if row.get("study_instance_uid"):
            key = "uid", row["study_instance_uid"]
        elif row.get("accession_number"):
            key = "accession", row["accession_number"]
        elif row.get("patient_id") and row.get("study_date"):
            try:
                key = "day", row["patient_id"], date_of(row["study_date"]).date().isoformat()
            except DataError as error:
                problems.append(DataError(f"{where}, column 'study_date': {error}", reason=error.reason))
                continue
        patient = Identifier(row.get("patient_id", ""), row.get("patient_issuer", ""))
        order = Identifier(row.get("accession_number", ""), row.get("issuer", ""))
        by_key[key].append(Report(where, row["report"], patient, order))
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
            yield number, {names[name]: stated(without_mark(value)) for name, value in row.items()}
