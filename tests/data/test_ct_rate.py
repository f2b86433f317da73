from datetime import datetime

import pytest
from tables import lay

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.ct_rate import read_ct_rate


def volume(name, day="20200131", age="054Y", sex="F", slices="300", findings="Lungs are clear.", impression="Normal."):
    report = dict(zip(REPORTS, (name, "Cough.", "Non-contrast.", findings, impression), strict=True))
    return report | dict(zip(METADATA, (name, age, sex, day, slices), strict=True))


REPORTS = ("VolumeName", "ClinicalInformation_EN", "Technique_EN", "Findings_EN", "Impressions_EN")
METADATA = ("VolumeName", "PatientAge", "PatientSex", "StudyDate", "NumberofSlices")


@pytest.fixture
def collection(tmp_path):
    def write(*volumes, absent=(), part="train", images=None, no_report=(), no_metadata=(), no_chest=()):
        table, tables = "train" if part == "train" else "validation", {}
        for file, columns, without in (
            (f"radiology_text_reports/{table}_reports.csv", REPORTS, no_report),
            (f"metadata/{table}_metadata.csv", METADATA, no_metadata),
        ):
            tables[file] = [{name: v[name] for name in columns} for v in volumes if v["VolumeName"] not in without]
        names = [v["VolumeName"] for v in volumes if v["VolumeName"].endswith(".nii.gz")]
        places = {name: [name.rsplit("_", parts)[0] for parts in (2, 1)] for name in names}
        files = ["/".join([images or f"{part}_fixed", *places[name], name]) for name in names if name not in absent]
        root = lay(tmp_path / "dataset", tables, files)
        (root / f"metadata/no_chest_{part}.txt").write_text("".join(f"{part}/x/x_a/{name}\n" for name in no_chest))
        return root.parent

    return write


def test_scans_are_visits_in_the_order_of_their_dates_not_of_their_letters(collection, tmp_path):
    path = collection(
        volume("train_1_a_1.nii.gz", day="20210101"), volume("train_1_b_1.nii.gz", day="20200101", age="053Y"),
        volume("train_2_a_1.nii.gz", sex="M", age=""),
    )  # fmt: skip
    for place in (path, path / "dataset"):
        one, two = read_ct_rate(place).patients()
        assert [v.visit_id for v in one.visits] == ["train_1_b", "train_1_a"]
        assert [v.age for v in one.visits] == [53, 54] and one.sex == "F" and one.patient_id == "train_1"
        assert one.visits[0].acquired == datetime(2020, 1, 1) and one.visits[0].modality == "ct"
        assert one.visits[0].image == tmp_path / "dataset/train_fixed/train_1/train_1_b/train_1_b_1.nii.gz"
        assert one.visits[0].report == "Lungs are clear.\nNormal." and (two.sex, two.visits[0].age) == ("M", None)


FIRST = {"train_1_a_1.nii.gz"}


@pytest.mark.parametrize(
    "slices, lacks, chosen",
    [("300 300", {}, 1), ("300 400", {}, 2), ("x x", {}, 1), ("400 300", {"absent": FIRST}, 2),
     ("300 300", {"no_report": FIRST}, 1), ("300 300", {"no_metadata": FIRST, "absent": {"train_1_a_2.nii.gz"}}, 1)],
)  # fmt: skip
def test_one_reconstruction_of_a_scan_by_the_stated_rule(collection, slices, lacks, chosen):
    """What the chosen one lacks in the tables, another one gives."""
    volumes = [volume(f"train_1_a_{i}.nii.gz", slices=s) for i, s in enumerate(slices.split(), start=1)]
    (patient,) = read_ct_rate(collection(*volumes[::-1], **lacks)).patients()
    assert [v.image.name for v in patient.visits] == [f"train_1_a_{chosen}.nii.gz"]
    assert patient.visits[0].report and patient.visits[0].age == 54


def test_unusable_studies_are_counted(collection):
    path = collection(
        *(volume(f"train_{n}_a_1.nii.gz") for n in (1, 2, 3, 6, 8)),
        volume("train_1_b_1.nii.gz", day=""),
        volume("train_4_a_1.nii.gz", findings="", impression=""),
        volume("train_5_a_1.nii.gz", age="430Y"),
        volume("scan 7"),
        absent=["train_2_a_1.nii.gz"],
        no_report=["train_3_a_1.nii.gz"],
        no_metadata=["train_6_a_1.nii.gz"],
        no_chest=["train_8_a_1.nii.gz", "train_9_a_1.nii.gz"],
    )
    reading = read_ct_rate(path)
    assert [p.patient_id for p in reading.patients()] == ["train_1"]
    once = ("age-out-of-range", "bad-name", "no-chest", "no-image", "no-report", "no-section")
    assert reading.rejected() == {"no-date": 2, **dict.fromkeys(once, 1)}


def test_volumes_without_hounsfield_units_are_refused(collection):
    path = collection(volume("train_1_a_1.nii.gz"), images="train")
    with pytest.raises(ConfigError, match="train_fixed"):
        read_ct_rate(path)
    (patient,) = read_ct_rate(path, {"images": "dataset/train"}).patients()
    assert "train" in patient.visits[0].image.parts, "whoever names a folder knows what it contains"


def test_parts_and_sections(collection):
    path = collection(volume("valid_1_a_1.nii.gz", day="20200131.0"), part="valid")
    (patient,) = read_ct_rate(path, {"part": "valid", "sections": ["technique", "impression"]}).patients()
    assert patient.visits[0].report == "Non-contrast.\nNormal." and "valid_fixed" in patient.visits[0].image.parts
    everything = read_ct_rate(path, {"part": "valid", "sections": "all"}).patients()[0].visits[0].report
    assert everything.splitlines()[0] == "HISTORY: Cough." and everything.splitlines()[-1] == "IMPRESSION: Normal."


def test_wrong_layouts_and_options(collection, tmp_path):
    path = collection(volume("train_1_a_1.nii.gz"))
    for option, value in (("part", "test"), ("part", "valid"), ("images", "nowhere"), ("reports", "nowhere.csv")):
        with pytest.raises(ConfigError, match=value):
            read_ct_rate(path, {option: value})
    (path / "dataset/metadata/train_metadata.csv").write_text("VolumeName,PatientAge\n")
    with pytest.raises(ConfigError, match="PatientSex, StudyDate missing"):
        read_ct_rate(path)


def test_abnormalities_of_a_table_are_labels_and_any_reconstruction_has_them(collection):
    path = collection(volume("train_1_a_1.nii.gz"), volume("train_1_a_2.nii.gz"), volume("train_2_a_1.nii.gz"))
    (path / "labels.csv").write_text("VolumeName,Emphysema,Lung nodule\ntrain_1_a_2.nii.gz,1,0\n")
    patients = read_ct_rate(path, {"labels": "labels.csv"}).patients()
    assert {p.patient_id: p.visits[0].labels for p in patients} == {"train_1": {"Emphysema"}, "train_2": None}
    assert all(p.visits[0].labels is None for p in read_ct_rate(path).patients())
