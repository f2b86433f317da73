"""The same picture under two patients: what is found, what is not, and that it never lies in two splits."""

import csv
import logging
import re
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits import write_noise
from make_dicom import trunk, write_series
from PIL import Image
from scipy.sparse.csgraph import connected_components

from fedtar_flare.data.cells import SPLITS, Timeline, split_of
from fedtar_flare.data.cohort import Cohort, Patient, Visit
from fedtar_flare.imaging.cache import load_computed, store_computed
from fedtar_flare.imaging.duplicates import linked, miniature, shared_pictures
from fedtar_flare.imaging.pipeline import Size, prepare_cohort
from fedtar_flare.imaging.readers.pictures import read_radiograph

KEY = bytes(range(16))
N = 30


def cohort_of(images, modality="radiograph"):
    """One patient, p0 and so on, for each image."""
    visits = [Visit(f"p{i}", "v", datetime(2020, 1, 1), image, "Clear.", modality) for i, image in enumerate(images)]
    patients = [Patient(visit.patient_id, None, (visit,)) for visit in visits]
    return Cohort("s", patients, key=KEY, timeline=Timeline(1))


def splits(cohort):
    return {sample.visit.patient_id: sample.split for sample in cohort.samples(None)}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1])))
def test_groups_are_the_connected_patients(pairs):
    groups, graph = linked((str(a), str(b)) for a, b in pairs), np.zeros((10, 10))
    for a, b in pairs:
        graph[a, b] = 1
    labels = connected_components(graph, directed=False)[1]
    together = {frozenset(map(str, np.flatnonzero(labels == label))) for label in labels}
    assert sorted(map(sorted, groups)) == sorted(sorted(group) for group in together if len(group) > 1)


def test_patients_who_share_a_picture_share_a_split_and_all_others_keep_theirs(tmp_path, caplog):
    images = [write_noise(tmp_path / f"{i}.png", i) for i in range(N)]
    alone = {f"p{i}": split_of(f"p{i}", KEY) for i in range(N)}
    in_split = {split: [i for i in range(N) if alone[f"p{i}"] == split] for split in SPLITS}
    trained, validated, tested = (in_split[split][0] for split in SPLITS)
    other = in_split["test"][1]
    assert splits(prepare_cohort(cohort_of(images), Size(64, 1), tmp_path / "cache")) == alone
    assert not caplog.records
    Image.open(images[tested]).resize((96, 96)).save(tmp_path / "copy.jpg", quality=70)
    images[trained] = tmp_path / "copy.jpg"
    images[validated] = images[other]
    with caplog.at_level(logging.WARNING):
        made = splits(prepare_cohort(cohort_of(images), Size(64, 1), tmp_path / "cache"))
    assert made == alone | {f"p{tested}": "train", f"p{other}": "validation"}
    assert "4 patients share a picture" in caplog.text and not re.search(r"\bp\d", caplog.text)


def test_a_job_that_sees_coarse_images_does_not_decide_who_is_alike(tmp_path):
    """Else it would choose the splits: whoever looks like a training patient in 16 pixels trains too."""
    rng, images = np.random.default_rng(0), []
    common = np.kron(rng.integers(60, 196, (16, 16)), np.ones((4, 4)))
    for i in range(8):
        fine = np.kron(rng.choice([-50, 50], (16, 16)), np.kron([[1, -1], [-1, 1]], np.ones((2, 2))))
        images.append(tmp_path / f"{i}.png")
        Image.fromarray((common + fine).astype(np.uint8)).save(images[-1])
    for size in (64, 16):
        assert prepare_cohort(cohort_of(images), Size(size, 1), tmp_path / "cache").linked == ()


def test_a_ct_under_two_patients(tmp_path):
    rng = np.random.default_rng(0)
    other = trunk() + rng.normal(0, 200, trunk().shape).astype(np.int16).cumsum(axis=2).clip(-400, 400).astype(np.int16)
    for name, volume in (("a", trunk()), ("b", trunk()), ("c", other)):
        write_series(tmp_path / name, volume, spacing=(6.0, 5.0, 5.0), prefix=name)
    made = prepare_cohort(cohort_of([tmp_path / n for n in "abc"], "ct"), Size(32, 4), tmp_path / "cache")
    assert made.linked == ({"p0", "p1"},)


@pytest.mark.slow
@pytest.mark.shared_data
def test_the_pictures_found_in_public_collections(shared_data):
    with (shared_data / "covid_chestxray" / "metadata.csv").open(encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.DictReader(file) if row["modality"] == "X-ray"]
    owners, images = [row["patientid"] for row in rows], shared_data / "covid_chestxray" / "images"
    small = [miniature([read_radiograph(images / row["filename"])]) for row in rows]
    pairs = [(owners[i], owners[j]) for i, j in shared_pictures(small, owners)]
    assert sorted(pairs) == [("285", "339")] * 3 + [("97", "178")] * 4
    with np.load(shared_data / "medmnist" / "pneumoniamnist.npz") as file:
        children = np.concatenate([file[f"{part}_images"] for part in ("train", "val", "test")])
    twice = list(shared_pictures([miniature([one]) for one in children], [str(i) for i in range(len(children))]))
    assert len(twice) == 31 and sum(np.array_equal(children[i], children[j]) for i, j in twice) == 30


@pytest.mark.parametrize("damage", [lambda c: c[:-40], lambda c: c[:-9] + bytes([c[-9] ^ 1]) + c[-8:]])
def test_a_damaged_miniature_is_read_as_none(tmp_path, damage):
    store_computed(file := tmp_path / "a.miniature.computed", values := np.arange(64, dtype=np.float32))
    assert np.array_equal(load_computed(file), values) and not file.stat().st_mode & 0o077, "pictures of patients"
    file.write_bytes(damage(file.read_bytes()))
    assert load_computed(file) is None
