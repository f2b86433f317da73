"""A DICOM export folder to a manifest, and the manifest read back."""

import csv
import gzip
import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from command import fedtar_here
from make_dicom import chest, of, put, slice_dataset, write_radiograph, write_series
from refused import refused
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.curation.archive import index_folder, write_manifest
from fedtar_flare.curation.archive_reports import join_reports
from fedtar_flare.data.sources.manifest import read_manifest
from fedtar_flare.imaging.readers.ct import read_ct


def study(folder: Path, patient="P", uid="1.2.1", prefix="", slices=9, series="1", **tags):
    """A CT study of one series; tags set to None are left out."""
    usual = {"PatientID": patient, "StudyInstanceUID": uid, "SeriesInstanceUID": f"{uid}.{series}"}
    usual |= {"StudyDate": "20200131", "StudyTime": "101500", "AccessionNumber": "A1"}

    def edit(ds, i):
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"{uid}.{series}.{i + 1}"
        put(**usual | tags)(ds)

    return write_series(folder, chest(slices) + np.int16(len(uid)), edit=edit, prefix=prefix)


def radiograph(path: Path, **tags):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_radiograph(path, np.zeros((40, 60)), StudyDate="20200131", PatientID="P", **tags)


def table(path: Path, head: str, *rows: str) -> Path:
    path.write_text("\n".join([head, *rows]), encoding="utf-8")
    return path


def indexed(folder, reports=None, **options):
    index = index_folder(folder, **options)
    join_reports(index, reports)
    return index


def rows_of(index, manifest):
    write_manifest(index, manifest)
    with manifest.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_manifest_that_reads_back_as_patients(tmp_path):
    hu = study(tmp_path / "x" / "deep" / "er", "P", "1.2.1", PatientAge="061Y", PatientSex="F", StudyTime="101500.25")
    study(tmp_path / "y", "P", "1.2.22", StudyDate="19000101", AccessionNumber="A2", PatientSex="F")
    study(tmp_path / "z", "Q", "1.2.333", StudyDate="20100131", AccessionNumber="A3", PatientBirthDate="19500131")
    rows = 'A1;"Effusion;\nleft."', "A2;Clear.", "A3;Clear.", "A9;Spare."
    reports = table(tmp_path / "r.csv", "AccessionNumber;Report", *rows)
    index = index_folder(tmp_path)
    join_reports(index, reports)
    assert (index.spare, index.dicom, index.files) == ([f"{reports}, row 5"], 27, 28)
    rows = rows_of(index, tmp_path / "out" / "manifest.csv")
    assert [row["study_datetime"][:4] for row in rows] == ["1900", "2010", "2020"], "never in the order of identifiers"
    one, two = sorted(read_manifest(tmp_path / "out").patients(), key=lambda p: p.patient_id)
    assert [v.acquired for v in one.visits] == [datetime(1900, 1, 1, 10, 15), datetime(2020, 1, 31, 10, 15)]
    assert one.visits[1].report == "Effusion;\nleft." and one.visits[1].age == 61 and one.sex == "F"
    assert two.visits[0].age == pytest.approx(60, abs=0.01) and two.sex is None
    assert np.array_equal(read_ct(one.visits[1].image).hu, hu)


def test_studies_in_one_folder_are_left_out_or_linked(tmp_path):
    first = study(tmp_path / "flat", "P", "1.2.1", prefix="a")
    second = study(tmp_path / "flat", "P", "1.2.22", prefix="b", StudyDate="20210131")
    study(tmp_path / "own", "Q", "1.2.333", AccessionNumber="A3")
    index = index_folder(tmp_path)
    assert index.rejected() == {"shared-folder": 2} and [s.patient_id for s in index.studies] == ["Q"]
    assert "--links" in str(index.problems[0])
    for _ in range(2):  # again over what is there
        index = index_folder(tmp_path, links=tmp_path / "links")
        assert index.rejected() == {} and len(index.studies) == 3
        volumes = {s.acquired.year: read_ct(s.image).hu for s in index.studies if s.patient_id == "P"}
        assert np.array_equal(volumes[2020], first) and np.array_equal(volumes[2021], second)


def test_damaged_slices_do_not_vanish_behind_links(tmp_path):
    """What may be a slice is counted, and linked where it can only be of one study."""
    study(tmp_path / "x", "P", "1.2.1")
    study(tmp_path / "x" / "y", "Q", "1.2.22", AccessionNumber="A2")
    study(tmp_path / "flat", "R", "1.2.333", prefix="a", AccessionNumber="A3")
    study(tmp_path / "flat", "S", "1.2.4444", prefix="b", AccessionNumber="A4")
    for file in (tmp_path / "x" / "000.dcm", tmp_path / "flat" / "a000.dcm"):
        file.write_bytes(bytes(600))
    (tmp_path / "x" / "y" / "001.dcm").write_bytes((tmp_path / "x" / "y" / "001.dcm").read_bytes()[:420])
    (tmp_path / "x" / "README").write_bytes(b"")
    index = index_folder(tmp_path, links=tmp_path / "links")
    assert index.rejected() == {"unreadable": 2} and len(index.studies) == 4
    images = {study.patient_id: study.image for study in index.studies}
    for patient, reason in (("P", "unreadable"), ("Q", ("truncated", "no-pixel-data"))):
        with refused(reason):
            read_ct(images[patient])
    assert len(read_ct(images["S"]).hu) == 9


CASES = cases(__file__, "archive.yaml")
UNUSABLE = CASES["unusable"]


def test_unusable_studies_are_counted_by_reason(tmp_path):
    """A study of two series in folders of their own is one study."""
    study(tmp_path / "good" / "soft", "Q", "1.2.99", series="1")
    study(tmp_path / "good" / "lung", "Q", "1.2.99", series="2", ConvolutionKernel="B70f")
    for n, tags in enumerate(UNUSABLE.values()):
        study(tmp_path / f"{n}", **{"patient": "P", "uid": f"1.2.1.{n}", "slices": 1, **tags})
    index = index_folder(tmp_path)
    assert index.rejected() == dict.fromkeys(UNUSABLE, 1)
    assert all(str(tmp_path) in str(problem) for problem in index.problems)
    assert [s.image for s in index.studies] == [tmp_path / "good"]


@pytest.mark.parametrize("tags, acquired, age, noted", CASES["dates"])
def test_dates_times_and_ages(tmp_path, tags, acquired, age, noted):
    """From the next tag that has one; an age of zero, which nobody entered, is unknown."""
    study(tmp_path / "s", slices=2, **tags)
    (tmp_path / "s" / "report.txt").write_text("Clear.")
    index = indexed(tmp_path)
    (row,) = rows_of(index, tmp_path / "m.csv")
    assert (row["study_datetime"], row["age"]) == (f"{acquired}:00", age) and [*index.notes] == [noted] * bool(noted)


def test_mixed_patients_and_damaged_files(tmp_path):
    study(tmp_path / "good", "Q", "1.2.99")
    study(tmp_path / "mixed", "P", "1.2.6", prefix="a")
    study(tmp_path / "mixed", "R", "1.2.6", prefix="b")
    (tmp_path / "cut.dcm").write_bytes(sorted((tmp_path / "good").iterdir())[0].read_bytes()[:500])
    (tmp_path / "broken.zip").write_bytes(b"PK no archive")
    report = slice_dataset(chest(1)[0], 0)  # an object without a study is no matter
    put(SOPClassUID="1.2.840.10008.5.1.4.1.1.88.11", Modality="SR", StudyInstanceUID=None, PixelData=None)(report)
    report.save_as(tmp_path / "good" / "sr.dcm", enforce_file_format=True)
    assert index_folder(tmp_path).rejected() == {"mixed-patients": 1, "truncated": 1, "unreadable": 1}


def test_folders_that_are_not_looked_into_are_named(tmp_path):
    study(tmp_path / "d" / "a")
    study(tmp_path / "elsewhere", "Q", "1.2.2")
    (tmp_path / "d" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "d" / "closed").mkdir(mode=0)
    index = index_folder(tmp_path / "d")
    assert index.rejected() == {"linked-folder": 1} | ({"no-permission": 1} if os.geteuid() else {})
    assert [s.patient_id for s in index.studies] == ["P"]


def test_compressed_slices_are_named_with_their_folder(tmp_path):
    study(tmp_path / "d" / "open")
    (tmp_path / "d" / "open" / "5.dcm.gz").write_bytes(gzip.compress(b"DICM"))  # among others: counted by itself
    study(tmp_path / "d" / "packed", "Q", "1.2.2", slices=2)
    packed = tmp_path / "d" / "packed"
    for file in [*packed.iterdir()]:
        Path(file.rename(f"{file}.gz")).write_bytes(gzip.compress(b"DICM"))
    words = re.escape(f"{packed}: 2 compressed file(s), which are not read: unpack them ('gunzip'")
    index = index_folder(tmp_path / "d")
    assert index.rejected() == {"no-dicom": 1, "unreadable": 1}
    assert any(re.match(words, str(problem)) for problem in index.problems)
    for read in (index_folder, read_ct):
        with refused("no-dicom", match=words):
            read(packed)


def test_two_people_under_one_id(tmp_path):
    tags = ("PatientBirthDate", "19500101"), ("PatientBirthDate", "19600101"), ("PatientSex", "F"), ("PatientSex", "M")
    for n, (keyword, value) in enumerate(tags):
        study(tmp_path / f"{n}", keyword, f"1.2.{n}", slices=2, **{keyword: value})
    study(tmp_path / "e", "R", "1.2.5", slices=2)
    index = index_folder(tmp_path)
    assert index.rejected() == {"conflicting-birth-date": 2, "conflicting-sex": 2} and len(index.studies) == 1


def test_radiographs_the_frontal_one(tmp_path):
    for n, view in enumerate(("LL", "AP", "PA")):
        radiograph(tmp_path / "s" / f"{n}", ViewPosition=view, StudyInstanceUID="1.2.1", SOPInstanceUID=f"1.2.1.{n}")
    radiograph(tmp_path / "t" / "0", ViewPosition="LL", StudyInstanceUID="1.2.2")
    study(tmp_path / "ct", uid="1.2.3")
    index = index_folder(tmp_path, modality="radiograph")
    assert [s.image.name for s in index.studies] == ["2"] and index.notes == {"further-radiographs": 1}
    assert index.rejected() == {"lateral-view": 1, "other-modality": 1}


def test_a_zip_is_one_study(tmp_path):
    def packed(folder, name):
        shutil.make_archive(str(tmp_path / "out" / name), "zip", tmp_path / folder)
        return index_folder(tmp_path / "out")

    hu = study(tmp_path / "in" / "s")
    assert np.array_equal(read_ct(packed("in", "one").studies[0].image).hu, hu)
    study(tmp_path / "in" / "t", uid="1.2.5")
    assert packed("in", "one").rejected() == {"shared-folder": 2}
    shutil.copytree(tmp_path / "out", tmp_path / "within")
    assert packed("within", "outer").rejected() == {"shared-folder": 2, "no-dicom": 1}


@pytest.mark.parametrize("head, rows, report, reason", CASES["tables"])
def test_reports_of_a_table(tmp_path, head, rows, report, reason):
    study(tmp_path / "s")
    study(tmp_path / "other", "Z", "1.2.9", AccessionNumber="Z9")
    index = indexed(tmp_path, table(tmp_path / "r.csv", head, *rows))
    next(s for s in index.studies if s.patient_id == "Z").report = "Clear."
    written = {row["patient_id"]: row["report"] for row in rows_of(index, tmp_path / "m.csv")}
    assert written.get("P", "") == report and index.rejected() == dict.fromkeys((reason or "").split(), 1)


PLACES = "s/A1.txt s/report.txt A1.txt s/1.2.1.txt s/series/report.txt s/series/Report.TXT s/A1.Txt texts/2020/A1.txt "
PLACES += "texts/A1.TXT"


@pytest.mark.parametrize("place", PLACES.split())
def test_reports_beside_the_study_or_in_a_folder(tmp_path, place):
    study(tmp_path / "s" / "series")
    study(tmp_path / "t", uid="1.2.9", AccessionNumber="../A1")
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("Clear.")
    (tmp_path / "texts").mkdir(exist_ok=True)
    (tmp_path / "texts" / "A7.txt").write_text("Spare.")
    index = index_folder(tmp_path)
    join_reports(index, tmp_path / "texts" if place.startswith("texts") else None)
    assert len(index.spare) == place.startswith("texts")
    rows = rows_of(index, tmp_path / "m.csv")
    assert [row["report_path"] for row in rows] == [place] and index.rejected() == {"no-report": 1}
    assert read_manifest(tmp_path / "m.csv").patients()[0].visits[0].report == "Clear."


def test_what_a_table_cannot_hold_is_left_out_and_reports_of_nobody_are_told(tmp_path):
    """A folder named like a report is none; names that are not UTF-8, or end in a space, come back as another."""
    for n, name in enumerate((os.fsdecode(b"caf\xe9"), "s "), 1):
        study(tmp_path / name, uid=f"1.2.{n}", AccessionNumber=f"A{n}", slices=2)
    (tmp_path / "texts" / "A1.txt").mkdir(parents=True)
    for name in ("texts/A1.txt/A1.TXT", "texts/A2.txt", "texts/A7.txt"):
        (tmp_path / name).write_text("Clear.")
    index = indexed(tmp_path, tmp_path / "texts")
    with refused("no-patient", match=r"bad-name: 2.*\n.*belong to no study: 1"):
        write_manifest(index, tmp_path / "m.csv")


def test_two_files_of_one_name_that_differ_in_case_are_two_reports(tmp_path):
    study(tmp_path / "s")
    for name, text in (("report.txt", "Clear."), ("Report.TXT", "Effusion.")):
        (tmp_path / "s" / name).write_text(text)
    index = indexed(tmp_path)
    assert not index.studies and index.rejected() == {"ambiguous-report": 1}


@pytest.mark.parametrize("how", ["table", "folder", "beside"])
def test_a_report_under_an_accession_number_of_two_patients_is_left_out(tmp_path, how):
    study(tmp_path / "d" / "p", "P", "1.2.1")
    study(tmp_path / "d" / "q", "Q", "1.2.2")
    reports = table(tmp_path / "r.csv", "accession_number,report", "A1,Yes.")
    (tmp_path / "texts").mkdir()
    for folder in (tmp_path / "texts", tmp_path / "d"):
        (folder / "A1.txt").write_text("Yes.")
    index = indexed(tmp_path / "d", {"table": reports, "folder": tmp_path / "texts", "beside": None}[how])
    assert index.rejected() == {"ambiguous-accession-number": 2} and not index.studies
    told = table(tmp_path / "r.csv", "accession_number,patient_id,report", "A1,P,Yes.", "A1,Q,No.")
    index = indexed(tmp_path / "d", told)
    assert {s.patient_id: s.report for s in index.studies} == {"P": "Yes.", "Q": "No."}


@pytest.mark.parametrize("studies, reports, joined, reasons", CASES["issuers"])
def test_an_accession_number_counts_with_its_issuer(tmp_path, studies, reports, joined, reasons):
    """Two archives and their reports, in HL7, as a hospital joins them: nobody takes another's report."""
    pytest.importorskip("hl7", reason="of the extra 'pacs'")
    for n, names in enumerate(studies, 1):
        name, number = names or ("", "")
        issuer = [of(LocalNamespaceEntityID=name, UniversalEntityID=number)] if names else None
        tags = {"StudyDate": f"2020010{n}", "IssuerOfAccessionNumberSequence": issuer}
        study(tmp_path / "d" / f"archive{n}", "P", f"1.2.{n}", slices=2, **tags)
    study(tmp_path / "d" / "more", "Q", "1.2.9", slices=2, AccessionNumber="A9")
    head = "MSH|^~\\&|||||2024||ORU^R01|1|P|2.5\rPID|||{}\rOBR|1|{}|||||||||||||||||||20240131||RAD|F\r"
    head += "OBX|1|TX|||{}||||||F\r"
    text = [head.format("P", f"|A1^{issuer}", f"Text {n}.") for n, issuer in enumerate(reports, 1)]
    (tmp_path / "ris.hl7").write_text("".join([*text, head.format("Q", "|A9", "Text 9.")]))
    assert fedtar_here("data", "reports", tmp_path / "ris.hl7", "-o", tmp_path / "r.csv")[0] == 0
    out, reports = tmp_path / "manifest.csv", tmp_path / "r.csv"
    code, printed, _ = fedtar_here("data", "index", tmp_path / "d", "--reports", reports, "-o", out, "--json")
    got = {v.acquired.day: v.report for p in read_manifest(out).patients() if p.patient_id == "P" for v in p.visits}
    assert code == 0 and got == {n: f"Text {text}." for n, text in joined.items()}
    counts = json.loads(printed)
    assert counts["left_out"] == reasons and (counts["studies"], counts["patients"]) == (len(got) + 1, bool(got) + 1)


def test_an_unnamed_report_in_a_shared_folder_is_left_out(tmp_path):
    """Also of a study that cannot be read; each may have its own, which lies closer."""
    for name in ("p", "q"):
        study(tmp_path / name / "ct", name, f"1.2.{ord(name)}.3", AccessionNumber=name)
        study(tmp_path / name / "mr", name, f"1.2.{ord(name)}.4", Modality="MR")
        (tmp_path / name / "report.txt").write_text("Whose?")
    (tmp_path / "q" / "ct" / "report.txt").write_text("Of the CT.")
    study(tmp_path / "flat", uid="1.2.1", prefix="a", AccessionNumber="A1")
    study(tmp_path / "flat", uid="1.2.2", prefix="b", AccessionNumber="A2")
    (tmp_path / "flat" / "report.txt").write_text("Whose?")
    (tmp_path / "flat" / "A2.txt").write_text("Of A2.")
    index = indexed(tmp_path, links=tmp_path / "links")
    rows = rows_of(index, tmp_path / "m.csv")
    assert [row["report_path"] for row in rows] == ["flat/A2.txt", "q/ct/report.txt"]
    assert index.rejected() == {"no-report": 2, "not-ct-or-radiograph": 2}


def test_wrong_use(tmp_path):
    study(tmp_path / "s")
    index = index_folder(tmp_path)
    for reports in (tmp_path / "nowhere", table(tmp_path / "r.csv", "accession,text", "A1,x")):
        with pytest.raises(ConfigError):
            join_reports(index, reports)
    with refused("no-patient", match="no-report: 1, such as: study 1.2.1"):
        write_manifest(index, tmp_path / "m.csv")
    assert not (tmp_path / "m.csv").exists()
