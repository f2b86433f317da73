"""Tables and folders of public collections become a manifest that tasks can be made of."""

import pytest
from kits import write_noise
from tables import write_table

from fedtar_flare.cli.main import main
from fedtar_flare.curation.labelled import tabulate
from fedtar_flare.data.sources.manifest import read_manifest
from fedtar_flare.errors import ConfigError


def pictures(folder, *names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_noise(folder / name, number)
    return folder


def visits(manifest):
    return {v.image.name: (p.patient_id, v) for p in read_manifest(manifest).patients() for v in p.visits}


def test_nih_chest_xray_14(tmp_path, capsys):
    folder = pictures(tmp_path / "nih", "images_001/images/00000001_000.png", "images_002/images/00000001_001.png",
                      "images_002/images/00000002_000.png", "images_002/images/00000003_000.png")  # fmt: skip
    head = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,OriginalImage"
    rows = ["00000001_000.png,Cardiomegaly|Emphysema,0,1,057Y,M,PA,2682", "00000001_001.png,No Finding,1,1,058Y,M,PA,2",
            "00000002_000.png,Hernia,0,2,081Y,F,AP,2500", "00000009_000.png,Mass,0,9,081Y,F,AP,2500"]  # fmt: skip
    (folder / "Data_Entry_2017.csv").write_text("".join(f"{line},\n" for line in [head, *rows]))
    (folder / "split.csv").write_text("Image Index,split\n00000001_000.png,train\n00000001_001.png,train\n")
    given = ["--table", str(folder / "Data_Entry_2017.csv"), "--table", str(folder / "split.csv")]
    fields = ("image=Image Index", "patient_id=Patient ID", "order=Follow-up #", "age=Patient Age",
              "sex=Patient Gender", "split=split")  # fmt: skip
    given += [part for field in fields for part in ("--column", field)] + ["--labels", "Finding Labels"]
    out = tmp_path / "nih.csv"
    assert main(["data", "label", str(folder), *given, "-o", str(out)]) == 0
    assert "images without labels 1, named and not there 1" in capsys.readouterr().out
    found = visits(out)
    patient, first = found["00000001_000.png"]
    assert (patient, first.age, first.labels) == ("1", 57, {"Cardiomegaly", "Emphysema"})
    assert (found["00000001_001.png"][1].acquired - first.acquired).days == 1
    assert len(found) == 3 and read_manifest(out).patients() and found["00000002_000.png"][1].labels == {"Hernia"}


def test_what_most_readers_see_counts_and_what_few_see_is_uncertain(tmp_path):
    """VinDr-CXR: three radiologists a training image, a column for each finding."""
    folder = pictures(tmp_path / "train", "a.png", "b.png")
    rows = [{"image_id": image, "rad_id": f"R{i}", "Nodule/Mass": mass, "Pneumonia": pneumonia, "No finding": 0}
            for image, seen in {"a": [(1, 0), (1, 1), (0, 0)], "b": [(0, 0)] * 3}.items()
            for i, (mass, pneumonia) in enumerate(seen)]  # fmt: skip
    write_table(tmp_path / "labels.csv", rows)
    found = tabulate(folder, tmp_path / "m.csv", tables=[tmp_path / "labels.csv"], columns={"image": "image_id"},
                     labels=["*"])  # fmt: skip
    assert found.labels == {"Nodule/Mass": 1} and found.patients == 2
    (_, a), (_, b) = visits(found.manifest).values()
    assert (a.labels, a.uncertain, b.labels, b.uncertain) == ({"Nodule/Mass"}, {"Pneumonia"}, set(), set())


def test_isic_2019_in_two_tables(tmp_path):
    folder = pictures(tmp_path / "all", "ISIC_1.jpg", "ISIC_2.jpg", "ISIC_3.jpg")
    names = [f"ISIC_{n}" for n in (1, 2, 3)]
    write_table(tmp_path / "truth.csv", [{"image": n, "MEL": "1.0", "NV": "0.0"} for n in names[:2]])
    metadata = [
        {"image": n, "age_approx": a, "lesion_id": "L1", "sex": "male"}
        for n, a in zip(names, ("55", "", "9"), strict=True)
    ]
    write_table(tmp_path / "metadata.csv", metadata)
    columns = {"image": "image", "patient_id": "lesion_id", "age": "age_approx", "sex": "sex"}
    tables = [tmp_path / "truth.csv", tmp_path / "metadata.csv"]
    found = tabulate(folder, tmp_path / "m.csv", tables=tables, columns=columns, labels=["*"])
    assert (found.labels, found.images, found.patients, found.without_row) == ({"MEL": 2}, 2, 1, 1)
    assert visits(found.manifest)["ISIC_1.jpg"][1].age == 55


def test_oct_folders_name_label_patient_and_split(tmp_path):
    names = ("train/CNV/CNV-77-1.jpeg", "train/CNV/CNV-77-2.jpeg", "val/NORMAL/NORMAL-5-1.jpeg", "test/DME/x.jpeg")
    folder = pictures(tmp_path / "OCT2017", *names)
    pattern = r"(?P<split>train|val|test)/(?P<labels>[A-Z]+)/[A-Z]+-(?P<patient_id>\d+)-"
    found = tabulate(folder, tmp_path / "m.csv", name=pattern)
    assert (found.images, found.patients, found.without_row) == (3, 2, 1)
    assert found.labels == {"CNV": 2, "NORMAL": 1}
    assert read_manifest(found.manifest).splits == {"77": "train", "5": "validation"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [({}, "either from tables"), ({"name": "("}, "no regular expression"), ({"name": "(?P<label>.)"}, "no .*labels"),
     ({"name": "(?P<labels>.)(?P<who>.)"}, "'who' is none"), ({"name": "(?P<labels>zzz)"}, "none of 2 images"),
     ({"tables": 1, "columns": {"image": "i"}, "labels": ["x"]}, "no column 'x'"),
     ({"tables": 1, "columns": {"imago": "i"}}, "'imago' is not one of"),
     ({"tables": 1, "columns": {"image": "i"}, "labels": ["dx", "n"]}, "holds 'nv'"),
     ({"tables": 1, "columns": {"image": "i", "order": "dx"}, "labels": ["dx"]}, "order 'nv' is no number")],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path, settings, words):
    folder = pictures(tmp_path / "all", "a/1.png", "b/2.png")
    write_table(tmp_path / "t.csv", [{"i": "1", "dx": "nv", "n": "1"}])
    tables = {"tables": [tmp_path / "t.csv"]} if "tables" in settings else {}
    with pytest.raises(ConfigError, match=words):
        tabulate(folder, tmp_path / "m.csv", **(settings | tables))
    assert not (tmp_path / "m.csv").exists()


def test_two_images_of_one_name_are_refused(tmp_path):
    folder = pictures(tmp_path / "all", "a/1.png", "b/1.jpg")
    write_table(tmp_path / "t.csv", [{"i": "1.png", "dx": "nv"}])
    with pytest.raises(ConfigError, match="2 images are called '1'"):
        tabulate(folder, tmp_path / "m.csv", tables=[tmp_path / "t.csv"], columns={"image": "i"}, labels=["dx"])
