"""CheXpert Plus: one frontal radiograph a study, ordered by the table's numbers where that is asked for."""

import pytest
from tables import lay

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.chexpert_plus import COLUMNS, SECTIONS, read_chexpert_plus

ORDER = {"undated": "order"}


def row(patient, study, view, order, **changes):
    side = "Lateral" if view == "LL" else "Frontal"
    fields = dict.fromkeys([*COLUMNS, *SECTIONS.values()], "")
    fields |= {"path_to_image": f"train/{patient}/{study}/view1_{view}.jpg", "frontal_lateral": side, "ap_pa": view}
    fields |= {"deid_patient_id": patient, "patient_report_date_order": order, "age": "61.0", "sex": "Female"}
    return fields | {"section_findings": "Clear.", "section_impression": "Normal."} | changes


@pytest.fixture
def collection(tmp_path):
    def write(*rows, suffix=".jpg"):
        images = [row["path_to_image"].replace(".jpg", suffix) for row in rows]
        return lay(tmp_path, {"df_chexpert_plus_240401.csv": rows}, images)

    return write


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_studies_in_the_order_of_their_numbers_which_must_be_asked_for(collection, tmp_path, suffix):
    studies = (("study1", "AP", "2"), ("study1", "PA", "2"), ("study2", "AP", 1), ("study2", "LL", "1"))
    rows = [row("patient1", *study) for study in studies]
    reading = read_chexpert_plus(collection(*rows, suffix=suffix), ORDER)
    (patient,) = reading.patients()
    visits = [(v.visit_id, v.image.name) for v in patient.visits]
    assert visits == [("study2", f"view1_AP{suffix}"), ("study1", f"view1_PA{suffix}")]
    assert patient.sex == "F" and patient.visits[0].age == 61
    assert patient.visits[0].report == "Clear.\nNormal." and not reading.rejected()
    (patient,) = read_chexpert_plus(tmp_path, ORDER | {"views": "all"}).patients()
    assert {v.visit_id for v in patient.visits} == {f"{study}-view1_{view}" for study, view, _ in studies}
    with pytest.raises(ConfigError, match="undated: order"):
        read_chexpert_plus(tmp_path)


def test_unusable_studies_are_counted(collection):
    studies = (("patient1", "study1", "AP", "1"), ("patient1", "study2", "LL", "2"), ("patient2", "study1", "AP", ""))
    empty = row("patient3", "study1", "PA", "1", **dict.fromkeys(SECTIONS.values(), ""))
    reading = read_chexpert_plus(collection(*(row(*study) for study in studies), empty), ORDER)
    assert len(reading.patients()) == 1
    assert reading.rejected() == {"empty-report": 1, "no-date": 1, "not-frontal-radiograph": 1}
