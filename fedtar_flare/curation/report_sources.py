"""Collect reports of other systems (FHIR R4, HL7 v2, DICOM SR, OMOP) for ``fedtar data index``."""

import re
from collections.abc import Iterator
from pathlib import Path

from fedtar_flare.core.errors import DataError, collecting, decoding, within
from fedtar_flare.core.files import open_regular
from fedtar_flare.curation.dicom_sr import read_sr
from fedtar_flare.curation.documents import FINAL, Document, Identifier, decide
from fedtar_flare.curation.fhir import read_fhir
from fedtar_flare.curation.hl7v2 import read_hl7
from fedtar_flare.data.sources.fields import date_of, stated
from fedtar_flare.data.sources.manifest import without_mark
from fedtar_flare.data.sources.tables import open_table
from fedtar_flare.imaging.readers.dicom_files import files_below

RADIOLOGY = {"44814641", "32841", "36716202"}
"""Concepts of OMOP: note type "Radiology report" (to CDM 5.2), type "EHR radiology report" (from 5.3), note class
"Radiology studies report"; a type or class that only says "note", or 0, leaves it to the title."""
TITLE = re.compile(r"(diagnostic )?(radiology|imaging)( stud(y|ies))?( reports?)?", re.IGNORECASE)


def collect(
    source: Path, accession: str = "", charset: str = "ASCII"
) -> tuple[list[dict[str, str]], list[DataError], list[DataError]]:
    """As ``decide``, of a file or folder; a file without any document is a problem, too."""
    documents: list[Document] = []
    problems: list[DataError] = []
    fhir: list[Path] = []
    for file in sorted(files_below(source)) if source.is_dir() else [source]:
        before = len(documents) + len(problems)
        with collecting(problems), within(str(file)), decoding("cannot be read"), open_regular(file) as opened:
            suffix = file.suffix.lower()
            if opened.read(132)[128:] == b"DICM":
                documents += read_sr(file)
            elif suffix == ".csv":
                documents += _read_omop(file, accession, problems)
            elif suffix in (".json", ".ndjson"):
                fhir.append(file)
            else:
                documents += read_hl7(file, accession, charset, problems)
            if len(documents) + len(problems) == before and file not in fhir[-1:]:
                raise DataError("no document in it", reason="no-report")
    rows, left_out, notes = decide([*documents, *read_fhir(fhir, problems)])
    return rows, problems + left_out, notes


def _read_omop(file: Path, accession: str, problems: list[DataError]) -> Iterator[Document]:
    columns = {"person_id", "note_date", "note_text", accession.lower()} - {""}
    with open_table(file, "the table of notes") as opened:
        if missing := columns - {name.lower() for name in opened.columns}:
            text = f"without OMOP's {', '.join(sorted(missing))}; your own table goes to 'fedtar data index --reports'"
            raise DataError(text, reason="no-report")
        for n, cells in opened.rows(problems):
            row = {name.lower(): stated(cell) for name, cell in cells.items()}
            concepts = {row.get(f"note_{kind}_concept_id", "").removesuffix(".0") for kind in ("type", "class")}
            with collecting(problems), within(f"{file}, row {n}"):
                yield Document(
                    origin=f"{file}, row {n}",
                    names=frozenset({("omop", row.get("note_id", ""), str(file.parent))}),
                    status=FINAL,  # OMOP has no status
                    issued="",
                    patients=(Identifier(row["person_id"]),) if row["person_id"] else (),
                    order=Identifier(row[accession.lower()] if accession else ""),
                    day=row["note_date"] and date_of(row["note_date"]).date().isoformat(),
                    text=without_mark(row["note_text"]),
                    unread="" if concepts & RADIOLOGY or TITLE.fullmatch(row.get("note_title", "")) else "other-note",
                )
