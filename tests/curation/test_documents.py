"""The rule that all sources of reports share, each study its own report or none; and the documents of DICOM SR."""

import csv
import json
from dataclasses import replace
from itertools import count, permutations
from pathlib import Path

import pytest
from command import fedtar_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_dicom import of, put
from make_documents import TEXT, item, oru, sr, text_sr
from pydicom.data import get_testdata_file
from pydicom.uid import generate_uid
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


EARLIER, LATER = generate_uid(), {"ContentDate": "20240201"}
MOD, CONTEXT = "HAS CONCEPT MOD", "HAS OBS CONTEXT"


def context(number, kind, value):
    return item(kind, "context", value, relation=CONTEXT, number=number, scheme="DCM")


def findings(*items):
    return item("CONTAINER", "Findings", "", *items)


def predecessor(uid=EARLIER, study="1.2.1"):
    series = of(ReferencedSOPSequence=[of(ReferencedSOPInstanceUID=uid)])
    return {"PredecessorDocumentsSequence": [of(StudyInstanceUID=study, ReferencedSeriesSequence=[series])]} | LATER


def request(number="A1", study="1.2.1"):
    return of(AccessionNumber=number, StudyInstanceUID=study)


def a(text, number="A1", issuer="", owner="", study="1.2.1"):
    return "P1", owner, number, issuer, study, text


X, Y = item("TEXT", "", "x"), item("TEXT", "", "y")
ISSUERS = {"IssuerOfPatientID": "H", "IssuerOfPatientIDQualifiersSequence": [of(UniversalEntityID="1.2")],
           "IssuerOfAccessionNumberSequence": [of(LocalNamespaceEntityID="RIS")]}  # fmt: skip
DOCUMENTS = {
    "the issuers of its numbers": ([sr(X, **ISSUERS)], [a("x", issuer="RIS", owner="H|1.2")], {}),
    "notes of other titles and empty reports beside it": (
        [sr(X), sr(Y, title=("Technologist note",), **LATER), sr(findings(), **LATER)],
        [a("x")], {"other-title": 1, "no-text": 1}),
    "two reports": ([sr(X), sr(Y, **LATER)], [], {"several-reports": 2}),
    "its predecessor": ([sr(X, SOPInstanceUID=EARLIER), sr(Y, **predecessor())], [a("y")], {"superseded": 1}),
    "a predecessor of another study": (
        [sr(X, SOPInstanceUID=EARLIER, StudyInstanceUID="1.2.2"), sr(Y, **predecessor(study="1.2.2"))],
        [a("y"), a("x", study="1.2.2")], {}),
    "a successor that is not verified": (
        [sr(X, SOPInstanceUID=EARLIER), sr(Y, flags="COMPLETE UNVERIFIED FINAL", **predecessor())],
        [], {"superseded": 1, "status-COMPLETE UNVERIFIED FINAL": 1}),
    "a flag that is none": ([sr(flags="COMPLETE VERIFIED Doe")], [], {"status-COMPLETE VERIFIED unknown": 1}),
    "of a device": ([sr(context("121005", "CODE", ("", "121007", "DCM")), X)], [], {"other-observer": 1}),
    "of a person": ([sr(context("121005", "CODE", ("", "121006", "DCM")), context("121008", "PNAME", "A^B"), X)],
                    [a("x")], {}),
    "of a technologist": ([sr(context("121010", "CODE", ("MTRA", "159016003", "SCT")), X)], [], {"other-observer": 1}),
    "about a fetus": ([sr(findings(context("121024", "CODE", ("", "121026", "DCM")), X))], [], {"other-subject": 1}),
    "about another patient": ([sr(context("121030", "TEXT", "P2"), X)], [], {"several-patients": 1}),
    "about another study": ([sr(context("121018", "UIDREF", "1.2.9"), X)], [], {"several-studies": 1}),
    "the number of its request": ([sr(X, AccessionNumber="", ReferencedRequestSequence=[request()])], [a("x")], {}),
    "two requests": ([sr(X, ReferencedRequestSequence=[request(), request("A2")])], [a("x"), a("x", "A2")], {}),
    "a request of another study": (
        [sr(X, ReferencedRequestSequence=[request(study="1.9")])], [], {"several-studies": 1}),
    "a dose report and a PDF": (
        [sr(SOPClassUID=f"1.2.840.10008.5.1.4.1.1.{n}") for n in ("88.67", "104.1", "9")], [], {"other-sr": 3}),
    "a picture": ([sr(SOPClassUID="1.2.840.10008.5.1.4.1.1.2", Modality="CT")], [], {"other-dicom": 1}),
    "public files": ([Path(get_testdata_file(f"{name}.dcm")).read_bytes() for name in ("reportsi", "test-SR")],
                     [], {"other-title": 1, "other-sr": 1}),
    "cut short": ([sr()[:-7]], [], {"truncated": 1}),
}  # fmt: skip


def absent(relation):
    return item("CODE", "Presence of finding", "Absent", relation=relation)


def nested(levels):
    return item("CONTAINER", "", "", nested(levels - 1)) if levels else X


IMAGE = item("IMAGE", relation="INFERRED FROM")
TREES = {
    "below a heading of reports": (findings(item("TEXT", "Lung", TEXT)), f"Findings\nLung: {TEXT}"),
    "a modifier of a container": (item("CONTAINER", "Effusion", "", absent(MOD)),
                                  "Effusion (Presence of finding: Absent)"),
    "within a container that is no heading of reports": (
        findings(item("CONTAINER", "Effusion", "", absent("CONTAINS"), X)),
        "Findings\nEffusion: Presence of finding: Absent\nEffusion: x"),
    "a container without items says nothing": (findings(item("CONTAINER", "Effusion"), X), "Findings\nx"),
    "a number as it is written, with its unit": (item("NUM", "Diameter", "3.10"), "Diameter: 3.10 millimeter"),
    "two numbers": (item("NUM", "Diameter", ["3", "4"]), "bad-document"),
    "a number that is none": (item("NUM", "Diameter"), "bad-document"),
    "references without words": (
        item("TEXT", "Lung", "x", item("SCOORD", "", "", IMAGE), IMAGE, item("UIDREF", "", "1.2")), "Lung: x"),
    "words below a reference": (item("IMAGE", "", "", item("TEXT", "", "x", relation=MOD)), "item-IMAGE"),
    "a name": (item("PNAME", "Told", "A^B"), "item-PNAME"),
    "a day": (item("DATE", "Prior", "20240101"), "item-DATE"),
    "another document": (item("COMPOSITE"), "item-COMPOSITE"),
    "an item elsewhere": (item("TEXT", "", "x", of(RelationshipType="INFERRED FROM")), "item-BY-REFERENCE"),
    "a damaged tag above a negation": (
        put(AcquisitionContextSequence=[absent(MOD)])(ds := item("TEXT", "", "x")) or ds, "bad-item"),
    "no value": (item("TEXT", "Effusion"), "item-TEXT"),
    "no value that is known": (item("Doe", "Effusion"), "item-unknown"),
    "one continuous sentence": (
        put(ContinuityOfContent="CONTINUOUS")(ds := findings(item("TEXT", "", "no"), X)) or ds, "item-continuous"),
    "too deep": (nested(40), "too-deep"),
    "HTML": (item("TEXT", "", "<html><body>Kein Erguss</body></html>"), "is-html"),
    "control characters": (item("TEXT", "", "a\x07b"), "bad-charset"),
}  # fmt: skip


@pytest.mark.parametrize("case", DOCUMENTS)
def test_only_a_radiologists_report_in_force_of_this_study(collected, case):
    files, rows, left_out = DOCUMENTS[case]
    for some in permutations(files):
        assert collected(some) == (sorted(rows), left_out)


@pytest.mark.parametrize("case", TREES)
def test_a_sentence_keeps_what_belongs_to_it_or_the_document_is_left_out(collected, case):
    tree, expected = TREES[case]
    rows, left_out = collected([sr(tree)])
    assert [row[-1] for row in rows] + [*left_out] == [expected]


KINDS = st.sampled_from(["TEXT", "CODE", "NUM", "CONTAINER", "IMAGE", "SCOORD", "PNAME", "COMPOSITE"])
RELATIONS = st.sampled_from(["CONTAINS", "CONTAINS", MOD, CONTEXT, "HAS PROPERTIES", "INFERRED FROM"])
TREE = st.recursive(st.tuples(KINDS, RELATIONS, st.just([])),
                    lambda inner: st.tuples(KINDS, RELATIONS, st.lists(inner, max_size=3)))  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TREE, min_size=1, max_size=3))
def test_no_word_is_lost_or_parted_from_what_it_qualifies(collected, trees):
    """Each value stands on the line of all that is above it, and of all that qualifies it."""
    numbers, together = count(100), []

    def made(tree, above=()):
        kind, relation, inner = tree
        value = f"{next(numbers)}" if kind in ("TEXT", "CODE", "NUM") else ""
        name = f"c{next(numbers)}" if kind == "CONTAINER" else ""
        together.extend([{*above, value}] if value else [])
        words = (*above, *filter(None, (name, value)))
        return item(kind, name, value, *(made(child, words) for child in inner), relation=relation)

    rows, left_out = collected([sr(*map(made, trees))])
    assert bool(rows) != bool(left_out)
    for *_, text in rows:
        assert all(any(all(word in line for word in words) for line in text.split("\n")) for words in together)


def test_text_in_its_character_set_or_not_at_all(collected):
    korean, german = b"\x1b$)C" + "\ud3d0".encode("euc_kr"), TEXT.encode("latin-1")
    kana = "\u30bc\u30e0"  # whose bytes have a backslash
    texts = [
        (["", "ISO 2022 IR 87"], b"a " + "\u80ba".encode("iso2022_jp") + b"\r\nc", "a \u80ba\nc"),
        (["", "ISO 2022 IR 87"], kana.encode("iso2022_jp"), kana),
        (["", "ISO 2022 IR 149"], korean + b"\r\n" + korean, "\ud3d0\n\ud3d0"),
        (["", "ISO 2022 IR 58"], b"\x1b$)A" + "\u80ba".encode("gb2312"), "\u80ba"),
        (["ISO 2022 IR 101", "ISO 2022 IR 144"], b"\xf8 \x1b-L" + "\u0436".encode("iso8859-5"), "\u0159 \u0436"),
        ("ISO_IR 192", TEXT.encode(), TEXT),
        ("ISO_IR 100", german, TEXT),
        ("ISO_IR 100", TEXT.encode(), None),
        ("ISO_IR 100", "\xfcber".encode(), None),
        (["", "ISO 2022 IR 149"], korean + b"\r\n" + korean[4:], None),
        ("ISO_IR 192", german, None),
        ("ISO_IR 100", b"\x93Windows\x94", None),
        ("ISO_IR 999", german, None),
        ("", german, None),
    ]  # fmt: skip
    for named, raw, text in texts:
        rows, left_out = collected([sr(item("TEXT", "", raw), SpecificCharacterSet=named)])
        assert (rows, left_out) == (([a(text)], {}) if text else ([], {"bad-charset": 1}))
