"""A hospital's own table: what is understood, and what a bad row, column or option is told."""

import csv
from collections import Counter
from datetime import datetime

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from make_dicom import chest, slice_dataset
from PIL import Image
from refused import refused
from tables import cases, write_table

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.data.cells import SPLITS, Timeline, split_of
from fedtar_flare.data.cohort import Cohort
from fedtar_flare.data.report_text import (
    SECTIONS,
    clean_report,
    find_identifiers,
    sections_of,
    select_sections,
    with_headings,
)
from fedtar_flare.data.sources.fields import age_at, age_of, date_of, sex_of
from fedtar_flare.data.sources.manifest import read_manifest, write_rows
from fedtar_flare.data.sources.tables import open_table, rows_of

HEAD = "patient_id,study_datetime,image,report,age,sex"
CASES = cases(__file__, "manifest.yaml")
GOOD = dict(zip(HEAD.split(","), ("ok", "2020-01-01", "a.png", "Clear.", "50", "F"), strict=True))


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        Image.fromarray(np.arange(100, dtype=np.uint8).reshape(10, 10)).save(tmp_path / name)
    return tmp_path


@pytest.fixture
def table(folder):
    def write(*rows, head=HEAD, encoding="utf-8"):
        (folder / "manifest.csv").write_text("\n".join([head, *rows]), encoding=encoding)
        return folder / "manifest.csv"

    return write


def reasons(reading):
    return [problem.reason for problem in reading.problems]


def test_patients_visits_and_their_order(table, folder):
    rows = '2,2020-03-01,a.png,"Effusion, left.",54,M', "1,2020-01-01,b.png,Clear.,,", "2,2019-12-31,c.png,Clear.,53,M"
    path = table(*rows)
    for place in (path, folder):
        two, one = read_manifest(place).patients()
        assert [v.acquired for v in two.visits] == [datetime(2019, 12, 31), datetime(2020, 3, 1)]
        assert two.visits[1].report == "Effusion, left." and two.visits[1].age == 54 and two.sex == "M"
        assert one.sex is None and one.visits[0].age is None and one.visits[0].image == folder / "b.png"
        assert two.visits[0].modality == "radiograph" and len({v.visit_id for v in two.visits}) == 2


@pytest.mark.parametrize("same_day", ["keep", "merge"])
def test_a_visit_whose_image_is_gone_keeps_its_place(table, folder, same_day):
    rows = [f"p,2020-0{month}-01,{name}.png,{name},1,F" for month, name in ((1, "a"), (2, "b"), (3, "c"))]
    path = table(*rows, "p,2020-03-01,d.png,d,1,F", "q,2020-01-01,d.png,d,1,F")

    def steps():
        reading = read_manifest(path, {"same_day": same_day})
        cohort = Cohort("s", reading.patients(), key=bytes(16), timeline=Timeline(9), rejected=reading.rejected())
        return {s.visit.report: s.time_step for split in SPLITS for s in cohort.samples(split)}, cohort.rejected

    assert steps() == ({"a": 1, "b": 2, "c": 3}, {"no-image": 2})
    (folder / "b.png").unlink()
    assert steps() == ({"a": 1, "c": 3}, {"no-image": 3})
    (folder / "a.png").unlink()
    assert steps() == ({"c": 3}, {"no-image": 4})


IMAGES = {**dict.fromkeys(("folder", "v.nii.gz", "s.zip", "CT"), "ct"), **dict.fromkeys(("f.jpeg", "DX"), "radiograph")}


@pytest.mark.parametrize("name", IMAGES)
def test_modality_follows_from_the_first_image(table, folder, name):
    if name in ("CT", "DX"):
        ds = slice_dataset(chest()[0], 0)
        ds.Modality = name
        ds.save_as(folder / name, enforce_file_format=True)
    elif name == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).touch()
    (patient,) = read_manifest(table(f"1,2020-01-01,{name},x,50,F")).patients()
    assert patient.visits[0].modality == IMAGES[name]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_byte_order_mark_blank_lines_and_blanks(table, delimiter):
    row = ["1", " 2020-01-01 ", " a.png", "Clear.", "", "f "]
    path = table(delimiter.join(row), "", delimiter * 5, head=delimiter.join(HEAD.split(",")), encoding="utf-8-sig")
    (patient,) = read_manifest(path).patients()
    assert patient.patient_id == "1" and patient.sex == "F"


def test_reports_in_files_and_birth_dates(table, folder):
    (folder / "r.txt").write_text("\ufeffKlar. Größe unverändert.\n", encoding="utf-8")
    head = "patient_id,study_datetime,image,report_path,birth_date"
    rows = "1,2020-06-30,a.png,r.txt,1950-06-30", "1,2020-06-30,b.png,r.txt,2021-01-01"
    reading = read_manifest(table(*rows, head=head))
    (visit,) = reading.patients()[0].visits
    assert visit.report == "Klar. Größe unverändert." and visit.age == pytest.approx(70, abs=0.01)
    assert reasons(reading) == ["age-out-of-range"] and "birth_date" in str(reading.problems[0])
    (folder / "link.txt").symlink_to("r.txt")
    for name in ("./r.txt", f"../{folder.name}/r.txt", "link.txt"):
        reading = read_manifest(table(*rows, f"2,2020-06-30,c.png,{name},", head=head))
        assert reading.rejected() == {"report-of-another-patient": 2, "age-out-of-range": 1}


def test_report_files_that_cannot_be_used(table, folder):
    path = table("1,2020-01-01,a.png,r.txt", head="patient_id,study_datetime,image,report_path")
    for content, reason in ((None, "no-report"), (b"\xff\xfe\x41", "not-utf8"), (b" \n", "empty-report")):
        if content is not None:
            (folder / "r.txt").write_bytes(content)
        reading = read_manifest(path)
        assert reasons(reading) == [reason]
        with refused("no-patient", reason):
            reading.patients()


@pytest.mark.parametrize("column, value, reason", CASES["rows"])
def test_a_bad_row_is_named_and_left_out(folder, column, value, reason):
    reading = read_manifest(write_table(folder / "m.csv", [GOOD, {**GOOD, "patient_id": "bad", column: value}]))
    assert [p.patient_id for p in reading.patients()] == ["ok"] and reading.rejected() == {reason: 1}
    assert f"row 3, column '{column}'" in str(reading.problems[0])
    assert "row" not in reading.problems[0].public


def test_an_unreadable_age_or_sex_is_unknown_and_a_column_of_nearly_the_right_name_is_pointed_out(table, caplog):
    row = "1,2020-01-01,a.png,x,old,7,1990-01-01"
    (patient,) = read_manifest(table(row, head=f"{HEAD},birthdate")).patients()
    assert (patient.sex, patient.visits[0].age) == (None, None)
    assert all(words in caplog.text for words in ("row 2, column 'sex'", "row 2, column 'age'", "'birth_date'"))


LAST = "patient_id,study_datetime,image,report"
ROW = "{},2020-01-01,a.png,{}"


@pytest.mark.parametrize("reports, bad", CASES["malformed"])
def test_a_malformed_row_is_refused_with_its_number(table, reports, bad):
    path = table(*(ROW.format(i, text) for i, text in enumerate(reports)), head=LAST)
    with pytest.raises(ConfigError, match=rf"row {bad[0]}: "):  # a public collection's is as it was published, or not
        list(rows_of(path, ["report"]))
    reading = read_manifest(path)
    assert [int(str(p).split(", row ")[1].split(":")[0]) for p in reading.problems] == bad
    assert reading.rejected() == {"bad-row": len(bad)}
    whole = [patient.visits[0].report for patient in reading.patients()]
    assert whole == [text for text in reports if text in ("Clear.", "Nodule.")]  # and nothing of another row in them


def test_a_split_of_the_sources_own(table):
    rows = ["a,2020-01-01,a.png,x,test", "b,2020-01-01,b.png,x,train", "c,2020-01-01,c.png,x,"]
    rows += ["d,2020-01-01,a.png,x,test", "d,2020-02-01,b.png,x,train", "e,2020-01-01,a.png,x,dev"]
    reading = read_manifest(table(*rows, head=f"{LAST},split"))
    patients = reading.patients()
    cohort = Cohort("s", patients, key=bytes(16), timeline=Timeline(1), splits=reading.splits)
    of = {s.visit.patient_id: s.split for s in cohort.leaving_out(lambda visit: None).samples(None)}
    assert (of["a"], of["b"], of["c"]) == ("test", "train", split_of("c", bytes(16))) and len(of) == 3
    assert reading.rejected() == {"bad-split": 1, "conflicting-split": 2}


def test_a_table_with_unclear_rows_or_columns_is_refused(table):
    for second in ("Clear.", '"Clear, all."'):
        with pytest.raises(ConfigError, match="lines 2 to 3"):
            read_manifest(table(ROW.format(1, '"Stable nodule'), ROW.format(2, second), head=LAST)).patients()
    with pytest.raises(ConfigError, match=r"column\(s\) report"):
        read_manifest(table(ROW.format(1, "Clear.,Nodule."), head=f"{LAST},report")).patients()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('",;\n\t'), min_size=1)))
def test_whatever_csv_writes_is_read_back(tmp_path_factory, texts):
    file = tmp_path_factory.getbasetemp() / "written.csv"
    with file.open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([["id", "report"], *([str(i), text] for i, text in enumerate(texts))])
    assert [row["report"] for row in rows_of(file, ["report"])] == [text.strip() for text in texts]
    problems = []
    with open_table(file, "a table") as table:
        assert [row["report"] for _, row in table.rows(problems)] == [text.strip() for text in texts]
    assert problems == []


def test_a_study_twice_and_two_people_under_one_id(folder, caplog):
    rows = [*[GOOD] * 3, GOOD | {"image": "b.png", "sex": ""}, GOOD | {"patient_id": "x", "sex": "perhaps"}]
    rows += [GOOD | {"patient_id": "two"}, GOOD | {"patient_id": "two", "sex": "M", "image": "b.png"}]
    rows += [GOOD | {"patient_id": "y", **more} for more in ({}, {"report": "Other."}, {"image": "b.png"})]
    reading = read_manifest(write_table(folder / "m.csv", rows))
    first = reading.patients()
    assert {p.patient_id: (p.sex, len(p.visits)) for p in first} == {"ok": ("F", 2), "x": (None, 1), "y": ("F", 1)}
    logged = len(caplog.records)
    assert reading.patients() == first and len(caplog.records) == logged  # and problems are counted once
    assert reading.rejected() == {"duplicate-visit": 2, "conflicting-sex": 2, "several-reports": 2}


def test_wrong_columns_options_and_tables_are_named(folder, table):
    for name in ("patient_id", "image", "study_datetime", "report"):
        row = {f"{column}s" if column == name else column: value for column, value in GOOD.items()}
        with pytest.raises(ConfigError, match=f"'{name}'"):
            read_manifest(write_table(folder / "m.csv", [row]))
    path = table("1,2020-01-01,a.png,x,50,F")
    nearest = {("modality", "mr"): "mr", ("same_day", "merg"): "merge", ("modalty", "ct"): "modality"}
    for (option, value), said in nearest.items():
        with pytest.raises(ConfigError, match=f"'{said}'"):
            read_manifest(path, {option: value})
    for file in (folder / "nowhere.csv", table("1,2020-01-01,a.png,Größe", encoding="latin-1")):
        with pytest.raises(ConfigError, match=file.name):
            read_manifest(file)


CELLS = st.text("=+-@'|a1 ,\n\u00e9", max_size=6).map(lambda text: f"{text}a".strip())


@example("' =a", "' =a")
@given(CELLS.filter(lambda text: "\n" not in text), CELLS)
def test_no_cell_that_is_written_is_a_formula_and_each_reads_back_as_it_was(tmp_path_factory, patient, report):
    folder = tmp_path_factory.mktemp("cells")
    (folder / "-1.png").touch()
    write_rows(folder / "m.csv", [GOOD | {"patient_id": patient, "report": report, "image": "-1.png"}])
    with (folder / "m.csv").open(newline="") as file:
        assert not any(cell.lstrip()[:1] in tuple("=+-@") for row in csv.reader(file) for cell in row)
    (found,) = read_manifest(folder / "m.csv").patients()
    (visit,) = found.visits
    assert (found.patient_id, visit.report, visit.image) == (patient, report, folder / "-1.png")


def test_dates_ages_and_sexes():
    day = datetime(2020, 1, 31)
    minute, second = day.replace(hour=12, minute=30), day.replace(hour=12, minute=30, second=5)
    dates = {"2020-01-31": day, "20200131": day, "2020-01-31 12:30": minute, "202001311230": minute}
    dates |= {"2020-01-31T12:30:05": second, "20200131123005.123": second, "1900-01-01": datetime(1900, 1, 1)}
    assert {text: date_of(text) for text in dates} == dates
    for text in ("2020013170520", "2020-01-31x05:20", "2020-W05-1", "01/02/2020"):
        with refused("bad-date"):
            date_of(text)
    assert [age_of(t) for t in ("54", "54.5", "054Y", "018M", "")] == [54, 54.5, 54, 1.5, None]
    assert [age_of(t) for t in ("90+", ">89", ">= 89", "45 years", "1 month")] == [90, 89, 89, 45, 1 / 12]
    assert [age_of(t) for t in ("nan", "N/A", "NA", "unknown", "000Y")] == [None] * 5
    assert age_of("010D") == pytest.approx(10 / 365.2425)
    assert age_at("", day) is age_at("nan", day) is None and age_at("2020-01-31", day) == 0
    assert [sex_of(t) for t in ("F", "female", " m ", "MALE", "", "other", "W")] == ["F", "F", "M", "M", *[None] * 3]


TEXTS = cases(__file__, "texts.yaml")


@pytest.mark.parametrize("kind, marked", [(kind, one) for kind, texts in TEXTS["identifiers"].items() for one in texts])
def test_identifiers_and_harmless_passages(kind, marked):
    text = marked.replace("[", "").replace("]", "")
    found = [] if kind == "none" else [(kind, (marked.index("["), marked.index("]") - 1))]
    assert find_identifiers(text) == found


@given(st.text(st.sampled_from("Dr. Smith 12.03.2019 +49@a-/()"), max_size=80))
def test_passages_are_in_order_and_do_not_overlap(text):
    edges = [edge for _, (start, end) in find_identifiers(text) for edge in (start, end) if start < end]
    assert edges == sorted(edges) and all(0 <= edge <= len(text) for edge in edges)


@pytest.mark.shared_data
def test_false_alarms_on_real_reports(shared_data):
    """800 reports of CT-RATE: all 244 hits are dates of earlier examinations (read one by one); no other alarm."""
    for name, column, dates, texts in (
        ("ctrate_reports/train.csv", "report_text", 244, 173), ("covid_chestxray/metadata.csv", "clinical_notes", 9, 9),
    ):  # fmt: skip
        with (shared_data / name).open(encoding="utf-8", errors="replace") as file:
            hits = [find_identifiers(row[column]) for row in csv.DictReader(file)]
        assert Counter(kind for of_text in hits for kind, _ in of_text) == {"date": dates}
        assert sum(map(bool, hits)) == texts


@pytest.mark.parametrize("text, expected", TEXTS["headings"])
def test_headings_and_texts_without(text, expected):
    assert sections_of(text) == expected


def test_sections_come_in_the_order_asked_for_and_missing_ones_are_skipped():
    text = "FINDINGS: Clear.\nIMPRESSION: Normal."
    assert select_sections(text, ("impression", "comparison", "findings")) == "Normal.\nClear."
    assert select_sections(text, ()) == text
    with refused("no-section", "no section technique"):
        select_sections(text, ("technique",))
    with pytest.raises(DataError, match="no headings at all"):
        select_sections("Clear.", ("findings",))


WORDS = st.lists(st.sampled_from(["clear", "No effusion.", "nodule 3 mm", "(stable)", "in comparison"]), min_size=1)


@given(st.dictionaries(st.sampled_from(SECTIONS), WORDS, min_size=1))
def test_sections_are_read_back_from_headings(parts):
    texts = {name: " ".join(words) for name, words in parts.items()}
    assert sections_of(with_headings(list(texts.items()))) == texts


DRAWN = st.text(st.sampled_from("aB1234 ._,;:-/\"'()[]@\n"), max_size=60)


@pytest.mark.parametrize("text, cleaned", TEXTS["r2gen"])
def test_r2gen_by_hand(text, cleaned):
    assert clean_report(text, "r2gen-v1").split() == cleaned.split()


@given(DRAWN)
def test_characters_after_cleaning(text):
    cleaned = clean_report(text, "r2gen-v1")
    assert clean_report(text) == text, "by default as stored"
    assert cleaned == cleaned.lower() and "\n" not in cleaned and "  " not in cleaned
    words = [token for token in cleaned.split() if token != "."]  # a full stop stands alone, as in R2Gen
    assert not set("".join(words)) & set('.,;:/"()[]@_')
    assert cleaned.endswith(".")
