import json
from datetime import datetime, timedelta

import pydicom
import pytest
from command import loaded_by

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.splits import synthetic_key
from fedtar_flare.data.timeline import Timeline
from fedtar_flare.synthetic import build, cohort
from fedtar_flare.synthetic.cohort import TRUTH, synthetic_cohort
from fedtar_flare.synthetic.course import CohortOptions
from fedtar_flare.synthetic.reading import findings_in


def make(folder, site="site-1", patients=4, time_steps=2, seed=0, alignment="visit", prior="none", **more):
    bounds = [datetime(2019, 7, 1) + timedelta(days=90 * k) for k in range(time_steps - 1)]
    timeline = Timeline(time_steps, alignment, bounds if alignment == "period" else (), prior)
    return synthetic_cohort(site, folder=folder, patients=patients, timeline=timeline, seed=seed, **more)


def cohort_truth(made):
    return json.loads((made.patients[0].visits[0].image.parents[3] / TRUTH).read_text())


def places(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("synthetic")


@pytest.fixture(scope="module")
def site(folder):
    return make(folder)


def test_real_series_and_reports_on_disk(site):
    assert site.key == synthetic_key(0, "site-1") and site.modality == "ct"
    assert all(sum(counts) for counts in site.counts().values())  # every split, with four patients
    for patient in site.patients:
        studies = set()
        for visit in patient.visits:
            files = sorted(visit.image.glob("*.dcm"))
            assert len(files) == 24
            header = pydicom.dcmread(files[0], stop_before_pixels=True)
            assert (header.PatientID, header.PatientSex) == (visit.patient_id, patient.sex)
            assert header.PatientAge == f"{int(visit.age):03d}Y"
            assert f"{header.StudyDate}{header.StudyTime}" == f"{visit.acquired:%Y%m%d%H%M%S}"
            assert (visit.image.parent / "report.txt").read_text().strip() == visit.report
            assert findings_in(visit.report) == visit.findings
            studies.add(header.StudyInstanceUID)
        assert len(studies) == len(patient.visits)


def test_the_second_call_reads_the_same_and_loads_no_heavy_library(site, folder, monkeypatch):
    monkeypatch.setattr(build, "build_cohort", lambda *_: pytest.fail("made again"))
    assert make(folder).patients == site.patients
    assert make(folder, prior="report").samples("train", 2)[0].prior is not None
    program = f"""
from pathlib import Path
from fedtar_flare.data.timeline import Timeline
from fedtar_flare.synthetic.cohort import synthetic_cohort
synthetic_cohort("site-1", folder=Path({str(folder)!r}), patients=4, timeline=Timeline(2), seed=0)
"""
    assert loaded_by(program, "pydicom", "monai", "torch", "scipy") == []


def test_the_truth_has_everything_planted(site):
    truth = cohort_truth(site)
    assert (truth["site"], truth["seed"], truth["time_steps"]) == ("site-1", 0, 2)
    assert truth["effects"]["change_step"] == 2 and truth["effects"]["reporting_style"] == 1
    known = {p["patient_id"]: p for p in truth["patients"]}
    for patient in site.patients:
        entry = known[patient.patient_id]
        assert entry["sex"] == patient.sex and entry["age_group"] in ("older", "younger")
        for t, (visit, planted) in enumerate(zip(patient.visits, entry["visits"], strict=True), 1):
            assert planted["time_step"] == t and frozenset(planted["findings"]) == visit.findings
            assert planted["wording"] == float(patient.sex == "F" and t == 2)
            assert all(1 <= s["size"] <= 3 and s["change"] for s in planted["findings"].values())


def test_a_new_scanner_changes_images_alone_from_its_step_on(tmp_path):
    options = [CohortOptions(change=change, change_step=2, full_course=1.0) for change in ("none", "scanner")]
    made = [make(tmp_path, patients=2, options=one) for one in options]
    scanners = cohort_truth(made[1])["scanners"]
    assert scanners["1"] == cohort_truth(made[0])["scanners"]["2"] != scanners["2"]
    compared = zip(*(patient.visits for one in made for patient in one.patients[:1]), strict=True)
    for t, (old, new) in enumerate(compared, 1):
        kernels = [pydicom.dcmread(next(v.image.iterdir())).ConvolutionKernel for v in (old, new)]
        assert old.report == new.report and (kernels[0] == kernels[1]) == (t == 1)


def test_pure_function_of_its_settings(site, tmp_path):
    elsewhere = make(tmp_path)
    for a, b in zip(site.patients, elsewhere.patients, strict=True):
        for x, y in zip(a.visits, b.visits, strict=True):
            assert (x.visit_id, x.acquired, x.report, x.age) == (y.visit_id, y.acquired, y.report, y.age)
            files, others = (sorted(visit.image.iterdir()) for visit in (x, y))
            assert [p.read_bytes() for p in files] == [p.read_bytes() for p in others]


def test_other_settings_and_other_code_make_other_cohorts(tmp_path, monkeypatch):
    others = [{"options": CohortOptions(untidy=1.0)}, {"seed": 1}, {"alignment": "period"}, {"site": "site 2/x"}]
    for other in ({}, *others):
        make(tmp_path, patients=1, time_steps=1, **other)
    assert len(places(tmp_path)) == 5
    monkeypatch.setattr(cohort, "_code_version", lambda: "another")
    make(tmp_path, patients=1, time_steps=1)
    assert len(places(tmp_path)) == 6


def test_a_half_written_cohort_is_never_used(tmp_path, monkeypatch):
    write, calls = build.write_ct_series, []

    def interrupted(*arguments, **named):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "write_ct_series", interrupted)
        make(tmp_path)
    with pytest.raises(ConfigError):
        make(tmp_path, patients=0)
    assert places(tmp_path) == []
    assert len(make(tmp_path).patients) == 4


def test_the_loser_of_a_race_reads_the_winners_cohort_and_one_without_its_index_is_made_again(tmp_path, monkeypatch):
    base = {"patients": 1, "time_steps": 1}
    original = build.build_cohort

    def slower(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(build, "build_cohort", original)
            make(tmp_path, **base)  # another process finishes first
        return original(*arguments)

    monkeypatch.setattr(build, "build_cohort", slower)
    first = make(tmp_path, **base)
    (place,) = tmp_path.iterdir()
    (place / "index.json").unlink()
    monkeypatch.setattr(build, "build_cohort", original)
    assert make(tmp_path, **base).patients == first.patients and places(tmp_path) == [place.name]


def test_missing_age_and_periods(tmp_path):
    found = make(tmp_path, patients=3, alignment="period", options=CohortOptions(untidy=1.0))
    visits = [visit for patient in found.patients for visit in patient.visits]
    assert all(visit.age is None for visit in visits)
    assert "PatientAge" not in pydicom.dcmread(next(iter(visits[0].image.iterdir())), stop_before_pixels=True)
    steps = {v["visit_id"]: v["time_step"] for p in cohort_truth(found)["patients"] for v in p["visits"]}
    assert {s.visit.visit_id: s.time_step for s in found.samples(None)} == steps


def test_sites_differ_in_style_and_scanner_unless_switched_off(tmp_path):
    alike = CohortOptions(own_words=0.0, scanner_differences=False, patients=2)
    made = [make(tmp_path, site, patients=1, time_steps=1) for site in ("site-1", "site-2")]
    made.append(make(tmp_path, "site-2", patients=1, time_steps=1, options=alike))
    assert [len(one.patients) for one in made] == [1, 1, 2]
    visits = [one.patients[0].visits[0] for one in made]
    words = [visit.report.split()[:2] for visit in visits]
    spacing = [pydicom.dcmread(next(visit.image.iterdir())).PixelSpacing for visit in visits]
    assert words[0] == words[2] != words[1] and spacing[0] == spacing[2] != spacing[1]
