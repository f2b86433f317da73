"""Synthetic patients: their courses and reports, what lies on disk, DICOM files and phantoms."""

import itertools
import json
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock, patch

import numpy as np
import pydicom
import pytest
from command import loaded_by
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import Timeline, split_of, synthetic_key
from fedtar_flare.synthetic import build, cohort, course
from fedtar_flare.synthetic.cohort import TRUTH, synthetic_cohort
from fedtar_flare.synthetic.course import CohortOptions, change_step, plan_patient
from fedtar_flare.synthetic.dicom_writer import LOWEST_HU, write_ct_series
from fedtar_flare.synthetic.phantom import Scanner, draw_anatomy, render
from fedtar_flare.synthetic.reading import changes_in, findings_in, planted_changes
from fedtar_flare.synthetic.reports import GENERIC, STYLES, State, wording_of, write_report
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, NEW_FINDINGS, kind_of, side_of


def plan(number, site="site-1", style=1, time_steps=4, seed=0, alignment="visit", **options):
    half_years = tuple(course.FIRST_DAY + timedelta(days=180 * k) for k in range(1, time_steps))
    timeline = Timeline(time_steps, alignment, half_years if alignment == "period" else ())
    return plan_patient(site, style, number, timeline=timeline, seed=seed, options=CohortOptions(**options))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 500), st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(["visit", "period"]), st.booleans()
)
def test_a_plan_is_repeatable_and_consistent(number, seed, time_steps, alignment, untidy):
    patient, again = (plan(number, "s", 1, time_steps, seed, alignment, untidy=float(untidy)) for _ in range(2))
    assert patient == again
    moments = [visit.acquired for visit in patient.visits]
    assert moments == sorted(set(moments)) and 1 <= len(moments) <= time_steps
    before: dict[str, int] = {}
    for i, visit in enumerate(patient.visits):
        assert 1 <= visit.time_step <= time_steps
        assert set(visit.findings) <= set(FINDINGS)
        assert len(visit.findings.keys() & set(KNOWN_FINDINGS)) <= course.MOST_FINDINGS
        assert len(visit.findings.keys() & set(NEW_FINDINGS)) <= course.MOST_NEW
        for name, state in visit.findings.items():
            if i == 0 or name not in before:
                assert state.change == ("new" if i else "first")
            else:
                signs = {"larger": 1, "smaller": -1, "stable": 0}
                assert np.sign(state.size - before[name]) == signs[state.change]
        assert set(visit.resolved) == set(before) - set(visit.findings)
        before = {name: state.size for name, state in visit.findings.items()}


def test_identifiers_give_the_planned_splits_and_say_nothing_about_time():
    patients = [plan(number, site="s") for number in range(40)]
    splits = [split_of(p.patient_id, synthetic_key(0, "s")) for p in patients]
    assert Counter(splits) == {"train": 28, "validation": 4, "test": 8}
    assert set(splits[:3]) == {"train", "validation", "test"}
    assert len({p.patient_id for p in patients}) == 40
    names = [[v.visit_id for v in p.visits] for p in patients if len(p.visits) > 2]
    assert any(visits != sorted(visits) for visits in names)


def test_each_kind_of_drift_changes_one_thing_from_its_step_on():
    steps, numbers = range(1, 7), range(150)
    begin = {"late": [None, 2, 3, 3, 4, 5], "early": [None, 2, 2, 2, 2, 2], "none": [None] * 6}
    assert {c: [change_step(CohortOptions(change=c), t) for t in steps] for c in begin} == begin
    begins = {"change_step": 3, "change_group": "everyone"}
    shares = {"template": [0, 0, 1, 1, 1, 1], "gradual": [0, 0, 0.25, 0.5, 0.75, 1], "reverted": [0, 0, 1, 1, 0, 0]}
    control = [plan(n, time_steps=6, change="none") for n in numbers]
    for change in ("template", "gradual", "reverted", "scanner", "none"):
        options = CohortOptions(change=change, **begins)
        assert [course.wording_share(options, t, 6) for t in steps] == shares.get(change, [0] * 6)
        assert [plan(n, time_steps=6, change=change, **begins) for n in numbers] == control
    spreads = [plan(n, site="site-2", style=2, time_steps=6, change="epidemic", **begins) for n in numbers]
    visits = [visit for patient in spreads for visit in patient.visits]
    share = [np.mean(["cavity" in v.findings for v in visits if v.time_step == t]) for t in steps]
    assert max(share[:2]) < 0.05 and min(share[2:]) > 0.15, "rare, then common, where a style hardly ever has it too"


WORDINGS = [*itertools.chain(*STYLES), GENERIC]
NAMES = st.sampled_from(FINDINGS)
MIXED = [wording_of(style, share, 0.5) for style in range(2, 7) for share in (0.0, 1.0)]
STATES = st.builds(State, st.integers(1, 3), st.sampled_from(["first", "new", "larger", "smaller", "stable"]))


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(WORDINGS + MIXED), st.dictionaries(NAMES, STATES), st.sets(NAMES), st.booleans(), st.booleans())
def test_reads_the_truth_back_in_every_style(wording, findings, gone, follow_up, older):
    resolved = [name for name in FINDINGS if name in gone and name not in findings]
    report = write_report(wording, findings, resolved=resolved, follow_up=follow_up, older=older)
    assert findings_in(report) == findings.keys()
    assert findings_in(report.lower()) == findings.keys()
    if follow_up:
        planted = planted_changes(SimpleNamespace(findings=findings, resolved=resolved))
        assert changes_in(report) == planted and len(planted) >= len(resolved)


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "sentences.yaml"))
def test_plain_sentences(text, expected):
    assert findings_in(text) == {*expected}
    assert "emphysema" not in text.lower() or changes_in(text) == frozenset(), "what is absent has not changed"


def make(folder, site="site-1", patients=4, time_steps=2, seed=0, alignment="visit", prior="none", **more):
    bounds = [datetime(2019, 7, 1) + timedelta(days=90 * k) for k in range(time_steps - 1)]
    timeline = Timeline(time_steps, alignment, bounds if alignment == "period" else (), prior)
    return synthetic_cohort(site, folder=folder, patients=patients, timeline=timeline, seed=seed, **more)


def cohort_truth(cohort):
    return json.loads((cohort.patients[0].visits[0].image.parents[3] / TRUTH).read_text())


def test_series_reports_and_truth_on_disk(cohort):
    assert cohort.key == synthetic_key(0, "site-1") and cohort.modality == "ct"
    assert all(sum(counts) for counts in cohort.counts().values())  # every split
    truth = cohort_truth(cohort)
    assert (truth["site"], truth["seed"], truth["time_steps"]) == ("site-1", 0, 2)
    assert truth["effects"]["change_step"] == 2 and truth["effects"]["reporting_style"] == 1
    entries = {entry["patient_id"]: entry for entry in truth["patients"]}
    for patient in cohort.patients:
        entry, studies = entries[patient.patient_id], set()
        assert entry["sex"] == patient.sex
        for t, (visit, planted) in enumerate(zip(patient.visits, entry["visits"], strict=True), 1):
            header = pydicom.dcmread(sorted(visit.image.iterdir())[0], stop_before_pixels=True)
            studies.add(header.StudyInstanceUID)
            assert len(list(visit.image.glob("*.dcm"))) == 24
            assert (header.PatientID, header.PatientSex) == (visit.patient_id, patient.sex)
            assert header.PatientAge == f"{int(visit.age):03d}Y"
            assert f"{header.StudyDate}{header.StudyTime}" == f"{visit.acquired:%Y%m%d%H%M%S}"
            assert (visit.image.parent / "report.txt").read_text().strip() == visit.report
            assert findings_in(visit.report) == visit.findings == frozenset(planted["findings"])
            assert visit.labels == set(map(kind_of, visit.findings))
            assert (planted["time_step"], planted["wording"]) == (t, float(patient.sex == "F" and t == 2))
        assert len(studies) == len(patient.visits)


def test_the_second_call_reads_the_same_and_loads_no_heavy_library(cohort, home, monkeypatch):
    folder = home / "synthetic"
    monkeypatch.setattr(build, "build_cohort", lambda *_: pytest.fail("made again"))
    assert make(folder, patients=16).patients == cohort.patients
    assert make(folder, patients=16, prior="report").samples("train", 2)[0].prior is not None
    program = f"""
from pathlib import Path
from fedtar_flare.data.cells import Timeline
from fedtar_flare.synthetic.cohort import synthetic_cohort
synthetic_cohort("site-1", folder=Path({str(folder)!r}), patients=16, timeline=Timeline(2), seed=0)
"""
    assert loaded_by(program, "pydicom", "monai", "torch", "scipy") == []


def test_other_settings_and_other_code_make_other_cohorts(tmp_path, monkeypatch):
    others = [{"options": CohortOptions(untidy=1.0)}, {"seed": 1}, {"alignment": "period"}, {"site": "site 2/x"}]
    for other in ({}, *others):
        make(tmp_path, patients=1, time_steps=1, **other)
    assert len([*tmp_path.iterdir()]) == 5
    monkeypatch.setattr(cohort, "_code_version", lambda: "another")
    make(tmp_path, patients=1, time_steps=1)
    assert len([*tmp_path.iterdir()]) == 6


def test_a_half_written_cohort_is_never_used(tmp_path):
    for error, said in ((KeyboardInterrupt, "^$"), (OSError(28, "disk full"), f"disk full: '{tmp_path}/site-1-")):
        ended = Mock(wraps=build.write_ct_series, side_effect=[DEFAULT, error])
        with patch.object(build, "write_ct_series", ended), pytest.raises((KeyboardInterrupt, OSError), match=said):
            make(tmp_path, patients=2)
    with pytest.raises(ConfigError):
        make(tmp_path, patients=0)
    assert not [*tmp_path.iterdir()]
    assert len(make(tmp_path, patients=2).patients) == 2


def planned(tmp_path, patients=8, **options):
    """Cohorts of whole courses, without and with a change; of each the visits by id, and their truth."""
    made = []
    for change in ({"change": "none"}, options):
        with patch.object(build, "render", lambda *_: np.zeros((1, 2, 2), np.int16)):
            cohort = make(tmp_path, patients=patients, time_steps=3, options=CohortOptions(full_course=1.0, **change))
        visits = {s.visit.visit_id: s for s in cohort.samples(None)}
        made.append((visits, {v["visit_id"]: v for p in cohort_truth(cohort)["patients"] for v in p["visits"]}))
    return made


@pytest.mark.parametrize("checked", [False, True])
def test_misfiled_reports_are_other_patients_of_the_step_but_for_test_and_checked_ones(tmp_path, checked):
    options = {"change": "misfiled", "change_steps": (1, 3), "checked_validation": checked}
    (right, _), (wrong, truth) = planned(tmp_path, patients=20, **options)
    splits = ("train",) if checked else ("train", "validation")
    assert right.keys() == wrong.keys()
    changed = {name for name in right if right[name].visit.report != wrong[name].visit.report}
    moved = {name for name in truth if truth[name]["reported"] != name}
    spoilt = {name for name, s in right.items() if s.time_step in (1, 3) and s.split in splits}
    assert changed <= moved == spoilt and len(changed) > 0.8 * len(spoilt), "two patients may have the same report"
    for name in moved:
        own, other = right[name], right[truth[name]["reported"]]
        assert own.visit.patient_id != other.visit.patient_id
        assert (own.time_step, own.split) == (other.time_step, other.split)
        assert wrong[name].visit.report == other.visit.report and wrong[name].visit.labels == other.visit.labels
    assert all(right[name].visit.findings == wrong[name].visit.findings for name in right), "the truth stays"


def test_reports_of_coarse_steps_say_less(tmp_path):
    (plain, _), (coarse, truth) = planned(tmp_path, patients=12, change="coarse", change_step=2)
    assert any(size["size"] == 1 for visit in truth.values() for size in visit["findings"].values())
    for name, sample in plain.items():
        step, split, report = sample.time_step, sample.split, coarse[name].visit.report
        if step == 1 or split == "test":
            assert report == sample.visit.report
            continue
        large = {kind for kind, state in truth[name]["findings"].items() if state["size"] > 1}
        assert findings_in(report) == large and changes_in(report) == frozenset()
        assert coarse[name].visit.findings == sample.visit.findings


def test_a_site_that_misses_a_step_keeps_its_later_visits_at_their_steps(tmp_path):
    (plain, _), (missing, truth) = planned(tmp_path, change="none", missed_steps=(2,))
    assert {s.time_step for s in missing.values()} == {1, 3} and len(truth) == len(plain)
    assert missing.keys() == {name for name, s in plain.items() if s.time_step != 2}
    assert all(s.time_step == plain[name].time_step for name, s in missing.items())
    with pytest.raises(ConfigError):
        CohortOptions(change="scanner", change_steps=(2,))


WHEN = datetime(2021, 3, 4, 5, 6, 7)
SPACING = (10.5, 4.5, 4.25)


def volume(seed=0, shape=(3, 6, 5)):
    return np.random.default_rng(seed).integers(LOWEST_HU, 3072, shape).astype(np.int16)


def write(folder, hu=None, **changes):
    arguments = {"patient_id": "p-1", "study_datetime": WHEN, "age": 61.7, "sex": "F", "spacing_mm": SPACING} | changes
    return write_ct_series(folder, volume() if hu is None else hu, **arguments)


def test_against_the_tables_of_the_standard(tmp_path):
    """Every attribute of type 1 and 2 of every mandatory module of the CT Image IOD, from the standard's tables."""
    folder = Path(pytest.importorskip("highdicom").__file__).parent / "_standard"  # the tables come with it
    modules = json.loads((folder / "iod_module_map.json").read_text())["ct-image"]
    attributes = json.loads((folder / "module_attribute_map.json").read_text())
    mandatory = [module["key"] for module in modules if module["usage"] == "M"]
    assert {"patient", "general-study", "image-plane", "image-pixel", "ct-image", "sop-common"} <= set(mandatory)
    image = pydicom.dcmread(write(tmp_path)[0])
    types = {(a["keyword"], a["type"]) for module in mandatory for a in attributes[module] if not a["path"]}
    assert len(types) > 100
    assert [name for name, kind in types if kind == "1" and image.get(name) in (None, "")] == []
    assert [name for name, kind in types if kind == "2" and name not in image] == []
    known = {a["keyword"] for module in modules for a in attributes[module["key"]] if not a["path"]}
    assert {element.keyword for element in image} <= known  # nothing that the IOD does not have


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)))
def test_pydicom_reads_back_values_places_and_one_series(tmp_path_factory, seed, shape):
    hu = volume(seed, shape)
    images = [pydicom.dcmread(path) for path in write(tmp_path_factory.mktemp("ct"), hu)]
    back = np.stack([im.pixel_array.astype(int) * int(im.RescaleSlope) + int(im.RescaleIntercept) for im in images])
    np.testing.assert_array_equal(back, hu)
    z, y, x = (np.array(shape) - 1) / -2 * SPACING
    positions = np.array([im.ImagePositionPatient for im in images], float)
    np.testing.assert_allclose(positions, [[x, y, z + SPACING[0] * k] for k in range(shape[0])], atol=1e-4)
    for shared in ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID"):
        assert len({im[shared].value for im in images}) == 1
    assert len({im.SOPInstanceUID for im in images}) == len(hu) and all(im.SOPInstanceUID.is_valid for im in images)


def test_other_content_has_other_identifiers(tmp_path):
    first = pydicom.dcmread(write(tmp_path / "files")[0])
    other = pydicom.dcmread(write(tmp_path / "other", volume(1))[0])
    assert other.SeriesInstanceUID != first.SeriesInstanceUID and other.StudyInstanceUID == first.StudyInstanceUID
    assert pydicom.dcmread(write(tmp_path / "seed", seed=1)[0]).StudyInstanceUID != first.StudyInstanceUID


def test_bad_patient_ids_are_refused(tmp_path):
    for name in ("", "a\\b", "x" * 65):
        with refused("wrong-patient-id"):
            write(tmp_path / "series", patient_id=name)
    assert not (tmp_path / "series").exists()


CLEAN = Scanner(noise_hu=0.0)


def draw(findings, seed=0, scanner=CLEAN):
    return render(draw_anatomy(np.random.default_rng(seed)), findings, scanner, np.random.default_rng(seed + 1))


def difference(findings, seed=0):
    """HU with the findings minus HU without, same patient, same breath and position."""
    return draw(findings, seed).astype(int) - draw({}, seed)


@pytest.mark.parametrize("name", [name for name in FINDINGS if side_of(name)])
def test_a_sided_finding_is_dense_or_dark_and_on_its_side(name):
    change = difference({name: 2})
    touched = change < -120 if name.startswith("pneumo") else change > 200
    halves = [half.sum() for half in np.split(touched, 2, axis=2)]  # the patient's right is on the left
    other, same = sorted(halves)
    assert (halves[0] == same) == name.endswith("right") and same > 20 and other <= 0.02 * same


@pytest.mark.parametrize("name", NEW_FINDINGS)
def test_a_new_finding_hides_no_known_one(name):
    known = {"effusion_left": 2, "nodule_right": 3}
    both = draw({name: 2, **known}).astype(int) - draw({name: 2})
    assert (both > 200).sum() > 0.6 * (difference(known) > 200).sum()


def test_a_patient_keeps_anatomy_and_positions_over_visits():
    anatomy = draw_anatomy(np.random.default_rng(0))
    centers = []
    for visit in range(4):
        sick, well = (render(anatomy, f, CLEAN, np.random.default_rng(visit)) for f in ({"nodule_right": 2}, {}))
        centers.append(np.mean(np.nonzero(sick.astype(int) - well > 300), axis=1) * CLEAN.spacing_mm)
    assert np.ptp(centers, axis=0).max() < 15  # breath and position only
    other = draw_anatomy(np.random.default_rng(1))
    assert other.chest != anatomy.chest and other.positions != anatomy.positions
