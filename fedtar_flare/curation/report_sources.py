"""Collect reports of other systems (FHIR R4, HL7 v2, DICOM SR, OMOP) for ``fedtar data index``."""

from collections.abc import Iterator
from pathlib import Path

from fedtar_flare.core.errors import DataError, collecting, decoding, within
from fedtar_flare.curation.dicom_sr import read_sr
from fedtar_flare.curation.documents import FINAL, Document, Identifier, decide
from fedtar_flare.curation.fhir import read_fhir
from fedtar_flare.curation.hl7v2 import read_hl7
from fedtar_flare.data.sources.tables import open_table


def collect(source: Path, accession: str = "", charset: str = "ASCII") -> tuple[list[dict[str, str]], list[DataError]]:
    """The rows of the table of reports of a file or folder, and a problem for each document that is left out."""
    documents: list[Document] = []
    problems: list[DataError] = []
    fhir: list[Path] = []
    for file in filter(Path.is_file, sorted(source.rglob("*")) if source.is_dir() else [source]):
        with collecting(problems), within(str(file)), decoding("cannot be read"), file.open("rb") as opened:
            if opened.read(132)[128:] == b"DICM":
                documents += read_sr(file)
            elif file.suffix == ".csv":
                documents += _read_omop(file, accession, problems)
            elif file.suffix in (".json", ".ndjson"):
                fhir.append(file)
            else:
                documents += read_hl7(file, accession, charset, problems)
    rows, left_out = decide([*documents, *read_fhir(fhir, problems)])
    return rows, problems + left_out


def _read_omop(file: Path, accession: str, problems: list[DataError]) -> Iterator[Document]:
    with open_table(file, "the table of notes") as opened:
        for n, row in opened.rows(problems):
            yield Document(
                origin=f"{file}, row {n}",
                names=frozenset({("omop", row.get("note_id") or f"{file}, row {n}")}),
                status=FINAL,  # OMOP has no status
                issued=row["note_date"],
                patients=(Identifier(row["person_id"]),) if row["person_id"] else (),
                order=Identifier(row.get(accession, "")),
                day=row["note_date"],
                text=row["note_text"],
            )
