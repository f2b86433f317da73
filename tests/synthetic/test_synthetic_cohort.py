import json
from contextlib import nullcontext
from datetime import datetime, timedelta
from unittest.mock import DEFAULT, Mock, patch

import numpy as np
import pydicom
import pytest
from command import loaded_by

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import Timeline, synthetic_key
from fedtar_flare.synthetic import build, cohort
from fedtar_flare.synthetic.cohort import TRUTH, synthetic_cohort
from fedtar_flare.synthetic.course import CohortOptions
from fedtar_flare.synthetic.reading import changes_in, findings_in
from fedtar_flare.synthetic.vocabulary import kind_of


def make(folder, site="site-1", patients=4, time_steps=2, seed=0, alignment="visit", prior="none", **more):
    bounds = [datetime(2019, 7, 1) + timedelta(days=90 * k) for k in range(time_steps - 1)]
    timeline = Timeline(time_steps, alignment, bounds if alignment == "period" else (), prior)
    return synthetic_cohort(site, folder=folder, patients=patients, timeline=timeline, seed=seed, **more)


def cohort_truth(cohort):
    return json.loads((cohort.patients[0].visits[0].image.parents[3] / TRUTH).read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("synthetic")


@pytest.fixture(scope="module")
def site(folder):
    return make(folder)


def header_of(visit):
    return pydicom.dcmread(sorted(visit.image.iterdir())[0], stop_before_pixels=True)


def test_series_reports_and_truth_on_disk(site):
    assert site.key == synthetic_key(0, "site-1") and site.modality == "ct"
    assert all(sum(counts) for counts in site.counts().values())  # every split, with four patients
    truth = cohort_truth(site)
    assert (truth["site"], truth["seed"], truth["time_steps"]) == ("site-1", 0, 2)
    assert truth["effects"]["change_step"] == 2 and truth["effects"]["reporting_style"] == 1
    entries = {entry["patient_id"]: entry for entry in truth["patients"]}
    for patient in site.patients:
        entry = entries[patient.patient_id]
        assert entry["sex"] == patient.sex
        for t, (visit, planted) in enumerate(zip(patient.visits, entry["visits"], strict=True), 1):
            header = header_of(visit)
            assert len(list(visit.image.glob("*.dcm"))) == 24
            assert (header.PatientID, header.PatientSex) == (visit.patient_id, patient.sex)
            assert header.PatientAge == f"{int(visit.age):03d}Y"
            assert f"{header.StudyDate}{header.StudyTime}" == f"{visit.acquired:%Y%m%d%H%M%S}"
            assert (visit.image.parent / "report.txt").read_text().strip() == visit.report
            assert findings_in(visit.report) == visit.findings == frozenset(planted["findings"])
            assert visit.labels == set(map(kind_of, visit.findings))
            assert (planted["time_step"], planted["wording"]) == (t, float(patient.sex == "F" and t == 2))
        assert len({header_of(visit).StudyInstanceUID for visit in patient.visits}) == len(patient.visits)


def test_the_second_call_reads_the_same_and_loads_no_heavy_library(site, folder, monkeypatch):
    monkeypatch.setattr(build, "build_cohort", lambda *_: pytest.fail("made again"))
    assert make(folder).patients == site.patients
    assert make(folder, prior="report").samples("train", 2)[0].prior is not None
    program = f"""
from pathlib import Path
from fedtar_flare.data.cells import Timeline
from fedtar_flare.synthetic.cohort import synthetic_cohort
synthetic_cohort("site-1", folder=Path({str(folder)!r}), patients=4, timeline=Timeline(2), seed=0)
"""
    assert loaded_by(program, "pydicom", "monai", "torch", "scipy") == []


def test_a_new_scanner_changes_images_alone_from_its_step_on(tmp_path):
    options = [CohortOptions(change=change, change_step=2, full_course=1.0) for change in ("none", "scanner")]
    control, changed = (make(tmp_path, patients=2, options=option) for option in options)
    scanners = cohort_truth(changed)["scanners"]
    assert scanners["1"] == cohort_truth(control)["scanners"]["2"] != scanners["2"]
    for t, (old, new) in enumerate(zip(control.patients[0].visits, changed.patients[0].visits, strict=True), 1):
        kernels = [header_of(visit).ConvolutionKernel for visit in (old, new)]
        assert old.report == new.report and (kernels[0] == kernels[1]) == (t == 1)


def test_pure_function_of_its_settings(site, tmp_path):
    def content(cohort):
        root = cohort.patients[0].visits[0].image.parents[3]
        return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    assert content(make(tmp_path)) == content(site)


def test_other_settings_and_other_code_make_other_cohorts(tmp_path, monkeypatch):
    others = [{"options": CohortOptions(untidy=1.0)}, {"seed": 1}, {"alignment": "period"}, {"site": "site 2/x"}]
    for other in ({}, *others):
        make(tmp_path, patients=1, time_steps=1, **other)
    assert len([*tmp_path.iterdir()]) == 5
    monkeypatch.setattr(cohort, "_code_version", lambda: "another")
    make(tmp_path, patients=1, time_steps=1)
    assert len([*tmp_path.iterdir()]) == 6


def test_a_half_written_cohort_is_never_used(tmp_path):
    interrupted = Mock(wraps=build.write_ct_series, side_effect=[DEFAULT, KeyboardInterrupt])
    with patch.object(build, "write_ct_series", interrupted), pytest.raises(KeyboardInterrupt):
        make(tmp_path)
    with pytest.raises(ConfigError):
        make(tmp_path, patients=0)
    assert not [*tmp_path.iterdir()]
    assert len(make(tmp_path).patients) == 4


def test_the_loser_of_a_race_reads_the_winners_cohort_and_one_without_its_index_is_made_again(tmp_path):
    base = {"patients": 1, "time_steps": 1}
    original = build.build_cohort

    def slower(*arguments):
        with patch.object(build, "build_cohort", original):
            make(tmp_path, **base)  # another process finishes first
        return original(*arguments)

    with patch.object(build, "build_cohort", slower):
        first = make(tmp_path, **base)
    (place,) = tmp_path.iterdir()
    (place / "index.json").unlink()
    assert make(tmp_path, **base).patients == first.patients and [*tmp_path.iterdir()] == [place]


def test_missing_age_and_periods(tmp_path):
    made = make(tmp_path, patients=3, alignment="period", options=CohortOptions(untidy=1.0))
    visits = [visit for patient in made.patients for visit in patient.visits]
    assert all(visit.age is None for visit in visits) and "PatientAge" not in header_of(visits[0])
    steps = {v["visit_id"]: v["time_step"] for p in cohort_truth(made)["patients"] for v in p["visits"]}
    assert {s.visit.visit_id: s.time_step for s in made.samples(None)} == steps


def test_sites_differ_in_scanner_and_in_style_unless_that_is_switched_off(tmp_path):
    alike = CohortOptions(own_words=0.0, patients=2)
    made = [make(tmp_path, site, patients=1, time_steps=1) for site in ("site-1", "site-2")]
    made.append(make(tmp_path, "site-2", patients=1, time_steps=1, options=alike))
    assert [len(cohort.patients) for cohort in made] == [1, 1, 2]
    visits = [cohort.patients[0].visits[0] for cohort in made]
    words = [visit.report.split()[:2] for visit in visits]
    spacing = [header_of(visit).PixelSpacing for visit in visits]
    assert words[0] == words[2] != words[1] and spacing[0] != spacing[1] == spacing[2]


def planned(tmp_path, patients=8, drawn=False, **options):
    """Cohorts of whole courses, without and with a change; of each the visits by id, and their truth."""
    made, blank = [], patch.object(build, "render", lambda *_: np.zeros((1, 2, 2), np.int16))
    for change in ({"change": "none"}, options):
        with nullcontext() if drawn else blank:
            cohort = make(tmp_path, patients=patients, time_steps=3, options=CohortOptions(full_course=1.0, **change))
        visits = {s.visit.visit_id: s for s in cohort.samples(None)}
        made.append((visits, {v["visit_id"]: v for p in cohort_truth(cohort)["patients"] for v in p["visits"]}))
    return made


def test_misfiled_reports_are_other_patients_of_the_step_but_for_test_patients(tmp_path):
    (right, _), (wrong, truth) = planned(tmp_path, patients=20, change="misfiled", change_steps=(1, 3))
    assert right.keys() == wrong.keys()
    changed = {name for name in right if right[name].visit.report != wrong[name].visit.report}
    moved = {name for name in truth if truth[name]["reported"] != name}
    spoilt = {name for name, s in right.items() if s.time_step in (1, 3) and s.split != "test"}
    assert changed <= moved == spoilt and len(changed) > 0.8 * len(spoilt), "two patients may have the same report"
    for name in moved:
        own, other = right[name], right[truth[name]["reported"]]
        assert own.visit.patient_id != other.visit.patient_id
        assert (own.time_step, own.split) == (other.time_step, other.split)
        assert wrong[name].visit.report == other.visit.report and wrong[name].visit.labels == other.visit.labels
    assert all(right[name].visit.findings == wrong[name].visit.findings for name in right), "the truth stays"


def test_noisy_steps_have_other_images_and_coarse_ones_reports_that_say_less(tmp_path):
    (plain, _), (noisy, truth) = planned(tmp_path, 2, drawn=True, change="noisy", change_steps=(2,))
    for name, sample in plain.items():
        assert sample.visit.report == noisy[name].visit.report
        slices = [
            pydicom.dcmread(sorted(s.visit.image.iterdir())[12]).pixel_array.astype(float)
            for s in (sample, noisy[name])
        ]
        assert (
            (abs(slices[0] - slices[1]).std() > 60) == (truth[name]["time_step"] == 2) != (slices[0] == slices[1]).all()
        )
    (plain, _), (coarse, truth) = planned(tmp_path / "coarse", patients=12, change="coarse", change_step=2)
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
