"""A collection divided over sites; and ``fedtar data check``: what it counts and rejects, and the page that stays."""

import json
import re
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from command import failing, fedtar_here, passing
from hypothesis import given, settings
from hypothesis import strategies as st
from kits import write_noise
from PIL import Image
from refused import refused
from tables import cases, write_table

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.curation import partition
from fedtar_flare.curation.check import check
from fedtar_flare.curation.page import STAYS, bin_edges, data_page, histogram
from fedtar_flare.curation.partition import by_dirichlet, by_random, partition_source
from fedtar_flare.data.cells import SPLITS, Timeline
from fedtar_flare.data.cohort import Patient, Visit
from fedtar_flare.data.sources import read_source
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.site_file import read_site_file

TOPICS = ("pleural effusion on the left", "fracture of a rib", "emphysema with bullae", "nodule in the upper lobe")


def patient(i, report="Clear.", visits=1):
    day = datetime(2020, 1, 1)
    made = (Visit(f"p{i}", f"v{t}", day + timedelta(t), Path(f"{i}-{t}"), report, "radiograph") for t in range(visits))
    return Patient(f"p{i}", None, tuple(made))


def cohort(n):
    return [patient(i, f"{TOPICS[i % 4]}. {'Stable. ' * (i % 3)}") for i in range(n)]


@given(st.integers(2, 60), st.integers(1, 6), st.integers(0, 5), st.randoms(use_true_random=False))
def test_random_takes_every_patient_once_in_even_sizes(n, sites, seed, random):
    patients = cohort(max(n, sites))
    site_of = by_random(patients, sites, seed)
    assert site_of == by_random(random.sample(patients, len(patients)), sites, seed)
    assert set(site_of) == {p.patient_id for p in patients}
    sizes = Counter(site_of.values())
    assert len(sizes) == sites and max(sizes.values()) - min(sizes.values()) <= 1


CLASSES = st.lists(st.integers(0, 4), min_size=8, max_size=80)


@given(CLASSES, st.integers(1, 4), st.sampled_from([0.5, 1.0, 100.0]), st.integers(0, 5))
@settings(max_examples=50)
def test_dirichlet_takes_every_patient_once_and_fills_every_site(classes, sites, concentration, seed):
    kinds = {f"p{i}": kind for i, kind in enumerate(classes)}
    site_of = by_dirichlet(kinds, sites, concentration, seed)
    assert site_of == by_dirichlet(dict(reversed(kinds.items())), sites, concentration, seed)
    assert set(site_of) == set(kinds) and len(set(site_of.values())) == sites


def test_clusters_put_like_reports_together():
    patients = [patient(i, TOPICS[i % 4 if i < 40 else 0]) for i in range(50)]
    clusters = partition.report_clusters(patients, 4, seed=0)
    assert len({(clusters[f"p{i}"], i % 4 if i < 40 else 0) for i in range(50)}) == 4
    assert clusters == partition.report_clusters(patients[::-1], 4, seed=0)
    assert Counter(clusters.values())[0] == 20 and clusters["p0"] == 0  # the largest comes first
    with refused("too-few-texts"):
        partition.report_clusters(patients, 5, seed=0)


@pytest.mark.parametrize("settings, wrong", cases(__file__, "partition.yaml"))
def test_wrong_settings(manifest, tmp_path, settings, wrong):
    with pytest.raises(ConfigError, match=wrong):
        partition_source("manifest", manifest, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def manifest(tmp_path):
    Image.fromarray(np.arange(100, dtype=np.uint8).reshape(10, 10)).save(tmp_path / "f.png")
    lines = ["patient_id;study_datetime;image;report;age;sex"]
    for i in range(12):
        for t in range(1 + i % 4):
            report = f'"{TOPICS[i % 4]}; ""sic""\nSecond line {t}."'
            lines.append(f"p{i};2020-{t + 1:02d}-01 12:30;f.png;{report};{40 + i}.25;F")
    (tmp_path / "m.csv").write_text("\n".join(lines))
    return tmp_path / "m.csv"


def test_the_command_counts_what_it_writes_and_what_is_left_out(manifest, tmp_path):
    with manifest.open("a") as file:
        file.write("\np99;;f.png;Clear.;50;F")
    divide = ("data", "partition", "manifest", manifest, "--by", "random", "-n", 3)
    options = ("--time-steps", 2, "--option", "cleaning=r2gen-v1", "--out", tmp_path / "out")
    out = passing(*divide, *options)
    told = "Left out: no-date 1", "-n site-1,site-2,site-3", "4 patients (train: ", " visits (t=1: 4, t=2: "
    assert all(words in out for words in told)
    assert "second line 0 ." in (tmp_path / "out" / "site-1" / "manifest.csv").read_text()
    assert failing(*divide, "--option", "same_dy=merge", "--out", tmp_path / "other")


DIRICHLET = {"classes": 3, "concentration": 5.0}


@pytest.mark.parametrize("by, how", [("random", {}), ("clusters", {}), ("dirichlet", DIRICHLET)])
def test_manifests_read_back_as_the_same_patients(manifest, tmp_path, by, how):
    everyone = {p.patient_id: p for p in read_source("manifest", manifest).patients()}
    sites, left_out = partition_source("manifest", manifest, tmp_path / "out", by=by, sites=3, time_steps=3, **how)
    assert left_out == {} and len(sites) == 3
    seen = Counter()
    for site in sites:
        config = read_site_file(site.site_file, simulated=True)
        made = load_cohort(config, site.site, timeline=Timeline(3))
        counts = [sum(c) for c in zip(*made.counts().values(), strict=True)]
        splits = {split: len({s.visit.patient_id for s in made.samples(split)}) for split in SPLITS}
        assert (len(made.patients), tuple(counts)) == (site.patients, site.visits_per_step)
        assert sum(counts) == site.visits and splits == site.patients_per_split
        seen.update(p.patient_id for p in made.patients)
        for p in made.patients:
            whole = everyone[p.patient_id]
            assert p.sex == whole.sex
            for one, other in zip(p.visits, whole.visits, strict=True):
                assert (one.acquired, one.report, one.age) == (other.acquired, other.report, other.age)
                assert one.image.samefile(other.image)
    assert seen == Counter(everyone.keys())


def test_labels_of_ones_own(manifest, tmp_path):
    labels = tmp_path / "labels.csv"
    labels.write_text("patient_id,label\n" + "".join(f"p{i},{i % 2}\n" for i in range(12)))
    sites, _ = partition_source("manifest", manifest, tmp_path / "out", by="dirichlet", sites=2, labels=labels)
    assert sum(site.patients for site in sites) == 12
    labels.write_text("patient_id,label\np1,a\n")
    with pytest.raises(ConfigError, match=r"11 patient\(s\) have no label"):
        partition_source("manifest", manifest, tmp_path / "b", by="dirichlet", sites=2, labels=labels)


def test_institutions(manifest, tmp_path):
    def divided(*institutions):
        row = {"study_datetime": "2020-01-01", "image": "f.png", "report": "Clear."}
        rows = [{"patient_id": f"p{n}", **row, "institution": name} for n, name in enumerate(institutions)]
        table = write_table(manifest.with_name("n.csv"), rows)
        sites, _ = partition_source("manifest", table, tmp_path / "out", by="institution")
        return [(one.site, one.patients) for one in sites]

    same = {"would both be the site 'a-b'": ("A B", "a-b"), "would both be the site 'unknown'": ("", "北京")}
    for wrong, names in ({"no institutions": ("", "")} | same).items():
        with pytest.raises(ConfigError, match=wrong):
            divided(*names)
    names = ("San Raffaele, Milan", "St. Mary's", "St. Mary's", "")
    assert divided(*names) == [("san-raffaele-milan", 1), ("st-mary-s", 2), ("unknown", 1)]
    with pytest.raises(ConfigError, match="is there already"):
        divided(*names)


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
    text = Path(__file__).with_name("radiographs.csv").read_text(encoding="utf-8")
    (tmp_path / "manifest.csv").write_text(text)
    return tmp_path / "manifest.csv"


def test_numbers_against_a_plain_count(radiographs):
    result = check(radiographs)
    assert (result.modality, len(result.patients), len(result.visits), result.images) == ("radiograph", 3, 5, 6)
    assert Counter(result.visits_per_patient) == {3: 1, 1: 2} and result.gaps == [10, 50]
    assert result.sexes == {"F": 1, "M": 1, "unknown": 1}
    assert (sorted(result.ages), sorted(result.words)) == ([50, 50, 50.2, 70], [1, 2, 2, 3, 5])
    assert result.rejections == {"empty-report": 1, "no-date": 1, "unreadable": 1}
    assert "row 7" in result.rejected["empty-report"][0] and result.rejected["unreadable"][0].startswith("row-6 ")
    assert sorted(result.shapes) == [(1, side, 50) for side in (60, 61, 62, 63, 67)]
    assert result.identifiers == {"name": ["row-5"]}
    summary = json.loads(json.dumps(result.summary()))
    assert summary["gap_days"]["median"] == 30 and summary["age"]["unknown"] == 1


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


def test_ids_that_may_be_one_person_are_noted(tmp_path):
    rows = [[name, "2020-01-01", f"{n}.png", "Clear.", "", ""] for n, name in enumerate(("P-007", "p7", "70", "0070"))]
    rows += [[name, "2020-01-01", f"{n}.png", "Clear.", "", ""] for n, name in enumerate(("\u00fc", "u\u0308", "70.0"))]
    for n in range(4):
        write_noise(tmp_path / f"{n}.png", n)
    numbers, letters = check(write(tmp_path, *rows), thumbnails=0).notes["similar-ids"]
    assert numbers.startswith("70 and 0070 and 70.0: ") and letters.startswith("\u00fc and u\u0308: ")


def test_a_lateral_view_that_is_not_there_is_noted_and_a_table_without_rows_is_not_all_right(tmp_path):
    for n in range(2):
        write_noise(tmp_path / f"{n}.png", n)
    lateral = dict(zip(HEAD, ("A", "2020-01-01", "0.png", "Clear.", "", ""), strict=True))
    rows = [lateral | {"lateral": name, "study_datetime": f"202{n}0101"} for n, name in enumerate(("1.png", "2.png"))]
    (noted,) = check(write_table(tmp_path / "m.csv", rows), thumbnails=0).notes["bad-lateral"]
    assert "no-image" in noted and "2.png" in noted
    (tmp_path / "m.csv").write_text(",".join(HEAD) + "\n")
    assert fedtar_here("data", "check", tmp_path / "m.csv", "-o", tmp_path / "page.html")[0] == 1


def test_site_files_and_exclusion(radiographs, tmp_path):
    (tmp_path / "gone.txt").write_text("A\n")
    radiographs.write_text(radiographs.read_text().replace("\nA,", "\nA^^^NORTH,"))
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
    assert [s.get("id") for s in tree.iter("section")] == ["problems", "cohort", "reports", "images", "pictures"]
    assert shown.startswith(STAYS) and "5 of 8 studies, of 3 patients" in shown and "3 rejected studies" in shown
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    without = re.sub(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"', "", html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<iframe|src=", without)
    assert len(list(tree.iter("img"))) == 5 and all(i.get("src").startswith("data:image/png") for i in tree.iter("img"))
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    assert "<left" not in html and "Effusion" not in html  # no report stands on the page
    assert not re.search(r"\b(nan|inf|None\b(?!\.))", shown) and "row-6" in shown
    assert sum(ElementTree.tostring(f, "unicode").count('class="bar"') for f in tree.iter("figure")) >= 10


@given(st.lists(st.floats(-1e5, 1e5, allow_subnormal=False), min_size=1, max_size=30), st.booleans())
def test_every_value_lies_in_one_bar(values, whole):
    values = [float(round(v)) for v in values] if whole else values
    edges = bin_edges(values, whole)
    near = 1e-8 * (edges[1] - edges[0])  # a value this close to an edge belongs to the bar on either side
    assert edges[0] <= min(values) + near and max(values) <= edges[-1] + near and 2 <= len(edges) <= 15
    counts = [int(n) for n in re.findall(r": (\d+)</title>", histogram("t", values, "x", whole_numbers=whole))]
    assert sum(counts) == len(values)


def test_a_chart_has_no_bars_beyond_the_values():
    assert bin_edges([10.5, 10.5], False) == [10.0, 11.0] and ">10.5<" in histogram("t", [10.5, 10.5], "mm")
    assert bin_edges([0, 243], True)[0] == 0 and bin_edges([1, 250], True)[-1] == 250
