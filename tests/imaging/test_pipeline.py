"""From a study on disk to model input, with and without the cache; and one picture under two patients, in one split."""

import csv
import logging
import os
import re
import signal
import time
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock, patch

import nibabel
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits import write_noise
from make_dicom import trunk, write_series
from monai.transforms import Compose
from PIL import Image
from refused import refused
from scipy.sparse.csgraph import connected_components

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cells import SPLITS, Timeline, linked, split_of
from fedtar_flare.data.cohort import Cohort, Patient, Visit
from fedtar_flare.imaging import pipeline, workers
from fedtar_flare.imaging.cache import file_identity, files_of, load_computed, store_computed
from fedtar_flare.imaging.pipeline import Size, images_of, prepare, prepare_cohort, prepare_visits
from fedtar_flare.imaging.readers.pictures import read_radiograph
from fedtar_flare.imaging.transforms import preparation
from fedtar_flare.imaging.workers import _in_processes, each

CONFIG = Size(16, 4)


@pytest.fixture
def study(tmp_path):
    write_series(tmp_path / "study", trunk(), spacing=(6.0, 5.0, 5.0))
    return tmp_path / "study"


def visit(image, modality="ct", pid="p", day=1):
    return Visit(pid, f"v{day}", datetime(2020, 1, day), Path(image), "Clear.", modality)


def cohort_of(*visits, **rejected):
    return Cohort("s", [Patient("p", None, visits)], key=bytes(16), timeline=Timeline(2), rejected=rejected)


def entries(cache):
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_dicom_and_nifti_of_one_volume_give_the_same_input(study, tmp_path):
    out = preparation("ct", CONFIG)({"image": str(study)})
    assert out["image"].shape == (4, 3, 16, 16) and out["image"].dtype == np.uint8
    assert out["position_mm"].dtype == np.float32 and out["position_mm"].tolist() == [-42, -12, 12, 42]
    lung, mediastinum, bone = out["image"][1, :, 8, 11]
    assert lung > 80 and mediastinum == 0 and bone == 0
    mark = out["image"][:, 2].mean(axis=0)
    assert np.unravel_index(mark.argmax(), mark.shape) == (3, 10)
    turned = np.ascontiguousarray(trunk().transpose(2, 1, 0)[::-1])  # stored from left to right
    affine = np.array([[5.0, 0, 0, 0], [0, -5.0, 0, 0], [0, 0, 6.0, 0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(turned, affine), tmp_path / "v.nii.gz")
    other = preparation("ct", CONFIG)({"image": str(tmp_path / "v.nii.gz")})
    assert all(np.array_equal(out[key], other[key]) for key in ("image", "position_mm"))


SMOOTH = {"name": "GaussianSmoothd", "sigma": 1.0}


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "text"])
def test_a_damaged_entry_is_made_again(study, tmp_path, damage):
    first = prepare(visit(study), CONFIG, tmp_path / "cache")
    expected = np.array(first.image)
    (entry,) = entries(tmp_path / "cache")
    content = bytearray(entry.read_bytes())
    entry.unlink()
    if damage == "flipped":
        content[-300] ^= 0xFF
    entry.write_bytes({"cut": content[:-100], "empty": b"", "flipped": content, "text": b"no array"}[damage])
    assert np.array_equal(prepare(visit(study), CONFIG, tmp_path / "cache").image, expected)
    assert len(entries(tmp_path / "cache")) == 1


def test_whatever_matters_makes_another_entry_and_all_are_found_by_the_study(study, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    noise, spacing = {"name": "RandGaussianNoised", "std": 0.5}, {"name": "Spacingd", "pixdim": [5, 5, 5]}
    made = [prepare(visit(study), CONFIG, cache), prepare(visit(study), Size(16, 5), cache)]
    made += [prepare(visit(study), CONFIG, cache, own) for own in ([SMOOTH], [SMOOTH, spacing], [spacing, SMOOTH])]
    assert len(entries(cache)) == 5 and len({one.image.tobytes() for one in made}) == 5
    prepare(visit(study), CONFIG, cache, [noise])  # of training images alone
    assert len(entries(cache)) == 5
    monkeypatch.setattr("fedtar_flare.imaging.cache.PREPARATION_VERSION", -1)
    prepare(visit(study), CONFIG, cache)
    assert entries(cache) == files_of(cache, file_identity(study)) and len(entries(cache)) == 6
    left = entries(cache)[0].with_name(f".{entries(cache)[0].name}.00ff00ff")  # by a process that was ended
    left.touch()
    assert left in files_of(cache, file_identity(study))
    left.unlink()
    file = next(study.iterdir())
    file.write_bytes(file.read_bytes())  # another time of change
    prepare(visit(study), CONFIG, cache)
    assert len(entries(cache)) == 7 and len(files_of(cache, file_identity(study))) == 1


def test_a_transform_that_fails_is_a_refusal_of_its_own(study, tmp_path):
    fails = Mock(side_effect=ValueError("no such axis"))
    with patch("fedtar_flare.imaging.transforms.preparation", lambda *_: Compose([fails])):
        with refused("transform-failed", "no such axis"):
            prepare(visit(study), CONFIG, tmp_path / "cache", [SMOOTH])
        with pytest.raises(ValueError, match="no such axis"):  # a fault of the code
            prepare(visit(study), CONFIG, tmp_path / "cache")
    assert prepare(visit(study), CONFIG, tmp_path / "cache", [SMOOTH]).image.shape == (4, 3, 16, 16)


def test_a_refusal_is_remembered_and_forgotten_when_the_files_change(study, tmp_path):
    gone, cache = sorted(study.iterdir())[10], tmp_path / "cache"
    content = gone.read_bytes()
    gone.unlink()
    with refused(("missing-slices", "too-few-slices")) as error:
        prepare(visit(study), CONFIG, cache)
    with patch.object(pipeline, "_compute"), refused(error.value.reason, re.escape(str(error.value))):
        prepare(visit(study), CONFIG, cache)  # of what is remembered
    gone.write_bytes(content)
    assert prepare(visit(study), CONFIG, cache).image.shape == (4, 3, 16, 16)


@pytest.mark.parametrize("reason", ["too-slow", "no-permission"])
def test_what_may_pass_is_tried_again(study, tmp_path, reason):
    late = Mock(side_effect=DataError("late", reason=reason))
    with patch("fedtar_flare.imaging.transforms.preparation", lambda *_: late), refused(reason):
        prepare(visit(study), CONFIG, tmp_path / "cache")
    assert prepare(visit(study), CONFIG, tmp_path / "cache").image.shape == (4, 3, 16, 16)


def test_a_cache_that_cannot_be_read_back_does_not_stop_the_run_and_names_nobody(study, tmp_path, monkeypatch):
    monkeypatch.setattr("fedtar_flare.imaging.cache.load", lambda entry: None)
    assert prepare(visit(study, pid="Miller"), CONFIG, tmp_path / "cache").image.shape == (4, 3, 16, 16)
    (entry,) = entries(tmp_path / "cache")
    assert "Miller" not in str(entry) and entry.parent.stat().st_mode & 0o077 == 0


def test_a_batch_touches_no_source_file(study, tmp_path):
    cohort = cohort_of(visit(study))
    expected = prepare(visit(study), CONFIG, tmp_path / "cache").image
    (split,) = (name for name in SPLITS if cohort.samples(name))
    with refused("not-prepared"):
        images_of(cohort.samples(split))
    samples = prepare_cohort(cohort, CONFIG, tmp_path / "cache").samples(split)
    study.rename(tmp_path / "elsewhere")
    (image,) = images_of(samples)
    assert np.array_equal(image.image, expected)
    samples[0].prepared.unlink()
    with refused("not-prepared", "run the task again"):
        images_of(samples)


@pytest.mark.slow
def test_a_cohort_prepared_in_processes_is_the_same(study, tmp_path, monkeypatch):
    """Whatever the number of workers: the same entries, byte for byte, and the same refusals."""
    write_series(tmp_path / "broken", trunk()[:3])
    write_series(tmp_path / "other", trunk()[::-1], spacing=(6.0, 5.0, 5.0))
    images = [study, tmp_path / "broken", tmp_path / "other", tmp_path / "nowhere"]
    visits = tuple(visit(image, day=day) for day, image in enumerate(images, start=1))
    cohort = cohort_of(*visits, **{"no-date": 1})
    alone = prepare_visits(visits, CONFIG, tmp_path / "alone", workers=1).cohort(cohort)
    for name in ("SERIAL_SECONDS", "WORTH_SECONDS"):
        monkeypatch.setattr(f"fedtar_flare.imaging.workers.{name}", -1.0)
    together = prepare_visits(visits, CONFIG, tmp_path / "together", workers=2).cohort(cohort)
    assert alone.rejected == together.rejected == {"no-date": 1, "too-few-slices": 1, "no-image": 1}
    one, two = entries(tmp_path / "alone"), entries(tmp_path / "together")
    assert [e.relative_to(tmp_path / "alone") for e in one] == [e.relative_to(tmp_path / "together") for e in two]
    assert [e.read_bytes() for e in one] == [e.read_bytes() for e in two]
    pictures = [entry for entry in one if entry.suffix != ".computed"]  # and miniatures beside them
    assert len(pictures) == 2 * 3, "two pictures and a refusal, in the job's size and in that of comparing patients"


def endless():
    return endless()


def odd(kind, folder=""):
    """An item that ends as its kind says, and in which process where it does."""
    print("a library prints", kind)
    if kind == "refused":
        raise DataError("three", reason="is-three")
    if kind == "hungry":
        try:
            raise MemoryError
        except MemoryError as error:
            raise RuntimeError("as MONAI wraps it") from error
    if kind in ("faulty", "endless"):
        return endless() if kind == "endless" else int("a fault of the code")
    if kind == "kills" or (kind == "kills once" and not (Path(folder) / "mark").exists()):
        (Path(folder) / kind.replace("kills once", "mark")).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "hangs":
        signal.pause()
    return kind, os.getpid()


REFUSED = {"hangs": ("too-slow", ""), "kills": ("worker-died", "-9"), "refused": ("is-three", "three")}
FAULTS = {"faulty": ("internal-error", "ValueError"), "endless": ("internal-error", "RecursionError")}
FAULTS |= {"hungry": ("out-of-memory", "")}


def told(done, expected):
    return all(done[kind].reason == reason and words in str(done[kind]) for kind, (reason, words) in expected.items())


def test_every_item_has_its_outcome_and_what_becomes_of_one_stops_no_other(tmp_path, capfd):
    """A process that dies is replaced and its item tried once more; one that hangs is replaced."""
    kinds = [*REFUSED, *FAULTS, "kills once", "fine"]
    items = [{"kind": kind, "folder": str(tmp_path)} for kind in kinds]
    done = {kinds[n]: outcome for n, outcome in _in_processes(odd, items, 2, 5.0)}
    assert told(done, REFUSED | FAULTS) and "Traceback" in capfd.readouterr().err
    assert all(done[kind][0] == kind and done[kind][1] != os.getpid() for kind in ("kills once", "fine"))


def test_a_fault_of_the_code_is_told_in_this_process_too(caplog):
    kinds = [*FAULTS, "fine"]
    done = {kinds[n]: outcome for n, outcome in each(odd, [{"kind": kind} for kind in kinds], 1)}
    assert told(done, FAULTS) and done["fine"] == ("fine", os.getpid()) and "Traceback" in caplog.text


def test_where_no_process_can_be_started_this_one_does_all(monkeypatch):
    monkeypatch.setattr(workers, "_process", Mock(side_effect=OSError("Resource temporarily unavailable")))
    done = dict(_in_processes(odd, [{"kind": kind} for kind in "abc"], 2))
    assert done == {n: (kind, os.getpid()) for n, kind in enumerate("abc")}


def test_long_work_goes_on_in_processes_where_it_was_and_given_up_leaves_none_behind(monkeypatch):
    for name in ("SERIAL_SECONDS", "WORTH_SECONDS"):
        monkeypatch.setattr(workers, name, -1.0)
    going = each(odd, [{"kind": "fine"}] * 50, 2)
    assert next(going) == (0, ("fine", os.getpid()))
    index, (_, other) = next(going)
    assert index > 0 and other != os.getpid()
    going.close()
    while psutil.pid_exists(other):
        time.sleep(0.05)


KEY = bytes(range(16))
N = 30


def cohort_of_images(images, modality="radiograph"):
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
    assert splits(prepare_cohort(cohort_of_images(images), Size(64, 1), tmp_path / "cache")) == alone
    assert not caplog.records
    Image.open(images[tested]).resize((96, 96)).save(tmp_path / "copy.jpg", quality=70)
    images[trained] = tmp_path / "copy.jpg"
    images[validated] = images[other]
    with caplog.at_level(logging.WARNING):
        made = splits(prepare_cohort(cohort_of_images(images), Size(64, 1), tmp_path / "cache"))
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
        assert prepare_cohort(cohort_of_images(images), Size(size, 1), tmp_path / "cache").linked == ()


def test_a_ct_under_two_patients(tmp_path):
    rng = np.random.default_rng(0)
    other = trunk() + rng.normal(0, 200, trunk().shape).astype(np.int16).cumsum(axis=2).clip(-400, 400).astype(np.int16)
    for name, volume in (("a", trunk()), ("b", trunk()), ("c", other)):
        write_series(tmp_path / name, volume, spacing=(6.0, 5.0, 5.0), prefix=name)
    made = prepare_cohort(cohort_of_images([tmp_path / n for n in "abc"], "ct"), Size(32, 4), tmp_path / "cache")
    assert made.linked == ({"p0", "p1"},)


@pytest.mark.slow
@pytest.mark.shared_data
def test_the_pictures_found_in_public_collections(shared_data):
    with (shared_data / "covid_chestxray" / "metadata.csv").open(encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.DictReader(file) if row["modality"] == "X-ray"]
    owners, images = [row["patientid"] for row in rows], shared_data / "covid_chestxray" / "images"
    small = [pipeline.miniature([read_radiograph(images / row["filename"])]) for row in rows]
    pairs = [(owners[i], owners[j]) for i, j in pipeline.shared_pictures(small, owners)]
    assert sorted(pairs) == [("285", "339")] * 3 + [("97", "178")] * 4
    with np.load(shared_data / "medmnist" / "pneumoniamnist.npz") as file:
        children = np.concatenate([file[f"{part}_images"] for part in ("train", "val", "test")])
    small = [pipeline.miniature([one]) for one in children]
    twice = list(pipeline.shared_pictures(small, [str(i) for i in range(len(children))]))
    assert len(twice) == 31 and sum(np.array_equal(children[i], children[j]) for i, j in twice) == 30


@pytest.mark.parametrize("damage", [lambda c: c[:-40], lambda c: c[:-9] + bytes([c[-9] ^ 1]) + c[-8:]])
def test_a_damaged_miniature_is_read_as_none(tmp_path, damage):
    store_computed(file := tmp_path / "a.miniature.computed", values := np.arange(64, dtype=np.float32))
    assert np.array_equal(load_computed(file), values) and not file.stat().st_mode & 0o077, "pictures of patients"
    file.write_bytes(damage(file.read_bytes()))
    assert load_computed(file) is None
