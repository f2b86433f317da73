"""Splits by a keyed number, steps by dates, and what becomes of both when visits are left out."""

import hashlib
import hmac
import logging
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.data.cells import PRIORS, Timeline, keyed_unit, split_of
from fedtar_flare.data.cohort import SPLITS, Cohort, Patient, Visit
from fedtar_flare.data.sources.reading import Reading, log_left_out

KEY = bytes(range(32))
DAY = datetime(2020, 1, 1)


def visit(pid="p", day=0, image="a", **changes):
    fields = {"visit_id": f"{day}-{image}", "acquired": DAY + timedelta(days=day), "report": "Clear.", "modality": "ct"}
    return Visit(pid, image=Path(image), **{**fields, **changes})


def cohort(patients, **settings):
    rejected = settings.pop("rejected", None)
    timeline = Timeline(**{"time_steps": 3, **settings})
    return Cohort("site-1", patients, key=KEY, timeline=timeline, rejected=rejected)


def patients(n=40, visits=4):
    return [Patient(f"p{i}", "F", tuple(visit(f"p{i}", d * 30, f"{d}") for d in range(visits))) for i in range(n)]


@given(st.text(min_size=1), st.binary(min_size=16, max_size=64))
def test_the_keyed_number_is_the_head_of_the_hmac(text, key):
    digest = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    assert keyed_unit(text, key) == (int(digest[:16], 16) >> 11) / 2**53


def test_fractions_are_met_within_statistics_and_a_short_key_is_refused():
    n = 20_000
    seen = Counter(split_of(f"patient-{i}", KEY) for i in range(n))
    for split, share in {"train": 0.7, "validation": 0.1, "test": 0.2}.items():
        assert abs(seen[split] - n * share) < 4 * np.sqrt(n * share * (1 - share))
    with pytest.raises(ConfigError):
        split_of("p", b"short")


def test_dates_with_and_without_a_zone_compare():
    noon_in_tokyo = datetime(2020, 1, 1, 12, tzinfo=timezone(timedelta(hours=9)))
    made = Patient("p", None, (visit(image="b", acquired=datetime(2020, 1, 1, 4)), visit(acquired=noon_in_tokyo)))
    assert [v.acquired for v in made.visits] == [datetime(2020, 1, 1, 4), datetime(2020, 1, 1, 12)]
    assert visit(acquired=datetime(2020, 1, 1, tzinfo=UTC)).acquired.tzinfo is None
    assert [visit(age=age).age for age in (None, 0.0, 130.0)] == [None, 0.0, 130.0], "the bounds are allowed"


REFUSED = [
    *((lambda age=age: visit(age=age), "age-out-of-range") for age in (430.0, -1.0, float("nan"))),
    (lambda: visit(report=" \n"), "empty-report"),
    (lambda: visit(modality="mr"), "unknown-modality"),
    (lambda: Patient("p", "F", ()), "no-visit"),
    (lambda: Patient("p", "F", (visit(), visit(visit_id="other"))), "duplicate-visit"),
    (lambda: Patient("p", "F", (visit(), visit("q"))), "mixed-patients"),
    (lambda: cohort([]), "no-patient"),
    (lambda: cohort(patients(1) * 2), "duplicate-patient"),
    (lambda: cohort([*patients(1), Patient("q", None, (visit("q", modality="radiograph"),))]), "mixed-modality"),
]


@pytest.mark.parametrize("make, reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_unusable_data_is_refused(make, reason):
    with refused(reason) as error:
        make()
    assert "p" not in error.value.public.split() and reason in error.value.public


@pytest.mark.parametrize("visits", [1, 2, 5])
def test_steps_follow_the_date_and_visits_beyond_the_last_step_belong_to_it(visits):
    made = cohort(patients(30, visits))
    assert [s.time_step for s in made.samples(None) if s.visit.patient_id == "p7"] == [1, 2, 3, 3, 3][:visits]
    by_step = [sum(counts) for counts in zip(*made.counts().values(), strict=True)]
    assert by_step == [30, 30 * (visits > 1), 30 * max(0, visits - 2)]


@given(st.lists(st.integers(-400, 400), min_size=1, max_size=6, unique=True))
def test_periods_are_half_open_calendar_bins(days):
    bounds = [DAY - timedelta(days=100), DAY + timedelta(days=100)]
    visits = tuple(visit(day=d, image=str(d)) for d in days)
    made = cohort([Patient("p", None, visits)], alignment="period", periods=bounds)
    for sample in (s for split in SPLITS for s in made.samples(split)):
        offset = (sample.visit.acquired - DAY).days
        assert sample.time_step == 1 + (offset >= -100) + (offset >= 100)


UNFIT = [{"time_steps": 0}, {"time_steps": 2.0}, {"alignment": "month"}, {"prior": "reports"}]
UNFIT += [{"alignment": "period", "periods": dates} for dates in ([], [DAY], [DAY, DAY], [DAY + timedelta(1), DAY])]


def test_unfit_timelines_are_refused():
    for settings in UNFIT:
        with pytest.raises(ConfigError):
            cohort(patients(2), **settings)


@given(st.integers(1, 3), st.floats(0, 1))
def test_a_cohort_until_a_step_validates_on_the_newest_visits_and_has_no_later_ones(step, share):
    made = cohort(patients(60, visits=3))
    arrived, everything, newest = (made.until(step, replayed) for replayed in (share, 1.0, 0.0))
    assert {s.time_step for s in arrived.samples("validation")} == {step}
    assert arrived.samples("test") == made.samples("test", range(1, step + 1))
    assert everything.samples("train") == made.samples("train", range(1, step + 1))
    assert newest.samples("train") == made.samples("train", step)
    drawn = [s for s in arrived.samples("train") if s.time_step < step]
    more = [s for s in made.until(step, min(1.0, share + 0.2)).samples("train") if s.time_step < step]
    assert [s for s in more if s in drawn] == drawn, "a larger share contains a smaller one"
    earlier = len(made.samples("train", range(1, step)))
    assert abs(len(drawn) - share * earlier) <= 0.2 * earlier


@given(st.lists(st.integers(0, 6), min_size=1, max_size=7), st.sampled_from(PRIORS[1:]), st.booleans())
def test_prior_is_the_last_visit_at_an_earlier_moment_over_all_steps(thirds, prior, by_period):
    """Also on one day, but for one at midnight; of visits at one moment, neither comes before the other."""
    group = [Patient("p", None, tuple(visit(day=d / 3, image=f"{i}") for i, d in enumerate(thirds)))]
    bins = {"alignment": "period", "periods": [DAY + timedelta(1), DAY + timedelta(2)]} if by_period else {}
    made = cohort(group, prior=prior, **bins)
    samples = made.samples(None)
    assert len(samples) == len(thirds)
    assert all(sample.prior is None for sample in cohort(group, **bins).samples(None)), "not asked for"
    for sample in samples:
        today = sample.visit.acquired.replace(hour=0)
        earlier = [t for s in samples if today != (t := s.visit.acquired) < sample.visit.acquired]
        assert (sample.prior and sample.prior.acquired) == max(earlier, default=None)
        days = None if not earlier else (sample.visit.acquired - max(earlier)) / timedelta(days=1)
        assert sample.days_since_prior == days and (days is None or days > 0)


def test_a_visit_that_becomes_unreadable_moves_no_later_one():
    """Fault: what a patient had at step 3 counted as step 2 once the image of the second visit could not be read."""
    before = cohort(patients(30), time_steps=4, prior="report")
    after = before.leaving_out(lambda v: "unreadable" if v.image.name in ("1", "2") else None)
    again = after.leaving_out(lambda v: "unreadable" if v.image.name == "0" else None)
    for split in SPLITS:
        steps = {s.visit: s.time_step for s in before.samples(split)}
        assert all(s.time_step == steps[s.visit] for s in (*after.samples(split), *again.samples(split)))
        for sample in after.samples(split, 4):  # the prior is the last visit that can be read
            assert sample.prior is not None and sample.prior.image.name == "0"
        assert all(sample.prior is None for sample in again.samples(split))
    assert after.counts()["train"][1:3] == [0, 0] and after.rejected == {"unreadable": 60}
    of_one_moment = cohort([Patient("p", None, tuple(visit(image=name) for name in "abc"))])
    less = of_one_moment.leaving_out(lambda v: "unreadable" if v.image.name == "b" else None)
    assert [s.time_step for s in less.samples(None)] == [1, 3]


IMAGES = sorted(Path(__file__).parent.glob("*.*"))  # any files will do: none is opened
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


def test_studies_that_are_left_out_are_named_at_the_debug_level_only(tmp_path, caplog):
    problems = [DataError(f"{tmp_path}/patient-17/2020-03-04: row {n}", reason="no-image") for n in range(3)]
    caplog.set_level(logging.DEBUG)
    log_left_out(problems)
    (shown,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert "no-image" in shown and "patient-1" not in shown and str(tmp_path) not in shown
