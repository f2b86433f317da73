"""Tables, folders and packed sets of public collections become a manifest that tasks can be made of."""

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kits import write_noise
from PIL import Image
from tables import cases, write_table

from fedtar_flare.cli.main import main
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.curation import unpack as packed
from fedtar_flare.curation.labelled import tabulate
from fedtar_flare.curation.unpack import unpack
from fedtar_flare.data.sources.manifest import read_manifest


def pictures(folder, *names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_noise(folder / name, number)
    return folder


def visits(manifest):
    return {v.image.name: (p.patient_id, v) for p in read_manifest(manifest).patients() for v in p.visits}


def typed(word, repository):
    """Run the commands of the page, in its block that has this word, in the working folder."""
    page = (repository / "docs/how-to/prepare-data.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"^```\n(.*?)^```", page, flags=re.M | re.S) if word in block)
    for line in block.replace("\\\n", "").splitlines():
        if line.startswith("fedtar "):
            assert main(shlex.split(line)[1:]) == 0
        else:
            subprocess.run(["bash", "-c", line], check=True)


def test_nih_chest_xray_14(tmp_path, monkeypatch, capsys, repository):
    monkeypatch.chdir(pictures(tmp_path, "images_001/images/00000001_000.png", "images_002/images/00000001_001.png",
                      "images_002/images/00000002_000.png", "images_002/images/00000003_000.png",
                      "images_002/images/00000004_000.png"))  # fmt: skip
    head = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,OriginalImage"
    rows = ["00000001_000.png,Cardiomegaly|Emphysema,0,1,057Y,M,PA,2682", "00000001_001.png,No Finding,1,1,058Y,M,PA,2",
            "00000002_000.png,Hernia,0,2,081Y,F,AP,2500", "00000009_000.png,Mass,0,9,081Y,F,AP,2500",
            "00000004_000.png,Mass,0,4,413Y,F,AP,2500"]  # fmt: skip
    Path("Data_Entry_2017.csv").write_text("".join(f"{line},\n" for line in [head, *rows]))
    Path("train_val_list.txt").write_bytes(b"00000001_000.png\r\n00000001_001.png\r\n")
    Path("test_list.txt").write_bytes(b"00000002_000.png\r\n00000004_000.png")
    typed("Data_Entry_2017.csv", repository)
    assert "images without labels 1, named and not there 1" in capsys.readouterr().out
    found, read = visits(Path("nih.csv")), read_manifest(Path("nih.csv"))
    patient, first = found["00000001_000.png"]
    assert (patient, first.age, first.labels) == ("1", 57, {"Cardiomegaly", "Emphysema"})
    assert (found["00000001_001.png"][1].acquired - first.acquired).days == 1
    assert len(found) == 3 and read.rejected() == {"age-out-of-range": 1}
    assert found["00000002_000.png"][1].labels == {"Hernia"} and read.splits == {"1": "train", "2": "test"}


def test_findings_of_most_readers_are_labels_and_of_few_are_uncertain(tmp_path, monkeypatch, repository):
    """VinDr-CXR: three radiologists a training image, a column for each finding."""
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "train", "a.png", "b.png")
    rows = [{"image_id": image, "rad_id": f"R{i}", "Nodule/Mass": mass, "Pneumonia": pneumonia, "No finding": 0}
            for image, seen in {"a": [(1, 0), (1, 1), (0, 0)], "b": [(0, 0)] * 3}.items()
            for i, (mass, pneumonia) in enumerate(seen)]  # fmt: skip
    write_table(tmp_path / "annotations" / "image_labels_train.csv", rows)
    typed("vindr.csv", repository)
    (one, a), (other, b) = visits(Path("vindr.csv")).values()
    assert one != other
    assert (a.labels, a.uncertain, b.labels, b.uncertain) == ({"Nodule/Mass"}, {"Pneumonia"}, set(), set())


def test_ham10000_and_isic_2019_in_two_tables(tmp_path, monkeypatch, repository):
    monkeypatch.chdir(pictures(tmp_path, "part_1/ISIC_1.jpg", "ISIC_2.jpg", "ISIC_3.jpg"))
    names = [f"ISIC_{n}" for n in (1, 2, 3)]
    people = [*zip(names, ("55", "", "9"), ("male", "", "female"), strict=True)]
    truth = [{"image": n, "MEL": "1.0", "NV": "0.0"} for n in names[:2]]
    write_table(tmp_path / "ISIC_2019_Training_GroundTruth.csv", truth)
    metadata = [{"image": n, "age_approx": age, "lesion_id": "L1", "sex": sex} for n, age, sex in people]
    write_table(tmp_path / "ISIC_2019_Training_Metadata.csv", metadata)
    ham = [{"lesion_id": f"H{n}", "image_id": n, "dx": "nv", "age": age, "sex": sex} for n, age, sex in people]
    write_table(tmp_path / "HAM10000_metadata.csv", ham)
    typed("HAM10000", repository)
    isic, ham = (dict(sorted(visits(Path(name)).items())) for name in ("isic2019.csv", "ham10000.csv"))
    assert [(one, v.labels, v.age) for one, v in isic.values()] == [("L1", {"MEL"}, 55), ("L1", {"MEL"}, None)]
    patients = [(f"HISIC_{n}", {"nv"}, age) for n, age in ((1, 55), (2, None), (3, 9))]
    assert [(one, v.labels, v.age) for one, v in ham.values()] == patients
    for source in ("isic2019.csv", "ham10000.csv"):
        given = ["--option", "modality=photograph", "--by", "random", "-n", "1", "--out", source[:4]]
        assert main(["data", "partition", "manifest", source, *given]) == 0


def test_oct_folders_name_label_patient_and_split(tmp_path, monkeypatch, repository):
    names = ("train/CNV/CNV-77-1.jpeg", "train/CNV/CNV-77-2.jpeg", "val/NORMAL/NORMAL-5-1.jpeg", "test/DME/x.jpeg",
             "train/DME/DME-8-1.jpeg", "test/DME/DME-8-2.jpeg")  # fmt: skip
    pictures(tmp_path / "OCT2017", *names)
    monkeypatch.chdir(tmp_path)
    typed("OCT2017", repository)
    found, read = visits(Path("oct.csv")), read_manifest(Path("oct.csv"))
    assert {name: visit.labels for name, (_, visit) in found.items()} == {
        "CNV-77-1.jpeg": {"CNV"}, "CNV-77-2.jpeg": {"CNV"}, "NORMAL-5-1.jpeg": {"NORMAL"}}  # fmt: skip
    assert read.patients() and read.rejected() == {"conflicting-split": 2}
    assert (read.splits["77"], read.splits["5"]) == ("train", "validation")


@pytest.mark.parametrize(("settings", "wrong"), cases(__file__, "labelled.yaml"))
def test_unfit_settings_are_named(tmp_path, settings, wrong):
    folder = pictures(tmp_path / "all", "a/1.png", "b/2.png")
    write_table(tmp_path / "t.csv", [{"i": "1", "dx": "nv", "n": "1"}])
    tables = {"tables": [tmp_path / "t.csv"]} if "tables" in settings else {}
    with pytest.raises(ConfigError, match=wrong):
        tabulate(folder, tmp_path / "m.csv", **(settings | tables))
    assert not (tmp_path / "m.csv").exists()


def test_two_images_of_one_name_are_refused(tmp_path):
    folder = pictures(tmp_path / "all", "a/1.png", "b/1.jpg")
    write_table(tmp_path / "t.csv", [{"i": "1.png", "dx": "nv"}])
    with pytest.raises(ConfigError, match="2 images are called '1'"):
        tabulate(folder, tmp_path / "m.csv", tables=[tmp_path / "t.csv"], columns={"image": "i"}, labels=["dx"])


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


@pytest.mark.parametrize(("changes", "names", "wrong"), cases(__file__, "packed.yaml"))
def test_other_arrays_and_names_are_refused(tmp_path, changes, names, wrong):
    arrays = {name: np.full(shape, value, kind) for name, (shape, value, kind) in changes.items()}
    with pytest.raises(ConfigError, match=wrong):
        unpack(pack(tmp_path / "x.npz", **arrays), tmp_path / "out", names)


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
    pack(tmp_path / "z.npz")
    unpack(tmp_path / "z.npz", tmp_path / "out")
    with pytest.raises(ConfigError, match="there already"):
        unpack(tmp_path / "z.npz", tmp_path / "out")
