"""Tables and folders of public collections become a manifest that tasks can be made of."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from kits import write_noise
from tables import write_table

from fedtar_flare.cli.main import main
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.curation.labelled import tabulate
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


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [({}, "tables"), ({"name": "("}, r"'\('"), ({"name": "(?P<label>.)"}, "labels"),
     ({"name": "(?P<labels>.)(?P<who>.)"}, "'who'"), ({"name": "(?P<labels>zzz)"}, "none of 2 images"),
     ({"tables": 1, "columns": {"image": "i"}, "labels": ["x"]}, "'x'"),
     ({"tables": 1, "columns": {"imago": "i"}}, "'imago'"),
     ({"tables": 1, "columns": {"image": "i"}, "labels": ["dx", "n"]}, "'nv'"),
     ({"tables": 1, "columns": {"image": "i", "order": "dx"}, "labels": ["dx"]}, "'nv'")],
)  # fmt: skip
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
