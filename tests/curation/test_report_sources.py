"""Reports of several systems to one table, OMOP's notes, and joined with studies."""

import csv
import json

import pytest
from command import fedtar_here
from make_documents import TEXT, oru, text_sr

from fedtar_flare.curation.archive_reports import reports_of_table

pytest.importorskip("hl7", reason="of the extra 'pacs'")


@pytest.fixture
def read(tmp_path):
    def read(files, *more):
        (folder := tmp_path / "source").mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        code, out, err = fedtar_here("data", "reports", folder, "-o", tmp_path / "reports.csv", "--json", *more)
        assert code == 0, err
        assert "Erg" not in out + err and "P1" not in out + err
        with (tmp_path / "reports.csv").open(encoding="utf-8", newline="") as table:
            return list(csv.DictReader(table)), json.loads(out)["left_out"]

    return read


def test_reports_of_all_systems_in_one_table(read, tmp_path):
    note = "NOTE_ID,PERSON_ID,NOTE_DATE,NOTE_TITLE,NOTE_TEXT\n1,P2,2024-01-31,Radiology report,'- Klar.\n"
    files = {"a": text_sr(), "b": text_sr(complete=False), "c.hl7": oru("P3", "A3"), "note.CSV": note}
    rows, left_out = read(files)
    assert [(r["patient_id"], r["study_instance_uid"], r["study_date"]) for r in rows] == [
        ("P1", "1.2.1", ""), ("P3", "", ""), ("P2", "", "2024-01-31")]  # fmt: skip
    assert left_out == {"status-PARTIAL UNVERIFIED FINAL": 1}
    table = tmp_path / "reports.csv"
    assert [report.content for report in reports_of_table(table, [])["day", "P2", "2024-01-31"]] == ["- Klar."]
    assert rows[1]["report"] == TEXT


def test_omop_only_radiology_of_a_day_that_has_one(read):
    rows = [
        ("1", "P1", "44814641", "0", "", "CT", ""),
        ("2", "P1", "44814637", "0", "Discharge summary", "gone home", ""),
        ("3", "P2", "32817", "36716202", "", "X-ray", ""),
        ("4", "P2", "32841", "0", "", "CT", ""),
        ("5", "P3", "0", "", "Diagnostic Imaging Study", "US", ""),
        ("6", "P4", "32841", "0", "", "NULL", ""),
        ("7", "P4", "32841", "0", "", "<div>CT</div>", ""),
        ("8", "P5", "32841", "0", "", "a", "A1"),
        ("9", "P5", "32841", "0", "", "b", "A2"),
        ("10", "P6", "32831", "", "CT surgery consult", "x", "A3"),
        ("11", "nan", "32841", "", "", "x", "A4"),
    ]
    names = "note_id,person_id,note_type_concept_id,note_class_concept_id,note_title,note_text,note_source_value"
    table = "\n".join([f"{names},note_date", *(",".join([*row, "2024-01-31"]) for row in rows)])
    got, left_out = read({"note.csv": table, "other.csv": "a,b\n1,2\n"}, "--accession", "note_source_value")
    assert [(row["patient_id"], row["accession_number"], row["report"]) for row in got] == [
        ("P1", "", "CT"), ("P3", "", "US"), ("P5", "A1", "a"), ("P5", "A2", "b")]  # fmt: skip
    once = ("no-text", "is-html", "bad-row", "no-patient-id")
    assert left_out == {"other-note": 2, "several-reports": 2, **dict.fromkeys(once, 1)}
