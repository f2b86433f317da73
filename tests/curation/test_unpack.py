"""A packed data set of pictures becomes a manifest with labels that a task can be made of."""

import numpy as np
import pytest
from PIL import Image

from fedtar_flare.curation.unpack import unpack
from fedtar_flare.data.sources.manifest import read_manifest
from fedtar_flare.errors import ConfigError


def pack(file, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "train_images": rng.integers(0, 256, (5, 28, 28), dtype=np.uint8),
        "train_labels": np.array([[0], [1], [2], [1], [0]], dtype=np.uint8),
        "test_images": rng.integers(0, 256, (2, 28, 28), dtype=np.uint8),
        "test_labels": np.array([[2], [1]], dtype=np.uint8),
    }
    np.savez(file, **{**arrays, **changes})
    return arrays


def test_pictures_and_classes_come_back(tmp_path):
    arrays = pack(tmp_path / "x.npz")
    found = unpack(tmp_path / "x.npz", tmp_path / "out", ["normal", "drusen", "cnv"])
    assert found.pictures == 7 and found.labels == {"cnv": 2, "drusen": 3, "normal": 2}
    patients = read_manifest(found.manifest).patients()
    labels = {p.patient_id: p.visits[0].labels for p in patients}
    assert labels["train-000002"] == {"cnv"} and labels["test-000001"] == {"drusen"}
    picture = np.asarray(Image.open(next(p.visits[0].image for p in patients if p.patient_id == "train-000003")))
    assert np.array_equal(picture, arrays["train_images"][3])


def test_rows_of_findings_and_colour(tmp_path):
    labels = np.array([[0, 1], [1, 1], [0, 0], [1, 0], [0, 0]])
    colour = np.zeros((5, 8, 8, 3), dtype=np.uint8)
    pack(tmp_path / "x.npz", train_labels=labels, train_images=colour, test_labels=labels[:2], test_images=colour[:2])
    found = unpack(tmp_path / "x.npz", tmp_path / "out", most=3)
    assert found.pictures == 5 and found.labels == {"class-0": 2, "class-1": 4}
    labels = {p.patient_id: p.visits[0].labels for p in read_manifest(found.manifest).patients()}
    assert labels["train-000002"] == frozenset() and labels["train-000001"] == {"class-0", "class-1"}


@pytest.mark.parametrize(
    ("changes", "names", "words"),
    [
        ({"train_images": np.zeros((5, 4, 4), np.float32)}, (), "are no pictures"),
        ({"train_images": np.zeros((5, 4, 4, 4), np.uint8)}, (), "are no pictures"),
        ({"train_labels": np.zeros((4, 1), np.uint8)}, (), "are no pictures"),
        ({}, ("normal",), "class 1 has no name"),
    ],
)
def test_what_is_no_data_set_of_pictures_is_refused(tmp_path, changes, names, words):
    pack(tmp_path / "x.npz", **changes)
    with pytest.raises(ConfigError, match=words):
        unpack(tmp_path / "x.npz", tmp_path / "out", names)


def test_a_file_of_another_kind_and_a_folder_in_use_are_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        unpack(tmp_path / "x.npz", tmp_path / "out")
    np.savez(tmp_path / "y.npz", a=np.array([{"x": 1}], dtype=object))
    with pytest.raises(ConfigError):
        unpack(tmp_path / "y.npz", tmp_path / "out")
    pack(tmp_path / "z.npz")
    unpack(tmp_path / "z.npz", tmp_path / "out")
    with pytest.raises(ConfigError, match="there already"):
        unpack(tmp_path / "z.npz", tmp_path / "out")
