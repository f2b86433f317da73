"""The order of visits comes from their dates alone, and a merged day loses no text."""

import logging
from datetime import datetime, timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cohort import Visit
from fedtar_flare.data.sources.reading import Reading, log_left_out

IMAGES = sorted(Path(__file__).parent.glob("test_*.py"))  # any files will do: none is opened
EPOCHS = (datetime(1900, 1, 1), datetime(2020, 1, 1), datetime(2180, 6, 1))


def studies_of(*columns):
    drawn = st.tuples(*map(st.sampled_from, columns), st.sampled_from([None, 40.0, 50.0]))
    return st.lists(drawn, min_size=1, max_size=12)


REPORTS = ["Clear.", "Effusion, left.", "A nodule.", "1. Stable."]
STUDIES = studies_of("abc", EPOCHS, range(4), [0, 6, 23], REPORTS, range(5))
CROWDED = studies_of("ab", EPOCHS[:1], [0, 1], [0, 6], REPORTS[:2], range(5))  # many of the very same moment


def read(studies, same_day="keep", rename=None, cleaning="none"):
    reading = Reading("test", same_day=same_day, cleaning=cleaning)
    for number, (patient, epoch, day, hour, report, image, age) in enumerate(studies):
        patient = (rename or {}).get(patient, patient)
        acquired = epoch + timedelta(days=day, hours=hour)
        reading.add(Visit(patient, f"v{number}", acquired, IMAGES[image], report, "radiograph", age), None)
    return reading.patients()


def course(patients, rename=None):
    return {
        (rename or {}).get(p.patient_id, p.patient_id): [(v.acquired, v.image, v.report) for v in p.visits]
        for p in patients
    }


@given(STUDIES | CROWDED, st.randoms(use_true_random=False), st.permutations("abc"), st.sampled_from(["keep", "merge"]))
def test_order_does_not_hang_on_rows_or_identifiers(studies, random, names, same_day):
    mixed, rename = random.sample(studies, len(studies)), dict(zip("abc", names, strict=True))
    assert course(read(studies, same_day), rename) == course(read(mixed, same_day, rename))


@given(STUDIES)
def test_merging_leaves_one_visit_a_day_and_every_text(studies):
    for kept, merged in zip(read(studies), read(studies, "merge"), strict=True):
        days = [v.acquired.date() for v in merged.visits]
        assert days == sorted(set(days)) == sorted({v.acquired.date() for v in kept.visits})
        for visit in merged.visits:
            same = [v for v in kept.visits if v.acquired.date() == visit.acquired.date()]
            assert visit.report.split("\n") == list(dict.fromkeys(v.report for v in same))
            assert (visit.image, visit.acquired, visit.visit_id) == (same[0].image, same[0].acquired, same[0].visit_id)
            assert visit.age == next((v.age for v in same if v.age is not None), None)


@given(STUDIES)
def test_merged_and_cleaned_reports_stay_in_one_line(studies):
    for patient in read(studies, "merge", cleaning="r2gen-v1"):
        assert all("\n" not in v.report and v.report.endswith(".") for v in patient.visits)


def test_a_report_that_cleaning_empties_is_left_out_by_reason():
    reading = Reading("test", cleaning="r2gen-v1")
    with refused("empty-report", "patient a, study s"):
        reading.add(Visit("a", "s", EPOCHS[0], Path("i"), "... ___ .", "ct"), None)


def test_the_same_studies_are_logged_once_and_named_at_the_debug_level_only(tmp_path, caplog):
    problems = [DataError(f"{tmp_path}/patient-17/2020-03-04: row {n}", reason="no-image") for n in range(3)]
    problems.append(DataError(f"{tmp_path}/patient-18", reason="no-report"))
    caplog.set_level(logging.DEBUG)
    for _ in range(3):  # as each task of a run does
        log_left_out(problems)
    first, second = shown = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert "3 study(ies) left out: no-image" in first and "1 study(ies) left out: no-report" in second
    assert "patient-1" not in first + second and str(tmp_path) not in first + second
    assert sum("patient-1" in record.getMessage() for record in caplog.records) == 4
    log_left_out(problems[:1])  # others than before
    assert len([record for record in caplog.records if record.levelno >= logging.INFO]) == len(shown) + 1
