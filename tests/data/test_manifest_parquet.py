"""The Parquet manifest says what the CSV one says; and bad input, in either form."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, date, datetime

import numpy as np
import pytest
from PIL import Image
from refused import refused

from fedtar_flare.data.sources.manifest import read_manifest
from fedtar_flare.errors import ConfigError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

GOOD = {
    "patient_id": "ok",
    "study_datetime": "2020-01-01",
    "image": "a.png",
    "report": "Clear.",
    "age": "50",
    "sex": "F",
}


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        Image.fromarray(np.arange(6400, dtype=np.uint8).reshape(80, 80)).save(tmp_path / name)
    return tmp_path


def write_csv(folder, rows):
    with (folder / "m.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "m.csv"


def write_parquet(folder, rows):
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "m.parquet")
    return folder / "m.parquet"


WRITERS = {"csv": (write_csv, 3), "parquet": (write_parquet, 2)}  # the number of the second row, as people count


@pytest.fixture(params=WRITERS)
def form(request):
    return WRITERS[request.param]


BAD = [
    ({"image": "nowhere.png"}, "no-image", "image"),
    ({"image": ""}, "no-image", "image"),
    ({"report": " "}, "empty-report", "report"),
    ({"study_datetime": ""}, "no-date", "study_datetime"),
    ({"study_datetime": "01/02/2020"}, "bad-date", "study_datetime"),
    ({"study_datetime": "2020-02-30"}, "bad-date", "study_datetime"),
    ({"age": "430"}, "age-out-of-range", "age"),
    ({"age": "old"}, "bad-age", "age"),
    ({"age": "-3"}, "bad-age", "age"),
    ({"patient_id": ""}, "no-patient-id", "patient_id"),
]


@pytest.mark.parametrize("change, reason, column", BAD)
def test_a_bad_row_is_named_and_the_good_one_kept(folder, form, change, reason, column):
    write, number = form
    reading = read_manifest(write(folder, [GOOD, {**GOOD, "patient_id": "bad", **change}]))
    assert [p.patient_id for p in reading.patients()] == ["ok"] and reading.rejected() == {reason: 1}
    assert f"row {number}, column '{column}'" in str(reading.problems[0])
    assert "row" not in reading.problems[0].public


def test_a_study_twice_and_two_people_under_one_id(folder, form):
    write, _ = form
    rows = [
        GOOD,
        GOOD,
        GOOD,
        {**GOOD, "image": "b.png", "sex": ""},
        {**GOOD, "patient_id": "two", "sex": "F"},
        {**GOOD, "patient_id": "two", "sex": "M", "image": "b.png"},
        {**GOOD, "patient_id": "x", "sex": "perhaps"},
    ]
    reading = read_manifest(write(folder, rows))
    assert {p.patient_id: (p.sex, len(p.visits)) for p in reading.patients()} == {"ok": ("F", 2), "x": (None, 1)}
    assert reading.rejected() == {"duplicate-visit": 2, "conflicting-sex": 2}


def test_nothing_usable_says_why(folder, form):
    write, _ = form
    with refused("no-patient", "empty-report: 1"):
        read_manifest(write(folder, [{**GOOD, "report": ""}])).patients()


@pytest.mark.parametrize("wrong, near", [("patientid", "patient_id"), ("Image", "image"), ("reports", "report")])
def test_a_wrong_column_names_the_nearest(folder, form, wrong, near):
    write, _ = form
    row = {wrong if key == near else key: value for key, value in GOOD.items()}
    with pytest.raises(ConfigError, match=f"column '{near}' is missing; '{wrong}' comes near"):
        read_manifest(write(folder, [row]))


@pytest.mark.parametrize(
    "option, said",
    [
        ({"same_dy": "merge"}, "did you mean 'same_day'"),
        ({"same_day": "merg"}, "did you mean 'merge'"),
        ({"cleaning": "r2gen"}, "did you mean 'r2gen-v1'"),
        ({"sections": ["finding"]}, "did you mean 'findings'"),
        ({"sections": 3}, "sections must be"),
    ],
)
def test_a_wrong_option_names_the_nearest(folder, form, option, said):
    write, _ = form
    with pytest.raises(ConfigError, match=said):
        read_manifest(write(folder, [GOOD]), option)


def test_real_types_are_understood(folder):
    rows = [
        {**GOOD, "patient_id": 7, "study_datetime": datetime(2020, 1, 31, 12, 30), "age": 50.5, "sex": None},
        {**GOOD, "patient_id": 8, "study_datetime": datetime(2180, 1, 1), "age": None, "sex": "M"},
        {**GOOD, "patient_id": 9, "study_datetime": None, "age": float("nan"), "sex": "M"},
    ]
    reading = read_manifest(write_parquet(folder, rows))
    seven, eight = reading.patients()
    assert seven.patient_id == "7" and seven.visits[0].acquired == datetime(2020, 1, 31, 12, 30)
    assert seven.visits[0].age == 50.5 and seven.sex is None
    assert eight.visits[0].acquired == datetime(2180, 1, 1) and eight.visits[0].age is None
    assert reading.rejected() == {"no-date": 1} and "row 3, column 'study_datetime'" in str(reading.problems[0])


def test_dates_days_and_zones(folder):
    table = {
        "patient_id": ["1"],
        "image": ["a.png"],
        "report": ["Clear."],
        "study_datetime": arrow.array([1_580_473_800_123_456_789], arrow.timestamp("ns", "UTC")),
        "birth_date": arrow.array([date(1950, 1, 31)]),
    }
    parquet.write_table(arrow.table(table), folder / "m.parquet")
    (patient,) = read_manifest(folder / "m.parquet").patients()
    visit = patient.visits[0]
    assert visit.acquired == datetime.fromtimestamp(1_580_473_800.123456, UTC).replace(tzinfo=None)
    assert visit.age == pytest.approx(70, abs=0.01)


def test_whole_numbers_that_a_data_frame_made_decimal_keep_their_name(folder):
    rows = [{**GOOD, "patient_id": 12.0}]
    assert read_manifest(write_parquet(folder, rows)).patients()[0].patient_id == "12"


def test_a_folder_holds_one_manifest(folder):
    write_parquet(folder, [GOOD]).rename(folder / "manifest.parquet")
    assert len(read_manifest(folder).patients()) == 1
    write_csv(folder, [GOOD]).rename(folder / "manifest.csv")
    with pytest.raises(ConfigError, match="name the one that counts"):
        read_manifest(folder)


def test_what_is_no_parquet(folder):
    (folder / "m.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="not readable as Parquet"):
        read_manifest(folder / "m.parquet")
    with pytest.raises(ConfigError, match="no such file"):
        read_manifest(folder / "n.parquet")


def test_without_pyarrow_the_message_says_what_to_install(folder, monkeypatch):
    path = write_parquet(folder, [GOOD])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedtar_flare\[parquet\]'"):
        read_manifest(path)
