from datetime import timedelta

import numpy as np
import pytest
from PIL import Image
from tables import write_table

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.covid_chestxray import COLUMNS, read_covid_chestxray
from fedtar_flare.data.sources.fields import DAY_ZERO
from fedtar_flare.methods.fedkei.task_stream import TaskStream


def row(pid, offset, name, **changes):
    fields = {"patientid": pid, "offset": offset, "sex": "F", "age": "54.0", "view": "PA", "modality": "X-ray"}
    fields |= {"location": "Valencia, Spain", "folder": "images", "filename": name, "clinical_notes": "Infiltrates."}
    return fields | changes


@pytest.fixture
def collection(tmp_path):
    (tmp_path / "images").mkdir()

    def write(*rows, absent=()):
        write_table(tmp_path / "metadata.csv", rows, [*COLUMNS, "doi", "finding"])
        for r in rows:
            if r["filename"] not in absent:
                Image.fromarray(np.eye(9, dtype=np.uint8) * 200).save(tmp_path / "images" / r["filename"])
        return tmp_path

    return write


def test_visits_are_ordered_by_offset_not_by_name_or_row(collection):
    path = collection(row("1", "7", "a.png"), row("1", "-5", "c.png"), row("1", "0", "b.png", view="AP Supine"))
    (patient,) = read_covid_chestxray(path).patients()
    assert [v.image.name for v in patient.visits] == ["c.png", "b.png", "a.png"]
    assert [v.acquired - DAY_ZERO for v in patient.visits] == [timedelta(days=d) for d in (-5, 0, 7)]
    assert patient.sex == "F" and patient.visits[0].age == 54 and patient.visits[0].modality == "radiograph"


def test_what_is_left_out_is_counted(collection):
    path = collection(
        row("1", "0", "a.png"),
        row("1", "1", "b.png", view="L"),
        row("1", "2", "c.png", modality="CT", view="Axial"),
        row("1", "3", "d.png", clinical_notes=" "),
        row("1", "4", "e.png"),
        row("1", "5", "f.png", age="430"),
        row("1", "soon", "g.png"),
        absent=["e.png"],
    )
    reading = read_covid_chestxray(path)
    assert [v.image.name for v in reading.patients()[0].visits] == ["a.png"]
    once = ("age-out-of-range", "bad-date", "empty-report", "no-image")
    assert reading.rejected() == {"not-frontal-radiograph": 2, **dict.fromkeys(once, 1)}


def test_radiographs_without_notes_are_kept_where_asked_and_a_finding_is_known(collection):
    path = collection(
        row("1", "0", "a.png", finding="COVID-19"),
        row("2", "0", "b.png", finding="No Finding", clinical_notes=""),
        row("3", "0", "c.png", finding="todo", clinical_notes=""),
    )
    assert len(read_covid_chestxray(path).patients()) == 1
    reading = read_covid_chestxray(path, {"without_notes": True})
    labels = {patient.patient_id: patient.visits[0].labels for patient in reading.patients()}
    assert labels == {"1": {"COVID-19"}, "2": set()} and reading.rejected() == {"empty-report": 1}


def test_a_blank_offset_counts_only_for_a_single_radiograph(collection):
    path = collection(
        row("1", "", "a.png"),
        row("2", "", "b.png"),
        row("2", "3", "c.png"),
        row("3", "", "d.png", sex=""),
        row("3", "1", "e.png", view="L"),
    )
    reading = read_covid_chestxray(path)
    by_id = {p.patient_id: [v.image.name for v in p.visits] for p in reading.patients()}
    assert by_id == {"1": ["a.png"], "2": ["c.png"], "3": ["d.png"]}
    assert reading.rejected() == {"no-date": 1, "not-frontal-radiograph": 1}


def test_sites_by_location_share_no_patient(collection):
    path = collection(
        row("1", "0", "a.png"),
        row("2", "0", "b.png", location="Melbourne, AUSTRALIA"),
        row("3", "0", "c.png", location="Milan, Italy"),
        row("3", "1", "d.png", location="Barcelona, Spain"),
    )

    def ids(**options):
        return {p.patient_id for p in read_covid_chestxray(path, options).patients()}

    assert ids() == {"1", "2", "3"}
    assert ids(location=["Spain"]) == {"1"} and ids(location="australia") == {"2"} and ids(location="others") == {"3"}
    assert ids(location=["Spain", "Italy"]) == {"1", "3"} and ids(not_location=["Italy"]) == {"1", "2"}


def test_wrong_options(collection):
    path = collection(row("1", "0", "a.png"))
    for options, said in (
        ({"location": 3}, "location must"),
        ({"location": "Mars"}, "Mars"),
        ({"without_notes": "yes"}, "true or false"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_covid_chestxray(path, options)


def test_no_metadata(tmp_path):
    with pytest.raises(ConfigError, match=r"metadata\.csv"):
        read_covid_chestxray(tmp_path)
    (tmp_path / "metadata.csv").write_text("patientid,offset\n1,0\n")
    with pytest.raises(ConfigError, match="clinical_notes"):
        read_covid_chestxray(tmp_path)


@pytest.mark.shared_data
def test_the_real_collection(shared_data):
    path = shared_data / "covid_chestxray"
    everyone = read_covid_chestxray(path)
    patients = everyone.patients()
    assert len(patients) == 39 and sum(len(p.visits) for p in patients) == 114
    assert everyone.rejected() == {"empty-report": 66, "no-date": 1, "not-frontal-radiograph": 43}
    sites = [read_covid_chestxray(path, {"location": name}).patients() for name in ("Spain", "Australia", "others")]
    assert [len(site) for site in sites] == [13, 4, 22]
    assert {p.patient_id for site in sites for p in site} == {p.patient_id for p in patients}
    assert any(v.acquired < DAY_ZERO for p in patients for v in p.visits)


def test_findings_are_labels_and_what_is_still_to_be_named_is_not_known(collection):
    findings = {"a": "COVID-19, ARDS", "b": "No Finding", "c": "todo", "d": "", "e": "Streptococcus"}
    path = collection(*(row(name, "1", f"{name}.png", finding=text) for name, text in findings.items()))
    labels = {p.patient_id: p.visits[0].labels for p in read_covid_chestxray(path).patients()}
    assert labels == {"a": {"COVID-19", "ARDS"}, "b": frozenset(), "c": None, "d": None, "e": {"Streptococcus"}}


@pytest.mark.shared_data
def test_tasks_of_the_real_collection(shared_data):
    """Enough of COVID-19 and of other pneumonias to run the machinery, far too few to say how well it learns."""
    visits = [v for p in read_covid_chestxray(shared_data / "covid_chestxray").patients() for v in p.visits]
    stream = TaskStream(("covid=COVID-19",), base=("Pneumonia", "Streptococcus", "Klebsiella", "E.Coli", "Bacterial"))
    found = [stream.label_of(visit, 1) for visit in visits]
    assert found.count(1) > 50 and found.count(0) >= 5
