from datetime import timedelta

import pytest
from tables import lay

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.covid_chestxray import read_covid_chestxray
from fedtar_flare.data.sources.fields import DAY_ZERO


def row(pid, offset, name, **changes):
    fields = {"patientid": pid, "offset": offset, "sex": "F", "age": "54.0", "view": "PA", "modality": "X-ray"}
    fields |= {"location": "Valencia, Spain", "folder": "images", "filename": name, "clinical_notes": "Infiltrates."}
    return fields | {"doi": "", "finding": ""} | changes


@pytest.fixture
def collection(tmp_path):
    def write(*rows, absent=()):
        images = [f"images/{row['filename']}" for row in rows if row["filename"] not in absent]
        return lay(tmp_path, {"metadata.csv": rows}, images)

    return write


def test_visits_are_ordered_by_offset_not_by_name_or_row(collection):
    path = collection(row("1", "7", "a.png"), row("1", "-5", "c.png"), row("1", "0", "b.png", view="AP Supine"))
    (patient,) = read_covid_chestxray(path).patients()
    assert [v.image.name for v in patient.visits] == ["c.png", "b.png", "a.png"]
    assert [v.acquired - DAY_ZERO for v in patient.visits] == [timedelta(days=d) for d in (-5, 0, 7)]
    assert patient.sex == "F" and patient.visits[0].age == 54 and patient.visits[0].modality == "radiograph"


def test_unusable_studies_are_counted(collection):
    path = collection(
        row("1", "0", "a.png"), row("1", "1", "b.png", view="L"), row("1", "2", "c.png", modality="CT", view="Axial"),
        row("1", "3", "d.png", clinical_notes=" "), row("1", "4", "e.png"), row("1", "5", "f.png", age="430"),
        row("1", "soon", "g.png"), absent=["e.png"],
    )  # fmt: skip
    reading = read_covid_chestxray(path)
    assert [v.image.name for v in reading.patients()[0].visits] == ["a.png"]
    once = ("age-out-of-range", "bad-date", "empty-report", "no-image")
    assert reading.rejected() == {"not-frontal-radiograph": 2, **dict.fromkeys(once, 1)}


def test_a_blank_offset_counts_only_for_a_single_radiograph(collection):
    path = collection(
        row("1", "", "a.png"), row("2", "", "b.png"), row("2", "3", "c.png"), row("3", "", "d.png", sex=""),
        row("3", "1", "e.png", view="L"),
    )  # fmt: skip
    reading = read_covid_chestxray(path)
    by_id = {p.patient_id: [v.image.name for v in p.visits] for p in reading.patients()}
    assert by_id == {"1": ["a.png"], "2": ["c.png"], "3": ["d.png"]}
    assert reading.rejected() == {"no-date": 1, "not-frontal-radiograph": 1}


def test_sites_by_location_share_no_patient(collection):
    places = ("1", "Valencia, Spain"), ("2", "Melbourne, AUSTRALIA"), ("3", "Milan, Italy"), ("3", "Barcelona, Spain")
    path = collection(*(row(pid, str(i), f"{i}.png", location=place) for i, (pid, place) in enumerate(places)))
    for location, ids in (("Spain", ["1"]), ("Australia", ["2"]), ("others", ["3"]), (None, ["1", "2", "3"])):
        assert [p.patient_id for p in read_covid_chestxray(path, {"location": location}).patients()] == ids


def test_wrong_options_and_metadata(collection):
    path = collection(row("1", "0", "a.png"))
    for option, value in (("location", 3), ("location", "Mars"), ("without_notes", "yes")):
        with pytest.raises(ConfigError, match=option):
            read_covid_chestxray(path, {option: value})
    (path / "metadata.csv").write_text("patientid,offset\n1,0\n")
    with pytest.raises(ConfigError, match="clinical_notes"):
        read_covid_chestxray(path)


@pytest.mark.parametrize("notes", ["Infiltrates.", ""])
def test_findings_are_labels_and_without_notes_count_where_asked(collection, notes):
    findings = {"a": "COVID-19, ARDS", "b": "No Finding", "c": "todo", "d": "", "e": "Streptococcus"}
    path = collection(
        row("x", "0", "x.png"),
        *(row(n, "1", f"{n}.png", finding=text, clinical_notes=notes) for n, text in findings.items()),
    )
    assert len(read_covid_chestxray(path).patients()) == (6 if notes else 1)
    reading = read_covid_chestxray(path, {"without_notes": True})
    expected = {"a": {"COVID-19", "ARDS"}, "b": set(), "e": {"Streptococcus"}}
    expected |= {"c": None, "d": None} if notes else {}
    assert {p.patient_id: p.visits[0].labels for p in reading.patients()} == expected | {"x": None}
    assert reading.rejected() == ({} if notes else {"empty-report": 2})
