"""The rule that all sources share: each study gets its own report or none, in any order of files."""

import csv
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from command import fedtar_here
from hypothesis import given
from hypothesis import strategies as st
from make_documents import TEXT, oru, text_sr
from tables import cases

from fedtar_flare.core.errors import DataError
from fedtar_flare.curation.archive_reports import reports_of_table
from fedtar_flare.curation.documents import FINAL, NOBODY, Document, Identifier, decide, moment, studies_of


def document(n=1, **more):
    usual = {"origin": str(n), "names": frozenset({("hl7", f"r{n}")}), "status": FINAL, "issued": "2024-01-01",
             "patients": (Identifier("P1"),), "order": Identifier(f"A{n}"), "text": f"text {n}"}  # fmt: skip
    return Document(**usual | more)


def outcome(*documents):
    rows, problems, _ = decide(documents)
    return sorted(row["report"] for row in rows), sorted(problem.reason for problem in problems)


def stated(n, **more):
    """The document of that number with what a case says of it."""
    made = {
        "names": lambda value: frozenset(map(tuple, value)),
        "patients": lambda value: tuple(Identifier(*one) for one in value),
        "order": lambda value: Identifier(*value),
        "further": lambda value: tuple((Identifier(*order), study) for order, study in value),
        "clocks": lambda value: tuple(map(tuple, value)),
    }
    return document(n, **{name: made.get(name, str)(value) for name, value in more.items()})


TABLE = cases(__file__, "documents.yaml")
CASES = TABLE["cases"] | {f"text {text}": [[{"n": 1, "text": text}], [], [why]] for text, why in TABLE["texts"].items()}


@pytest.mark.parametrize("case", CASES)
def test_one_rule_decides_in_whatever_order_documents_come(case):
    documents, texts, reasons = CASES[case]
    documents = [stated(**one) for one in documents]
    for order in (documents, documents[::-1]):
        assert outcome(*order) == (sorted(texts), sorted(reasons))


def test_a_table_of_reports_keeps_the_same_rule(tmp_path):
    rows = ["1.2.1,No effusion.", "1.2.2,nan", "1.2.3,<NA>", "1.2.4,<b>No</b> effusion"]
    (tmp_path / "r.csv").write_text("\n".join(["study_instance_uid,report", *rows]))
    reports = reports_of_table(tmp_path / "r.csv", problems := [])
    assert [report.content for report in chain.from_iterable(reports.values())] == ["No effusion."]
    assert [problem.reason for problem in problems] == ["is-html"]


NUMBERS = st.sampled_from([Identifier(n, i) for n in ("", "1", "2") for i in ("", "X", "Y") if n or not i])


@given(st.lists(st.tuples(NUMBERS, st.sampled_from(["", "1.1", "1.2"])), max_size=4), st.randoms())
def test_numbers_and_studies_stay_as_a_document_pairs_them(pairs, rng):
    def studies():
        try:
            return studies_of(pairs)
        except DataError as error:
            return error.reason

    about = studies()
    rng.shuffle(pairs)
    assert studies() == about
    numbers, uids = ({*column} - {"", NOBODY} for column in zip(*pairs, strict=True)) if pairs else (set(), set())
    if about != "several-studies":
        named = [(about["order"], about["study"]), *about["further"]]
        assert {uid for _, uid in named} - {""} == uids and {order for order, _ in named} - {NOBODY} <= numbers
        assert len({order.value for order in numbers}) == sum(bool(order.value) for order, _ in named)
        if len(named) > 1:
            assert all(any(o.value == order.value and uid == u for o, u in pairs) for order, uid in named)


@pytest.mark.parametrize("text", ["2024-13", "yesterday", "2024-1-3", "20240131T1", "2024-01-31T25:00", "nan"])
def test_a_moment_is_understood_or_refused(text):
    with pytest.raises(ValueError):
        moment(text)


@given(st.datetimes(), st.integers(1, 6), st.booleans(), st.integers(-14, 14))
def test_a_moment_sorts_and_is_as_precise_as_stated(when, parts, dashes, zone):
    full = when.strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0")[: (4, 7, 10, 13, 16, 19)[parts - 1]]
    stated = full if dashes else full.translate(str.maketrans("", "", "-T:"))
    assert moment(stated) == full
    if parts > 3 and 1 < when.year < 9998:
        assert moment(f"{stated}{zone:+03d}00") != moment(f"{stated}{zone + 1:+03d}00") or zone == 14


def test_a_chain_of_many_versions_is_one_report():
    n = 5_000
    documents = [document(i, issued=f"{i:09d}", names=frozenset({("x", str(i)), ("x", str(i + 1))})) for i in range(n)]
    documents = [replace(d, order=Identifier("A1")) for d in documents]
    assert outcome(*documents) == ([f"text {n - 1}"], ["superseded"] * (n - 1))


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
    table = (Path(__file__).with_name("notes.csv")).read_text(encoding="utf-8")
    got, left_out = read({"note.csv": table, "other.csv": "a,b\n1,2\n"}, "--accession", "note_source_value")
    assert [(row["patient_id"], row["accession_number"], row["report"]) for row in got] == [
        ("P1", "", "CT"), ("P3", "", "US"), ("P5", "A1", "a"), ("P5", "A2", "b")]  # fmt: skip
    once = ("no-text", "is-html", "no-report", "no-patient-id", "bad-date")
    assert left_out == {"other-note": 2, "several-reports": 4, **dict.fromkeys(once, 1)}
