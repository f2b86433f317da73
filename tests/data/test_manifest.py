from __future__ import annotations

from datetime import datetime

import numpy as np
import pytest
from make_dicom import chest, slice_dataset
from PIL import Image
from refused import refused

from fedtar_flare.data.cohort import Cohort
from fedtar_flare.data.sources.fields import age_at, age_of, date_of, sex_of
from fedtar_flare.data.sources.manifest import read_manifest
from fedtar_flare.data.splits import SPLITS
from fedtar_flare.data.timeline import Timeline
from fedtar_flare.errors import ConfigError

HEAD = "patient_id,study_datetime,image,report,age,sex"


@pytest.fixture
def table(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        Image.fromarray(np.arange(100, dtype=np.uint8).reshape(10, 10)).save(tmp_path / name)

    def write(*rows, head=HEAD, encoding="utf-8"):
        (tmp_path / "manifest.csv").write_text("\n".join([head, *rows]), encoding=encoding)
        return tmp_path / "manifest.csv"

    return write


def reasons(reading):
    return [problem.reason for problem in reading.problems]


def test_patients_visits_and_their_order(table, tmp_path):
    path = table(
        '2,2020-03-01,a.png,"Effusion, left.",54,M', "1,2020-01-01,b.png,Clear.,,", "2,2019-12-31,c.png,Clear.,53.5,M"
    )
    for place in (path, tmp_path):
        two, one = read_manifest(place).patients()
        assert [v.acquired for v in two.visits] == [datetime(2019, 12, 31), datetime(2020, 3, 1)]
        assert two.visits[1].report == "Effusion, left." and two.visits[1].age == 54 and two.sex == "M"
        assert one.sex is None and one.visits[0].age is None and one.visits[0].image == tmp_path / "b.png"
        assert two.visits[0].modality == "radiograph" and len({v.visit_id for v in two.visits}) == 2


def test_problems_are_counted_once_however_often_patients_are_asked_for(table, caplog):
    row = "1,2020-01-01,a.png,Clear.,1,F"
    reading = read_manifest(table(row, row, "2,2020-01-01,b.png,Clear.,1,F", "2,2020-01-02,b.png,Clear.,1,M"))
    first = reading.patients()
    logged = len(caplog.records)
    assert reading.patients() == first and len(caplog.records) == logged
    assert reading.rejected() == {"conflicting-sex": 2, "duplicate-visit": 1}


@pytest.mark.parametrize("same_day", ["keep", "merge"])
def test_a_visit_whose_image_is_gone_keeps_its_place(table, tmp_path, same_day):
    rows = [f"p,2020-0{month}-01,{name}.png,{name},1,F" for month, name in ((1, "a"), (2, "b"), (3, "c"))]
    path = table(*rows, "p,2020-03-01,d.png,d,1,F", "q,2020-01-01,d.png,d,1,F")

    def steps():
        reading = read_manifest(path, {"same_day": same_day})
        cohort = Cohort("s", reading.patients(), key=bytes(16), timeline=Timeline(9), rejected=reading.rejected())
        return {s.visit.report: s.time_step for split in SPLITS for s in cohort.samples(split)}, cohort.rejected

    assert steps() == ({"a": 1, "b": 2, "c": 3}, {"no-image": 2})
    (tmp_path / "b.png").unlink()
    assert steps() == ({"a": 1, "c": 3}, {"no-image": 3})
    (tmp_path / "a.png").unlink()
    assert steps() == ({"c": 3}, {"no-image": 4})


@pytest.mark.parametrize("said", ["radiograph", "film", "cxr", "xray"])
def test_synonyms_of_the_modality(table, said):
    (patient,) = read_manifest(table("1,2020-01-01,a.png,Clear.,1,F"), {"modality": said}).patients()
    assert patient.visits[0].modality == "radiograph"


@pytest.mark.parametrize("said", ["photo", "photograph"])
def test_a_photograph_is_one_only_where_the_site_says_so(table, said):
    path = table("1,2020-01-01,a.png,Clear.,1,F")
    (patient,) = read_manifest(path, {"modality": said}).patients()
    assert patient.visits[0].modality == "photograph"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_byte_order_mark_blank_lines_and_blanks(table, delimiter):
    row = ["1", " 2020-01-01 ", " a.png", "Clear.", "", "f "]
    path = table(delimiter.join(row), "", delimiter * 5, head=delimiter.join(HEAD.split(",")), encoding="utf-8-sig")
    (patient,) = read_manifest(path).patients()
    assert patient.patient_id == "1" and patient.sex == "F"


def test_reports_in_files_and_birth_dates(table, tmp_path):
    (tmp_path / "r.txt").write_text("\ufeffKlar. Größe unverändert.\n", encoding="utf-8")
    path = table("1,2020-06-30,a.png,r.txt,1950-06-30", head="patient_id,study_datetime,image,report_path,birth_date")
    (patient,) = read_manifest(path).patients()
    assert patient.visits[0].report == "Klar. Größe unverändert." and patient.visits[0].age == pytest.approx(
        70, abs=0.01
    )


def test_a_row_cut_short_is_left_out_and_named(table):
    reading = read_manifest(table("ok,2020-01-01,b.png,Clear.,50,F", "1,2020-01-01"))
    assert len(reading.patients()) == 1 and reading.rejected() == {"no-image": 1}
    assert "row 3, column 'image'" in str(reading.problems[0])


@pytest.mark.parametrize(
    "text, content, reason",
    [("r.txt", None, "no-report"), ("r.txt", b"\xff\xfe\x41", "not-utf8"), ("r.txt", b" \n", "empty-report")],
)
def test_report_files(table, tmp_path, text, content, reason):
    if content is not None:
        (tmp_path / "r.txt").write_bytes(content)
    reading = read_manifest(table(f"1,2020-01-01,a.png,{text}", head="patient_id,study_datetime,image,report_path"))
    assert reasons(reading) == [reason]
    with refused("no-patient", reason):
        reading.patients()


def test_born_after_the_study(table):
    reading = read_manifest(
        table("1,2020-01-01,a.png,x,2021-01-01", head="patient_id,study_datetime,image,report,birth_date")
    )
    assert reasons(reading) == ["age-out-of-range"] and "birth_date" in str(reading.problems[0])


def test_an_unreadable_sex_is_unknown_and_said(table, caplog):
    (patient,) = read_manifest(table("1,2020-01-01,a.png,x,50,7")).patients()
    assert patient.sex is None and "row 2, column 'sex': '7'" in caplog.text


@pytest.mark.parametrize(
    "head, said",
    [
        ("patientid,study_datetime,image,report", "'patient_id' is missing; 'patientid' comes near"),
        ("patient_id,date,image,report", "'study_datetime' is missing"),
        ("patient_id,study_datetime,image,text", "'report' is missing"),
        ("", "'patient_id' is missing"),
    ],
)
def test_a_missing_column_is_named(table, head, said):
    with pytest.raises(ConfigError, match=said):
        read_manifest(table("1,2020-01-01,a.png,x", head=head))


def test_a_column_that_is_nearly_right_is_pointed_out(table, caplog):
    read_manifest(table("1,2020-01-01,a.png,x,1990-01-01", head="patient_id,study_datetime,image,report,birthdate"))
    assert "'birthdate' is not read; did you mean 'birth_date'" in caplog.text


def test_unreadable_tables(tmp_path, table):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_manifest(tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_manifest(table("1,2020-01-01,a.png,Größe", encoding="latin-1"))


def test_options(table):
    path = table("1,2020-01-01,a.png,x,50,F")
    with pytest.raises(ConfigError, match="did you mean 'modality'"):
        read_manifest(path, {"modalty": "ct"})
    with pytest.raises(ConfigError, match="modality 'mr'"):
        read_manifest(path, {"modality": "mr"})
    assert read_manifest(path, {"modality": "ct"}).patients()[0].visits[0].modality == "ct"


@pytest.mark.parametrize(
    "name, expected",
    [
        *((name, "ct") for name in ("folder", "v.nii.gz", "s.zip", "CT")),
        *((name, "radiograph") for name in ("f.jpeg", "DX")),
    ],
)
def test_modality_is_told_from_the_first_image(table, tmp_path, name, expected):
    if name in ("CT", "DX"):
        ds = slice_dataset(chest()[0], 0)
        ds.Modality = name
        ds.save_as(tmp_path / name, enforce_file_format=True)
    elif name == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    (patient,) = read_manifest(table(f"1,2020-01-01,{name},x,50,F")).patients()
    assert patient.visits[0].modality == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("2020-01-31", datetime(2020, 1, 31)),
        ("2020-01-31 12:30", datetime(2020, 1, 31, 12, 30)),
        ("2020-01-31T12:30:05", datetime(2020, 1, 31, 12, 30, 5)),
        ("20200131", datetime(2020, 1, 31)),
        ("202001311230", datetime(2020, 1, 31, 12, 30)),
        ("20200131123005.123", datetime(2020, 1, 31, 12, 30, 5)),
        ("1900-01-01", datetime(1900, 1, 1)),
    ],
)
def test_dates(text, expected):
    assert date_of(text) == expected


def test_ages_and_sexes():
    assert [age_of(t) for t in ("54", "54.5", "054Y", "018M", "")] == [54, 54.5, 54, 1.5, None]
    assert age_of("010D") == pytest.approx(10 / 365.2425)
    assert age_at("", datetime(2020, 1, 1)) is None and age_at("2020-01-01", datetime(2020, 1, 1)) == 0
    assert [sex_of(t) for t in ("F", "female")] == ["F"] * 2 and [sex_of(t) for t in (" m ", "MALE")] == ["M"] * 2
    assert [sex_of(t) for t in ("", "other", "W")] == [None] * 3
