"""``fedtar data check``: what it counts, what it rejects, and the page that stays at the site."""

import base64
import io
import json
import re
from collections import Counter
from dataclasses import replace
from datetime import datetime
from xml.etree import ElementTree

import numpy as np
import pytest
from command import fedtar_here
from hypothesis import given
from hypothesis import strategies as st
from kits import write_noise
from make_dicom import trunk, write_series
from PIL import Image
from tables import write_table

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.curation.check import check
from fedtar_flare.curation.page import STAYS, bin_edges, data_page, histogram

HEAD = ["patient_id", "study_datetime", "image", "report", "age", "sex"]


def write(folder, *rows):
    return write_table(folder / "manifest.csv", [dict(zip(HEAD, row, strict=True)) for row in rows])


@pytest.fixture
def radiographs(tmp_path):
    """Eight radiographs of three patients, among them a cut one, a row without a report and one without a date."""
    rng = np.random.default_rng(0)
    for n in range(8):
        Image.fromarray(rng.integers(0, 256, (60 + n, 50), np.uint8)).save(tmp_path / f"{n}.png")
    (tmp_path / "4.png").write_bytes((tmp_path / "4.png").read_bytes()[:700])
    return write(
        tmp_path,
        ["A", "2020-01-01", "0.png", "Clear lungs.", "50", "F"],
        ["A", "2020-01-11", "1.png", "Clear lungs today.", "50", "F"],
        ["A", "2020-03-01", "2.png", "Effusion <left>.", "50.2", "F"],
        ["B", "2020-01-01", "3.png", "Call Dr. Miller at once.", "", ""],
        ["B", "2020-01-02", "4.png", "Clear.", "", ""],
        ["C", "2020-01-01", "5.png", "", "70", "M"],
        ["C", "", "6.png", "Clear.", "70", "M"],
        ["C", "2020-01-05", "7.png", "Clear.", "70", "M"],
    )


def test_numbers_against_a_plain_count(radiographs):
    result = check(radiographs)
    assert (result.modality, len(result.patients), len(result.visits), result.images) == ("radiograph", 3, 5, 6)
    assert Counter(result.visits_per_patient) == {3: 1, 1: 2} and result.gaps == [10, 50]
    assert result.sexes == {"F": 1, "M": 1, "unknown": 1} and sorted(result.ages) == [50, 50, 50.2, 70]
    assert sorted(result.words) == [1, 2, 2, 3, 5]
    assert result.rejections == {"empty-report": 1, "no-date": 1, "unreadable": 1}
    assert "row 7" in result.rejected["empty-report"][0] and result.rejected["unreadable"][0].startswith("row-6 ")
    assert sorted(result.shapes) == [(1, side, 50) for side in (60, 61, 62, 63, 67)]
    assert result.identifiers == {"name": ["row-5"]}
    summary = json.loads(json.dumps(result.summary()))
    assert summary["gap_days"]["median"] == 30 and summary["age"]["unknown"] == 1


def test_ct_with_notes_and_pictures(tmp_path):
    write_series(tmp_path / "a", trunk(), spacing=(6.0, 5.0, 5.0))
    write_series(tmp_path / "b", trunk(), spacing=(6.0, 5.0, 5.0))
    write_series(tmp_path / "b", trunk(), spacing=(6.0, 5.0, 5.0), prefix="copy")
    write_series(tmp_path / "c", trunk()[:4], spacing=(6.0, 5.0, 5.0))
    write(tmp_path, *(["A", f"2020-01-0{n}", name, "Clear.", "", ""] for n, name in enumerate("abc", start=1)))
    result = check(tmp_path, thumbnails=1)
    assert result.modality == "ct" and result.rejections == {"too-few-slices": 1} and list(result.notes) == ["copies"]
    assert result.shapes == [(30, 64, 64)] * 2 and result.spacings == [(6.0, 5.0, 5.0)] * 2
    (shown,) = result.thumbnails
    pictures = [Image.open(io.BytesIO(base64.b64decode(p.split(",")[1]))) for p in shown.pictures]
    assert [picture.size for picture in pictures] == [(160, 160)] * 3
    middle = np.asarray(pictures[1])
    assert middle[80, 48] < 130 < middle[80, 80]  # lung is darker than what lies between


def test_the_same_picture_under_two_patients_is_named(tmp_path):
    for n in range(3):
        write_noise(tmp_path / f"{n}.png", n)
    Image.open(tmp_path / "0.png").save(tmp_path / "copy.jpg", quality=60)
    studies = ("A1 0.png", "A2 1.png", "B1 copy.jpg", "C1 2.png", "C2 2.png")  # twice at one patient: no matter
    rows = [[study[0], f"2020-01-0{study[1]}", study[3:], "Clear.", "", ""] for study in studies]
    table, page = write(tmp_path, *rows), tmp_path / "page.html"
    code, out, _ = fedtar_here("data", "check", table, "-o", page, "-j", "1", "--json")
    named = "A and B: 1 picture(s), row-2 (2020-01-01) and row-4 (2020-01-01)"
    assert page.stat().st_mode & 0o077 == 0, "for its owner alone"
    assert code == 1 and json.loads(out)["shared_pictures"] == {"pairs": 1, "patients": 2, "examples": [named]}
    assert not json.loads(out)["rejected"] and f"<li>{named}</li>" in page.read_text()
    good = write(tmp_path, ["A", "2020-01-01", "0.png", "Clear lungs.", "50", "F"])
    assert fedtar_here("data", "check", good, "-o", page, "--thumbnails", 0)[0] == 0 and "<img" not in page.read_text()


def test_the_check_goes_on_after_an_unexpected_error(radiographs, monkeypatch):
    def breaks(path):
        raise KeyError("odd")

    monkeypatch.setattr("fedtar_flare.imaging.readers.pictures.read_radiograph", breaks)
    result = check(radiographs)
    assert result.rejections["internal-error"] == 6 and result.rejections["no-date"] == 1
    assert "KeyError: 'odd'" in result.rejected["internal-error"][0]


def test_site_files_and_exclusion(radiographs, tmp_path):
    (tmp_path / "gone.txt").write_text("A\n")
    table = tmp_path / "manifest.csv"
    table.write_text(table.read_text().replace("\nA,", "\nA^^^NORTH,"))
    (tmp_path / "site.yaml").write_text("source: manifest\npath: manifest.csv\nexclude: gone.txt\n")
    result = check(tmp_path / "site.yaml", thumbnails=0)
    assert result.excluded == 3 and [p.patient_id for p in result.patients] == ["B", "C"] and result.images == 3
    (tmp_path / "phantoms.yaml").write_text("source: synthetic\n")
    (tmp_path / "empty").mkdir()
    for target in ("phantoms.yaml", "empty", "nowhere.csv"):
        with pytest.raises(ConfigError, match=target):
            check(tmp_path / target)


def test_the_page(radiographs):
    html = data_page(check(radiographs))
    tree = ElementTree.fromstring(html)
    shown = " ".join(" ".join(tree.find("body").itertext()).split())
    assert shown.startswith(STAYS)
    assert [s.get("id") for s in tree.iter("section")] == ["problems", "cohort", "reports", "images", "pictures"]
    assert "5 of 8 studies, of 3 patients" in shown and "3 rejected studies" in shown
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    without = re.sub(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"', "", html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<iframe|src=", without)
    assert len(list(tree.iter("img"))) == 5 and all(i.get("src").startswith("data:image/png") for i in tree.iter("img"))
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    assert "<left" not in html and "Effusion" not in html  # no report stands on the page
    assert not re.search(r"\b(nan|inf|None\b(?!\.))", shown) and "row-6" in shown
    bars = sum(len(re.findall('class="bar"', ElementTree.tostring(f, "unicode"))) for f in tree.iter("figure"))
    assert bars >= 10


def test_findings_by_year_are_shares_of_the_year_s_reports(radiographs):
    result = check(radiographs, thumbnails=0)
    assert "by year</figcaption>" not in data_page(result)  # of one year
    reports = (2019, "Pleural effusion."), (2019, "Clear lungs. No pneumothorax."), (2020, "Effusion, cardiomegaly.")
    dated = [(datetime(year, 1, day), text) for day, (year, text) in enumerate(reports, 1)]
    visits = [replace(result.visits[0], acquired=day, report=text) for day, text in dated]
    result.patients = [replace(result.patients[0], visits=tuple(visits))]
    shown = re.findall(r"<title>(\D+, \d+: \d of \d) reports", data_page(result))
    effusion = ["Pleural Effusion, 2019: 1 of 2", "Pleural Effusion, 2020: 1 of 1"]
    assert shown == [*effusion, "Cardiomegaly, 2019: 0 of 2", "Cardiomegaly, 2020: 1 of 1"]


@given(st.lists(st.floats(-1e5, 1e5, allow_subnormal=False), min_size=1, max_size=30), st.booleans())
def test_every_value_lies_in_one_bar(values, whole):
    values = [float(round(v)) for v in values] if whole else values
    edges = bin_edges(values, whole)
    near = 1e-8 * (edges[1] - edges[0])  # a value this close to an edge belongs to the bar on either side
    assert edges[0] <= min(values) + near and max(values) <= edges[-1] + near and 2 <= len(edges) <= 15
    counts = [int(n) for n in re.findall(r": (\d+)</title>", histogram("t", values, "x", whole_numbers=whole))]
    assert sum(counts) == len(values)


@pytest.mark.slow
@pytest.mark.shared_data
def test_real_radiographs_and_a_real_ct(shared_data, tmp_path):
    (tmp_path / "site.yaml").write_text(f"source: covid_chestxray\npath: {shared_data / 'covid_chestxray'}\n")
    result = check(tmp_path / "site.yaml", thumbnails=3)
    assert (
        len(result.patients) == 39 and len(result.visits) == 114 == result.images
    )  # none of the radiographs is refused
    assert set(result.rejections) == {"empty-report", "no-date", "not-frontal-radiograph"}
    assert Counter((a.patient_id, b.patient_id) for a, b in result.shared) == {("97", "178"): 4, ("285", "339"): 3}
    write(tmp_path, ["A", "2020-01-01", str(shared_data / "lung_pet_ct_dx"), "Clear.", "", ""])
    (spacing,) = check(tmp_path, thumbnails=0).spacings
    assert spacing[0] == pytest.approx(5)
