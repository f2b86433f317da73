"""Reports of an export folder's studies: from a table, a folder of text files, or text files beside each study."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedtar_flare.curation.archive import Index, Study
from fedtar_flare.data.sources.fields import date_of
from fedtar_flare.data.sources.tables import own_table
from fedtar_flare.errors import ConfigError, DataError

KEYS = ("study_instance_uid", "accession_number", "patient_id", "study_date", "report")
Found = dict[str, str | Path]
"""Report texts or files by their origin."""


def join_reports(index: Index, reports: Path | None) -> int:
    """Give each study its report; a study with several different ones is left out (``ambiguous-report``).

    ``reports`` is a CSV table with the column ``report`` and one of ``study_instance_uid``, ``accession_number``, or
    ``patient_id`` with ``study_date``; a folder with ``<AccessionNumber>.txt`` or ``<StudyInstanceUID>.txt``; or None:
    such files, or ``report.txt``, beside each study. Returns how many reports of the table or folder belong to no
    study.

    Raises ConfigError without such a table or folder, or if a column is missing.
    """
    if reports is None:
        for study in index.studies:
            study.report_file = _beside(study)
        return 0
    if not reports.exists():
        raise ConfigError(f"{reports}: there is no such table or folder of reports")
    kept, used = [], set()
    find = _Folder(reports) if reports.is_dir() else _Table(reports)
    for study in index.studies:
        try:
            rows = find.of(study)
            if rows:
                study.report, study.report_file = _one(rows, study)
            used |= set(rows)
            kept.append(study)
        except DataError as error:
            index.problems.append(error)
    index.studies = kept
    return len(set(find.all()) - used)


def _one(rows: Mapping[str, str | Path], study: Study) -> tuple[str, Path | None]:
    texts = {value for value in rows.values() if isinstance(value, str)}
    files = [value for value in rows.values() if isinstance(value, Path)]
    if len(texts) + len(files) > 1:
        text = f"study {study.uid}: {len(texts) + len(files)} different reports ({', '.join(sorted(rows)[:4])})"
        raise DataError(text, reason="ambiguous-report")
    return (texts.pop(), None) if texts else ("", files[0])


def _beside(study: Study) -> Path | None:
    names = [f"{name}.txt" for name in (study.accession, study.uid) if _is_name(name)]
    folders = {path.parent for path in study.files}
    alone = [study.top, *(f for f in sorted(folders) if f.is_relative_to(study.top) and f != study.top)]
    between = [p for f in alone for p in f.parents if p.is_relative_to(study.top) and p not in alone]
    own = [folder / "report.txt" for folder in (*alone, *between)] if study.alone else []
    named = [folder / name for folder in (*alone, *between, *folders, study.top.parent) for name in names]
    return next((file for file in (*named, *own) if file.is_file()), None)


def _is_name(name: str) -> bool:
    """Whether an identifier can be the name of a file and nothing more."""
    return bool(name) and name not in (".", "..") and not re.search(r'[/\\:*?"<>|\0]', name)


class _Folder:
    def __init__(self, folder: Path):
        self._files: dict[str, list[Path]] = defaultdict(list)
        for file in sorted(folder.rglob("*.txt")):
            self._files[file.stem].append(file)

    def of(self, study: Study) -> Found:
        for name in (study.uid, study.accession):
            if name and name in self._files:
                return {str(file): file for file in self._files[name]}
        return {}

    def all(self) -> Iterable[str]:
        return [str(file) for files in self._files.values() for file in files]


@dataclass(frozen=True)
class _Row:
    name: str
    patient_id: str
    report: str


class _Table:
    def __init__(self, table: Path):
        self._by: dict[tuple[str, ...], list[_Row]] = defaultdict(list)
        self._all: list[str] = []
        columns: set[str] = set()
        for number, row in _rows(table, columns):
            if not row.get("report"):
                continue
            one = _Row(f"{table}, row {number}", row.get("patient_id", ""), row["report"])
            self._all.append(one.name)
            if row.get("study_instance_uid"):
                self._by["uid", row["study_instance_uid"]].append(one)
            elif row.get("accession_number"):
                self._by["accession", row["accession_number"]].append(one)
            elif row.get("patient_id") and row.get("study_date"):
                try:
                    day = date_of(row["study_date"]).date().isoformat()
                except DataError as error:
                    raise ConfigError(f"{table}, row {number}, column 'study_date': {error}") from error
                self._by["day", row["patient_id"], day].append(one)

    def of(self, study: Study) -> Found:
        day = study.acquired.date().isoformat()
        for key in (("uid", study.uid), ("accession", study.accession), ("day", study.patient_id, day)):
            rows = self._by.get(key, []) if key[1] else []
            if any(row.patient_id not in ("", study.patient_id) for row in rows):
                text = f"study {study.uid}: {rows[0].name} says that its report is another patient's"
                raise DataError(text, reason="report-of-another-patient")
            if rows:
                return {row.name: row.report for row in rows}
        return {}

    def all(self) -> Iterable[str]:
        return self._all


def _rows(table: Path, columns: set[str]) -> Iterable[tuple[int, dict[str, str]]]:
    """Row numbers and values; ``AccessionNumber``, ``Accession Number`` and ``accession_number`` are one column."""
    known = {key.replace("_", ""): key for key in KEYS}
    with own_table(table, "the table of reports") as reader:
        names = {name: known.get(re.sub(r"[^a-z]", "", name.lower()), name) for name in reader.fieldnames or []}
        columns |= set(names.values())
        keys = {"study_instance_uid", "accession_number"} & columns or {"patient_id", "study_date"} <= columns
        if "report" not in columns or not keys:
            raise ConfigError(
                f"{table}: needs the column 'report' and one of 'study_instance_uid', 'accession_number' or "
                f"'patient_id' with 'study_date' (there is: {', '.join(names) or 'nothing'})"
            )
        for number, row in enumerate(reader, start=2):
            yield number, {names[k]: (v or "").strip() for k, v in row.items() if isinstance(k, str)}
