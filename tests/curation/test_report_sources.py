"""Reports of FHIR, HL7 v2, DICOM SR and OMOP to one table, and joined with studies."""

import csv
import functools
import json
from collections import Counter

import pytest
from command import fedtar_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_dicom import put
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from fedtar_flare.curation.archive_reports import reports_of_table

pytest.importorskip("hl7", reason="of the extra 'pacs'")
TEXT = "Größere Ergüsse bds.\n- Neu: Knoten 3 mm."


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


WHEN, PID = "20240131120000+0100", "P1^^^H^MR~X^^^H^NI"


def oru(status="F", text=TEXT, when=WHEN, charset="UNICODE UTF-8", pid=PID, number="A1^RIS"):
    lines = "".join(f"OBX|{n}|TX|||{line}||||||F\r" for n, line in enumerate(text.split("\n"), 1))
    return (
        f"MSH|^~\\&|R|H|F|H|{when}||ORU^R01|1|P|2.5||||||{charset}\rPID|1||{pid}\rOBR|1||{number}||||||||||||||||||"
        f"|{when}||RAD|{status}\r{lines}OBX|9|ED|||PDF^AAAA||||||F\r"
    )


def test_hl7_by_character_set_patient_and_status(read):
    two = oru(pid="P2", number="A2^RIS") + oru(pid="P3", number="A3^RIS", text="Klar.").split("\r", 1)[1]
    files = {
        "1.hl7": b"\x0b" + oru(text="alt", when="202401310900+0100").encode() + b"\x1c\r",
        "2.hl7": oru("C", charset="8859/1").encode("latin-1"),
        "3.hl7": oru("P", number="A9^RIS") + oru(number=""),
        "4.hl7": two.replace("\r", "\n"),
        "5.hl7": oru(charset=""),
        "6.hl7": oru().replace("ORU^R01", "ADT^A01"),
    }
    rows, left_out = read(files)
    assert sorted((row["patient_id"], row["accession_number"], row["issuer"], row["report"]) for row in rows) == [
        ("P1", "A1", "RIS", TEXT), ("P2", "A2", "RIS", TEXT), ("P3", "A3", "RIS", "Klar.")]  # fmt: skip
    assert left_out == {"status-P": 1, "superseded": 1, "bad-charset": 1, "no-accession-number": 1, "no-report": 1}


SETS = {"": "ascii", "UNICODE UTF-8": "utf-8", "8859/7": "iso8859-7", "8859/15": "iso8859-15", "BIG-5": "big5",
        "GB 18030-2000": "gb18030", "KS X 1001": "euc_kr", "~ISO IR87": "iso2022_jp"}  # fmt: skip
PRINTED = [c for c in map(chr, (*range(0x21, 0x180), *range(0x390, 0xD800, 5))) if c.isprintable() and c != "\xa5"]
SEPARATORS = st.permutations("!\"#$%&'*;<=>?@[\\]^_{|}~").map(lambda order: order[:5])


@functools.cache
def in_set(name):
    known = [c for c in PRINTED if c.encode(SETS[name], "ignore").decode(SETS[name], "ignore") == c]
    character = st.tuples(st.sampled_from(["\n", *known]), st.booleans())
    return st.tuples(st.just(name), st.lists(character), SEPARATORS)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*SETS]).flatmap(in_set))
def test_hl7_in_any_character_set_and_separators_is_the_same_report(tmp_path, made):
    """Whether a character is written as it is, or as the bytes of its set; also beside a name with it in the header."""
    from fedtar_flare.curation.report_sources import collect

    name, characters, own = made
    codec, (_, _, _, esc, _) = SETS[name], own
    codes = {c: f"{esc}{code}{esc}" for c, code in zip((*own, "\n"), ("F", "S", "R", "E", "T", ".br"), strict=True)}
    codes |= {c: f"{esc}X{c.encode(codec).hex()}{esc}" for c, bits in characters if bits and codec != "iso2022_jp"}
    text = "Klar." + "".join(codes.get(c, c) for c, _ in characters)
    message = oru(text="TEXT", charset=name).translate(str.maketrans("|^~\\&", "".join(own))).replace("TEXT", text)
    message = message.replace(f"{own[0]}R{own[0]}", f"{own[0]}{text}{own[0]}", 1)  # MSH-3
    (tmp_path / "x.hl7").write_bytes(message.encode(codec))
    (one,), left_out = collect(tmp_path / "x.hl7")
    assert (one["patient_id"], one["accession_number"], one["issuer"], left_out) == ("P1", "A1", "RIS", [])
    assert one["report"] == "Klar." + "".join(c for c, _ in characters)


def test_hl7_is_read_exactly_or_left_out_by_reason(read, tmp_path):
    lung = "\u80ba".encode("iso2022_jp")  # switches there and back
    texts = [
        ("~ISO IR87", b"a " + lung + b" b", "a \u80ba b"),
        ("ISO IR87", rb"a \M2442\%b\C2842\ b" % lung[3:5], "a \u80ba b"),
        ("", rb"\C2D42\%b" % "\u0159".encode("iso8859-2"), "\u0159"),
        ("ISO IR14", b"\\E\\100 \xca\xb2", "\xa5100 \uff8a\uff72"),
        ("", rb"\H\Neu\N\:\.sp2\\.in+2\3\F\4\X0D0A\5", "Neu:\n\n  3|4\n5"),
        ("~ISO IR87", lung[:-3], "bad-charset"),
        ("~ISO IR87", lung + b"\xfc", "bad-charset"),
        ("8859/1", b"\x93Windows\x94", "bad-charset"),
        ("CNS 11643-1992", b"a", "bad-charset"),
        ("UNICODE UTF-8", rb"Gr\XF6\\XDF\e", "bad-escape"),
        ("", rb"a\Zx\b", "bad-escape"),
        ("", rb"T1\T2 bright", "bad-escape"),
    ]
    files = {}
    for n, (name, raw, _) in zip("abcdefghijkl", texts, strict=True):
        files[n] = oru(charset=name, text="<>", number=n).encode().replace(b"<>", raw)
    others = {"x": b"\xef\xbb\xbf" + oru(number="x").encode(), "y": oru(charset="UNICODE UTF-16").encode("utf-16")}
    name = b"|\x81\x7c|"  # of one character, whose second byte is the separator's
    chinese = oru(charset="GB 18030-2000", number="z").encode("gb18030").replace(b"|R|", name)
    rows, left_out = read(files | others | {"z": chinese})
    assert [row["report"] for row in rows] == [text for _, _, text in texts[:5]] + [TEXT, TEXT]
    assert left_out == Counter(reason for _, _, reason in texts[5:]) + Counter(["no-report"])
    code, out, _ = fedtar_here("data", "reports", tmp_path / "source", "-o", tmp_path / "reports.csv")
    assert code == 0 and f"bad-escape: 3, such as: {tmp_path / 'source' / 'j'}, message 1: a '\\' in a field" in out


def item(name, text="", *items):
    ds, code = Dataset(), Dataset()
    code.CodeMeaning, ds.ConceptNameCodeSequence, ds.ContentSequence = name, [code], list(items)
    if text:
        ds.TextValue = text
    return ds


def sr(path, flags="COMPLETE VERIFIED FINAL", **changes):
    ds = item("Report", "", item("Findings", "", item("Lung", changes.pop("text", TEXT))))
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.88.11"
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    ds.CompletionFlag, ds.VerificationFlag, ds.PreliminaryFlag = flags.split()
    whose = {"PatientID": "P1", "AccessionNumber": "A1", "StudyInstanceUID": "1.2.1"}
    whose |= {"SpecificCharacterSet": "ISO_IR 100"} | changes
    put(Modality="SR", ContentDate="20240131", ContentTime="1200", **whose)(ds)
    ds.save_as(path, enforce_file_format=True)
    return path.read_bytes()


def test_dicom_sr_and_omop(read, tmp_path):
    draft, dose = "PARTIAL UNVERIFIED PRELIMINARY", {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.88.67"}
    note = "NOTE_ID,PERSON_ID,NOTE_DATE,NOTE_TITLE,NOTE_TEXT\n1,P2,2024-01-31,Radiology report,'- Klar.\n"
    files = {"a": sr(tmp_path / "a"), "b": sr(tmp_path / "b", draft), "c": sr(tmp_path / "c", **dose), "note.CSV": note}
    rows, left_out = read(files)
    assert [(r["patient_id"], r["study_instance_uid"], r["study_date"]) for r in rows] == [
        ("P1", "1.2.1", ""), ("P2", "", "2024-01-31")]  # fmt: skip
    table = tmp_path / "reports.csv"
    assert [report.content for report in reports_of_table(table, [])["day", "P2", "2024-01-31"]] == ["- Klar."]
    assert rows[0]["report"] == f"Findings\nLung: {TEXT}"
    assert left_out == {f"status-{draft}": 1, "other-sr": 1}


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


def test_dicom_sr_in_its_character_set_or_not_at_all(read, tmp_path):
    korean, german = b"\x1b$)C" + "\ud3d0".encode("euc_kr"), TEXT.encode("latin-1")
    texts = [
        (["", "ISO 2022 IR 87"], b"a " + "\u80ba".encode("iso2022_jp") + b"\r\nc", "a \u80ba\r\nc"),
        (["", "ISO 2022 IR 149"], korean + b"\r\n" + korean, "\ud3d0\r\n\ud3d0"),
        (["", "ISO 2022 IR 58"], b"\x1b$)A" + "\u80ba".encode("gb2312"), "\u80ba"),
        (["ISO 2022 IR 101", "ISO 2022 IR 144"], b"\xf8 \x1b-L" + "\u0436".encode("iso8859-5"), "\u0159 \u0436"),
        ("ISO_IR 192", TEXT.encode(), TEXT),
        (["", "ISO 2022 IR 149"], korean + b"\r\n" + korean[4:], None),
        ("ISO_IR 192", german, None),
        ("ISO_IR 100", b"\x93Windows\x94", None),
        ("ISO_IR 999", german, None),
        ("", german, None),
    ]
    rows, left_out = read({
        n: sr(tmp_path / "sr", SpecificCharacterSet=named, text=raw, AccessionNumber=n, StudyInstanceUID=generate_uid())
        for n, (named, raw, _) in zip("abcdefghij", texts, strict=True)
    })  # fmt: skip
    assert [row["report"] for row in rows] == [f"Findings\nLung: {text}" for _, _, text in texts if text]
    assert left_out == {"bad-charset": 5}
