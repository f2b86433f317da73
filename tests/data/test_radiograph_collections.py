"""Public collections of radiographs: one frontal film a study, in the order of dates, and why others are left out."""

from datetime import timedelta

import pytest
from tables import lay

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.chexpert_plus import COLUMNS, SECTIONS, read_chexpert_plus
from fedtar_flare.data.sources.covid_chestxray import read_covid_chestxray
from fedtar_flare.data.sources.fields import DAY_ZERO
from fedtar_flare.data.sources.iu_xray import read_iu_xray

ORDER, SINGLE = {"undated": "order"}, {"undated": "single"}


def plus(patient, study, view, order, **changes):
    """A row of CheXpert Plus."""
    side = "Lateral" if view == "LL" else "Frontal"
    fields = dict.fromkeys([*COLUMNS, *SECTIONS.values()], "")
    fields |= {"path_to_image": f"train/{patient}/{study}/view1_{view}.jpg", "frontal_lateral": side, "ap_pa": view}
    fields |= {"deid_patient_id": patient, "patient_report_date_order": order, "age": "61.0", "sex": "Female"}
    return fields | {"section_findings": "Clear.", "section_impression": "Normal."} | changes


def chexpert_plus(folder, *rows, suffix=".jpg"):
    images = [row["path_to_image"].replace(".jpg", suffix) for row in rows]
    return lay(folder, {"df_chexpert_plus_240401.csv": rows}, images)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_chexpert_plus_in_the_order_of_its_numbers_which_must_be_asked_for(tmp_path, suffix):
    studies = (("study1", "AP", "2"), ("study1", "PA", "2"), ("study2", "AP", 1), ("study2", "LL", "1"))
    chexpert_plus(tmp_path, *(plus("patient1", *study) for study in studies), suffix=suffix)
    reading = read_chexpert_plus(tmp_path, ORDER)
    (patient,) = reading.patients()
    visits = [(v.visit_id, v.image.name) for v in patient.visits]
    assert visits == [("study2", f"view1_AP{suffix}"), ("study1", f"view1_PA{suffix}")]
    assert patient.sex == "F" and patient.visits[0].age == 61
    assert patient.visits[0].report == "Clear.\nNormal." and not reading.rejected()
    (patient,) = read_chexpert_plus(tmp_path, ORDER | {"views": "all"}).patients()
    assert {v.visit_id for v in patient.visits} == {f"{study}-view1_{view}" for study, view, _ in studies}
    with pytest.raises(ConfigError, match="undated: order"):
        read_chexpert_plus(tmp_path)


def test_unusable_studies_of_chexpert_plus_are_counted(tmp_path):
    studies = (("patient1", "study1", "AP", "1"), ("patient1", "study2", "LL", "2"), ("patient2", "study1", "AP", ""))
    empty = plus("patient3", "study1", "PA", "1", **dict.fromkeys(SECTIONS.values(), ""))
    reading = read_chexpert_plus(chexpert_plus(tmp_path, *(plus(*study) for study in studies), empty), ORDER)
    assert len(reading.patients()) == 1
    assert reading.rejected() == {"empty-report": 1, "no-date": 1, "not-frontal-radiograph": 1}


def openi(uid, findings="The heart is normal.", impression="Normal chest."):
    """A report of IU X-ray."""
    return {"uid": uid, "indication": "TB", "findings": findings, "impression": impression}


def test_iu_xray(tmp_path):
    reports = [openi("1"), openi("2", ""), openi("3"), openi("4", "", ""), openi("5"), openi("1", "Again.")]
    films = {"1_IM-0001-4001.dcm.png": "Lateral", "1_IM-0001-3001.dcm.png": "Frontal", "2_b.png": "Frontal",
             "2_a.png": "Frontal", "3.png": "Lateral", "4.png": "Frontal", "5.png": "Frontal"}  # fmt: skip
    projections = [{"uid": name[0], "filename": name, "projection": projection} for name, projection in films.items()]
    tables = {"indiana_reports.csv": reports, "indiana_projections.csv": projections}
    path = lay(tmp_path, tables, [f"images/images_normalized/{name}" for name in films if name != "5.png"])
    reading = read_iu_xray(path, SINGLE)
    one, two = reading.patients()
    assert one.visits[0].image == path / "images/images_normalized/1_IM-0001-3001.dcm.png"
    assert one.visits[0].report == "The heart is normal.\nNormal chest." and one.visits[0].acquired == DAY_ZERO
    assert one.sex is None and one.visits[0].age is None and len(one.visits) == 1
    assert two.visits[0].report == "Normal chest." and two.visits[0].image.name == "2_a.png"
    assert reading.rejected() == {"duplicate-visit": 1, "no-image": 1, "no-section": 1, "not-frontal-radiograph": 1}
    one, *_ = read_iu_xray(path, SINGLE | {"views": "all"}).patients()
    assert {v.visit_id for v in one.visits} == {"1-1_IM-0001-4001.dcm", "1-1_IM-0001-3001.dcm"}
    for options in ({}, {"undated": "many"}, {"undated": True}):
        with pytest.raises(ConfigError, match="undated: single"):
            read_iu_xray(path, options)


def covid(pid, offset, name, **changes):
    """A row of the COVID-19 chest X-ray collection."""
    fields = {"patientid": pid, "offset": offset, "sex": "F", "age": "54.0", "view": "PA", "modality": "X-ray"}
    fields |= {"location": "Valencia, Spain", "folder": "images", "filename": name, "clinical_notes": "Infiltrates."}
    return fields | {"doi": "", "finding": ""} | changes


@pytest.fixture
def collection(tmp_path):
    def write(*rows, absent=()):
        images = [f"images/{row['filename']}" for row in rows if row["filename"] not in absent]
        return lay(tmp_path, {"metadata.csv": rows}, images)

    return write


def test_visits_are_ordered_by_offset_and_unusable_studies_are_counted(collection):
    path = collection(
        covid("1", "7", "a.png"), covid("1", "-5", "c.png"), covid("1", "0", "b.png", view="AP Supine"),
        covid("1", "1", "h.png", view="L"), covid("1", "2", "i.png", modality="CT", view="Axial"),
        covid("1", "3", "d.png", clinical_notes=" "), covid("1", "4", "e.png"), covid("1", "5", "f.png", age="430"),
        covid("1", "soon", "g.png"), absent=["e.png"],
    )  # fmt: skip
    reading = read_covid_chestxray(path)
    (patient,) = reading.patients()
    assert [v.image.name for v in patient.visits] == ["c.png", "b.png", "a.png"]
    assert [v.acquired - DAY_ZERO for v in patient.visits] == [timedelta(days=d) for d in (-5, 0, 7)]
    assert patient.sex == "F" and patient.visits[0].age == 54 and patient.visits[0].modality == "radiograph"
    once = ("age-out-of-range", "bad-date", "empty-report", "no-image")
    assert reading.rejected() == {"not-frontal-radiograph": 2, **dict.fromkeys(once, 1)}


def test_a_blank_offset_counts_only_for_a_single_radiograph(collection):
    path = collection(
        covid("1", "", "a.png"), covid("2", "", "b.png"), covid("2", "3", "c.png"), covid("3", "", "d.png", sex=""),
        covid("3", "1", "e.png", view="L"),
    )  # fmt: skip
    reading = read_covid_chestxray(path)
    by_id = {p.patient_id: [v.image.name for v in p.visits] for p in reading.patients()}
    assert by_id == {"1": ["a.png"], "2": ["c.png"], "3": ["d.png"]}
    assert reading.rejected() == {"no-date": 1, "not-frontal-radiograph": 1}


def test_sites_by_location_share_no_patient(collection):
    places = ("1", "Valencia, Spain"), ("2", "Melbourne, AUSTRALIA"), ("3", "Milan, Italy"), ("3", "Barcelona, Spain")
    path = collection(*(covid(pid, str(i), f"{i}.png", location=place) for i, (pid, place) in enumerate(places)))
    for location, ids in (("Spain", ["1"]), ("Australia", ["2"]), ("others", ["3"]), (None, ["1", "2", "3"])):
        assert [p.patient_id for p in read_covid_chestxray(path, {"location": location}).patients()] == ids


@pytest.mark.parametrize("notes", ["Infiltrates.", ""])
def test_findings_are_labels_and_without_notes_count_where_asked(collection, notes):
    findings = {"a": "COVID-19, ARDS", "b": "No Finding", "c": "todo", "d": "", "e": "Streptococcus"}
    rows = [covid(n, "1", f"{n}.png", finding=text, clinical_notes=notes) for n, text in findings.items()]
    path = collection(covid("x", "0", "x.png"), *rows)
    assert len(read_covid_chestxray(path).patients()) == (6 if notes else 1)
    reading = read_covid_chestxray(path, {"without_notes": True})
    expected = {"a": {"COVID-19", "ARDS"}, "b": set(), "e": {"Streptococcus"}}
    expected |= {"c": None, "d": None} if notes else {}
    assert {p.patient_id: p.visits[0].labels for p in reading.patients()} == expected | {"x": None}
    assert reading.rejected() == ({} if notes else {"empty-report": 2})
