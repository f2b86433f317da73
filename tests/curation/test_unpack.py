"""A packed data set of pictures becomes a manifest with labels that a task can be made of."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.curation import unpack as packed
from fedtar_flare.curation.unpack import unpack
from fedtar_flare.data.sources.manifest import read_manifest

RNG = np.random.default_rng(0)
ARRAYS = {
    "train_images": RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8),
    "train_labels": np.array([[0], [1], [2], [1], [0]], dtype=np.uint8),
    "test_images": RNG.integers(0, 256, (2, 28, 28), dtype=np.uint8),
    "test_labels": np.array([[2], [1]], dtype=np.uint8),
}


def pack(file, **changes):
    np.savez(file, **{**ARRAYS, **changes})
    return file


def test_a_part_of_a_file_that_is_sorted_by_class_has_every_class(tmp_path):
    by_class = np.array([[1], [1], [1], [0], [0]])
    unpacked = unpack(pack(tmp_path / "x.npz", train_labels=by_class), tmp_path / "out", most=3)
    assert unpacked.pictures == 5 and unpacked.labels == {"class-0": 1, "class-1": 3, "class-2": 1}


def test_an_archive_fills_neither_disk_nor_folder(tmp_path, monkeypatch):
    file = pack(tmp_path / "x.npz")
    monkeypatch.setattr(packed, "MOST", 6)
    with pytest.raises(ConfigError, match="--most"):
        unpack(file, tmp_path / "out")
    assert unpack(file, tmp_path / "few", most=3).pictures == 5
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000))
    with pytest.raises(ConfigError):
        unpack(file, tmp_path / "full")
    assert not [path for place in ("out", "full") for path in (tmp_path / place).rglob("*.np*")]


@pytest.mark.parametrize(
    ("changes", "names", "wrong"),
    [
        ({"train_images": np.zeros((5, 4, 4), np.float32)}, (), "float32"),
        ({"train_images": np.zeros((5, 28, 28, 28), np.uint8)}, (), "volumes"),
        ({"train_images": np.zeros((5, 8, 8, 8, 3), np.uint8)}, (), "volumes"),
        ({"train_images": np.zeros((5, 28), np.uint8)}, (), r"\(5, 28\)"),
        ({"train_labels": np.zeros((5, 1), np.float32)}, (), "float32"),
        ({"train_labels": np.full((5, 14), 2)}, (), "14 labels"),
        ({"train_labels": np.full((5, 1), -1)}, (), "class -1"),
        ({"val_images": np.zeros((5, 4, 4), np.uint8)}, (), "val_images"),
        ({"train_labels": np.eye(5, 14, dtype=int)}, ("a", "b"), "2 names"),
        *(({}, ("a", "b", name), f"'{name}'") for name in ("c;d", "b")),
        ({"train_labels": np.zeros((4, 1), np.uint8)}, (), r"\(4, 1\)"),
        ({}, ("normal",), "class 1"),
    ],
)
def test_other_arrays_and_names_are_refused(tmp_path, changes, names, wrong):
    with pytest.raises(ConfigError, match=wrong):
        unpack(pack(tmp_path / "x.npz", **changes), tmp_path / "out", names)


LABELS = {
    "one class of two": np.array([[0], [1], [1], [0], [1], [0]]),
    "a grade of five": np.array([[0], [4], [2], [3], [1], [4]]),
    "one class, without an axis of its own": np.array([0, 8, 7, 1, 2, 3]),
    "fourteen findings, of the last picture none": np.eye(6, 14, dtype=int) * (np.arange(6) < 5)[:, None],
}


@pytest.mark.parametrize("size, colour, kind", zip((28, 64, 128, 224), ((), (3,)) * 2, LABELS, strict=True))
def test_every_format_of_pictures_that_medmnist_has(tmp_path, size, colour, kind):
    images = RNG.integers(0, 256, (6, size, size, *colour), dtype=np.uint8)
    labels = LABELS[kind].astype(np.uint8)
    parts = {"train": slice(0, 3), "val": slice(3, 4), "test": slice(4, 6)}
    arrays = {f"{part}_images": images[of] for part, of in parts.items()}
    arrays |= {f"{part}_labels": labels[of] for part, of in parts.items()}
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    names = [f"name {n}" for n in range(14)] if kind.startswith("fourteen") else ()
    unpacked = unpack(tmp_path / "x.npz", tmp_path / "out", names)
    assert unpacked.pictures == 6 and unpacked.colour is bool(colour)
    manifest = read_manifest(unpacked.manifest)
    assert manifest.splits["val-000000"] == "validation" and manifest.splits["test-000001"] == "test"
    visits = {p.patient_id: p.visits[0] for p in manifest.patients()}
    for part, of in parts.items():
        for n, (image, label) in enumerate(zip(images[of], labels[of], strict=True)):
            visit = visits[f"{part}-{n:06d}"]
            assert np.array_equal(np.asarray(Image.open(visit.image)), image)
            of_picture = np.flatnonzero(label) if label.size > 1 else label.reshape(1)
            assert visit.labels == {names[number] if names else f"class-{number}" for number in of_picture}


def test_pictures_are_read_one_by_one_and_no_more_than_are_asked_for(tmp_path):
    by_column = pack(tmp_path / "x.npz", train_images=np.asfortranarray(ARRAYS["train_images"]))
    assert unpack(by_column, tmp_path / "by-column").pictures == 7
    whole = pack(tmp_path / "x.npz").read_bytes()
    damaged = whole.index(ARRAYS["train_images"].tobytes()) + 2 * 28 * 28
    (tmp_path / "x.npz").write_bytes(whole[:damaged] + b"X" + whole[damaged + 1 :])
    with pytest.raises(ConfigError, match="cannot be read"):
        unpack(tmp_path / "x.npz", tmp_path / "damaged")
    assert not (tmp_path / "damaged" / "manifest.csv").exists()


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
