"""A hospital's own table of studies, CSV with one row per study (``docs/how-to/prepare-data.md`` has the columns)."""

import csv
import difflib
import io
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from fedtar_flare.core.errors import ConfigError, DataError, collecting, decoding, within
from fedtar_flare.core.files import SHARED, is_file_or_folder, located, open_regular, replacing
from fedtar_flare.data.cells import SPLITS
from fedtar_flare.data.cohort import Modality, Visit
from fedtar_flare.data.sources.fields import PICTURES, age_at, date_of, known_age, labels_of, markup, sex_of, stated
from fedtar_flare.data.sources.reading import Reading, read_report
from fedtar_flare.data.sources.tables import Row, open_table

logger = logging.getLogger(__name__)
OPTIONS = ("modality",)
REQUIRED = ("patient_id", "study_datetime", "image")
REPORTS = ("report", "report_path")
LABELS = "labels"
KNOWN = (*REQUIRED, *REPORTS, "age", "birth_date", "sex", LABELS, "split", "institution", "lateral")
MODALITY, HEAD_BYTES = 0x00080060, 1 << 20
"""The tag, which is one of the first in a file, and how many bytes of the file are searched for it."""
NO_SEX = ("", "U", "UNKNOWN", "O", "OTHER", "X", "D", "NA", "N/A")
_FORMULA = re.compile(r"[\s']*[=+@-]")


def read_manifest(path: Path, options: Mapping[str, Any] = {}) -> Reading:
    """Read a table of studies. A row that cannot be used is left out; its error names row and column."""
    modality = options.get("modality")
    if modality not in (None, *get_args(Modality)):
        raise ConfigError(f"source 'manifest': modality '{modality}' is not one of {', '.join(get_args(Modality))}")
    table = path / "manifest.csv" if path.is_dir() else path
    reading = Reading.of(table, options, "manifest", OPTIONS)
    with open_table(table, "the manifest") as opened:
        _check_columns(opened.columns, table)
        rows, owners = list[tuple[int, Row, object]](), defaultdict[object, set[str]](set)
        for number, cells in opened.rows(reading.problems):
            row = {name: without_mark(cell) for name, cell in cells.items()}
            rows.append((number, row, _report_in(row, table.parent)))
            owners[rows[-1][2]].add(row["patient_id"])
        for number, row, report in rows:
            where = f"{table}, row {number}, column"
            with collecting(reading.problems):
                _required(row, "image", "no-image", where)
                image = located(table.parent, row["image"])
                if modality is None and is_file_or_folder(image):
                    modality = _modality(image)
                # a missing image is never opened, so its kind does not matter
                visit = _visit(row, number, image, modality or "ct", table.parent, where)
                if report and len(owners[report]) > 1:
                    text = f"{where} 'report_path': rows of several patients name {row['report_path']}"
                    raise DataError(text, reason="report-of-another-patient")
                split = row.get("split", "").lower()
                if split and split not in SPLITS:
                    raise DataError(f"{where} 'split': '{split}' is not one of {', '.join(SPLITS)}", reason="bad-split")
                text = row.get("sex", "")
                if (sex := sex_of(text)) is None and text.upper() not in NO_SEX:
                    logger.warning("%s 'sex': '%s' is not F or M and is taken as unknown", where, text)
                reading.add(visit, sex, row.get("institution", ""), f"{table}, row {number}")
                if split:
                    reading.stated[visit.patient_id].add(split)
    return reading


def write_rows(table: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a CSV manifest, whole or not at all."""
    with replacing(table, SHARED) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: f"'{v}" if _FORMULA.match(str(v)) else v for name, v in row.items()} for row in rows)


def _visit(row: Row, number: int, image: Path, modality: Modality, folder: Path, where: str) -> Visit:
    _required(row, "patient_id", "no-patient-id", where)
    with within(f"{where} 'study_datetime'"):
        acquired = date_of(row["study_datetime"])
    age = known_age(row.get("age", ""), f"{where} 'age'")
    if age is None:
        with within(f"{where} 'birth_date'"):
            age = age_at(row.get("birth_date", ""), acquired)
    column, text = "report", row.get("report", "")
    if file := _report_file(row):
        column, text = "report_path", read_report(folder / file, f"{where} 'report_path'")
    labels, uncertain = labels_of(row[LABELS]) if LABELS in row else (None, frozenset[str]())
    if reason := markup(text := stated(text)):
        raise DataError(f"{where} '{column}': the report is no plain text", reason=reason)
    if not text and labels is None:
        raise DataError(f"{where} '{column}': the report is empty", reason="empty-report")
    with within(f"{where} '{LABELS}'"):
        lateral = located(folder, row["lateral"]) if row.get("lateral") else None
        known: dict[str, Any] = {"age": age, "labels": labels, "uncertain": uncertain, "lateral": lateral}
        return Visit(row["patient_id"], f"row-{number}", acquired, image, text.strip(), modality, **known)


def _report_file(row: Row) -> Path | None:
    """The file of a report whose text is not in the row."""
    return Path(row["report_path"]) if not stated(row.get("report", "")) and row.get("report_path") else None


def _report_in(row: Row, folder: Path) -> object:
    """The file of a row's report, whatever path names it: its place on the disk, where it is there."""
    file = _report_file(row)
    with suppress(OSError, ValueError):
        if file and (status := (folder / file).stat()):
            return status.st_dev, status.st_ino
    return file


def _required(row: Row, column: str, reason: str, where: str) -> None:
    if not stated(row[column]):
        raise DataError(f"{where} '{column}': nothing is stated ('{row[column]}')", reason=reason)


def _modality(image: Path) -> Modality:
    """CT or radiograph, by the kind of file; a single DICOM file states its modality."""
    if image.suffix.lower() in PICTURES:
        return "radiograph"
    if image.is_dir() or image.name.lower().endswith((".nii", ".nii.gz", ".zip")):
        return "ct"
    from pydicom.filereader import read_partial

    with decoding(f"{image}: neither a picture nor readable DICOM"), open_regular(image) as file:
        start = io.BytesIO(file.read(HEAD_BYTES))
        header = read_partial(start, stop_when=lambda tag, *_: int(tag) > MODALITY, specific_tags=[MODALITY])
        return "radiograph" if header.get("Modality") in ("CR", "DX") else "ct"


def without_mark(cell: str) -> str:
    """Remove the mark that :func:`write_rows` puts before a cell that begins like a formula."""
    return cell[1:].strip() if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell


def _check_columns(columns: list[str], table: Path) -> None:
    missing = [name for name in REQUIRED if name not in columns]
    if not any(name in columns for name in (*REPORTS, LABELS)):
        missing.append("report")
    for name in missing:
        near = difflib.get_close_matches(name, columns, n=1)
        hint = f"; '{near[0]}' comes near" if near else ""
        raise ConfigError(f"{table}: column '{name}' is missing{hint} (there is: {', '.join(columns) or 'nothing'})")
    for column in columns:
        near = difflib.get_close_matches(column, KNOWN, n=1, cutoff=0.8)
        if column not in KNOWN and near and near[0] not in columns:
            logger.warning("%s: column '%s' is not read; did you mean '%s'?", table, column, near[0])
