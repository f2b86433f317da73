from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from command import failing, passing
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from refused import refused

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.curation import partition
from fedtar_flare.curation.partition import by_dirichlet, by_institution, by_random, partition_source
from fedtar_flare.data.cells import Timeline
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


def test_a_small_concentration_makes_unlike_sites():
    kinds = {f"p{i}": i % 4 for i in range(2000)}

    def distance(concentration):
        tables = []
        for seed in range(10):
            site_of = by_dirichlet(kinds, 4, concentration, seed)
            pairs = Counter((site_of[i], kind) for i, kind in kinds.items())
            table = np.array([[pairs[f"site-{s}", k] for k in range(4)] for s in range(1, 5)], float)
            tables.append(np.abs(table / table.sum(1, keepdims=True) - 0.25).sum(1).mean() / 2)
        return np.mean(tables)

    assert distance(100.0) < 0.1 < distance(1.0) < distance(0.1)


def test_clusters_put_like_reports_together():
    patients = [patient(i, TOPICS[i % 4 if i < 40 else 0]) for i in range(50)]
    clusters = partition.report_clusters(patients, 4, seed=0)
    assert len({(clusters[f"p{i}"], i % 4 if i < 40 else 0) for i in range(50)}) == 4
    assert clusters == partition.report_clusters(patients[::-1], 4, seed=0)
    assert Counter(clusters.values())[0] == 20 and clusters["p0"] == 0  # the largest comes first
    with refused("too-few-texts"):
        partition.report_clusters(patients, 5, seed=0)


def test_institutions():
    patients = cohort(4)
    names = {"p0": "San Raffaele, Milan", "p1": "St. Mary's", "p2": "St. Mary's"}
    assert [*by_institution(patients, names).values()] == ["san-raffaele-milan", "st-mary-s", "st-mary-s", "unknown"]
    with pytest.raises(ConfigError, match="no institutions"):
        by_institution(patients, {})
    with pytest.raises(ConfigError, match="would both be the site 'a-b'"):
        by_institution(patients, {"p0": "A B", "p1": "a-b"})
    assert partition.site_name("  ") == partition.site_name("北京") == "unknown"


@pytest.mark.parametrize(
    "settings, wrong",
    [({"by": "site"}, "by 'site'"), ({"by": "random"}, "-n"), ({"by": "institution", "sites": 2}, "-n"),
     ({"by": "random", "sites": 0}, "not 0"), ({"by": "random", "sites": 99}, "99 sites"),
     ({"by": "random", "sites": 2, "time_steps": 0}, "time_steps"), ({"by": "institution"}, "institutions"),
     ({"by": "dirichlet", "sites": 2, "concentration": -1.0, "classes": 2}, "concentration")],
)  # fmt: skip
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
    assert "Left out: no-date 1" in out and "-n site-1,site-2,site-3" in out and " visits (t=1: 4, t=2: " in out
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
        assert (len(made.patients), tuple(counts)) == (site.patients, site.visits_per_step)
        assert sum(counts) == site.visits
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


def test_a_manifest_with_institutions(manifest, tmp_path):
    lines = manifest.with_name("n.csv")
    rows = [f"p{i},2020-01-01,f.png,Clear.,{'Rome' if i < 3 else 'Turin'}" for i in range(7)]
    lines.write_text("\n".join(["patient_id,study_datetime,image,report,institution", *rows]))
    sites, _ = partition_source("manifest", lines, tmp_path / "out", by="institution")
    assert [(s.site, s.patients) for s in sites] == [("rome", 3), ("turin", 4)]
    with pytest.raises(ConfigError, match="is there already"):
        partition_source("manifest", lines, tmp_path / "out", by="institution")


@pytest.mark.shared_data
def test_the_natural_sites_of_the_real_collection(shared_data, tmp_path):
    path = shared_data / "covid_chestxray"
    sites, left_out = partition_source("covid_chestxray", path, tmp_path, by="institution", time_steps=3)
    assert [(s.site, s.patients) for s in sites] == [("australia", 4), ("others", 22), ("spain", 13)]
    assert sum(s.visits for s in sites) == 114
    assert left_out == {"empty-report": 66, "no-date": 1, "not-frontal-radiograph": 43}
    for site, location in (("spain", "Spain"), ("australia", "Australia"), ("others", "others")):
        written = read_source("manifest", tmp_path / site / "manifest.csv").patients()
        direct = read_source("covid_chestxray", path, {"location": location}).patients()
        one, other = (
            sorted((p.patient_id, p.sex, [(v.acquired, v.age, v.image) for v in p.visits]) for p in group)
            for group in (written, direct)
        )
        assert one == other
