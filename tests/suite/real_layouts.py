"""Made-up collections in the real ones' layouts, and tiny models in folders as the published ones are."""

from pathlib import Path

import numpy as np
from kits import write_noise
from tables import lay
from tiny_models import write_cvt, write_gpt2, write_llama, write_timm

from fedtar_flare.core.files import write_text

WORDS = ("pleural effusion", "pneumothorax", "consolidation", "cardiomegaly", "lung mass", "atelectasis")


def report(i: int) -> str:
    """Reports of as many kinds as there are words, with both sections; the findings of every tenth are short."""
    word, more = WORDS[i % len(WORDS)], "" if i % 10 == 9 else " No rib is broken, and the mediastinum is not widened."
    return f"There is {word} on the left, of {i} mm. The heart is normal.{more}", f"{word.capitalize()}, unchanged."


def noise(root: Path, tables: dict[str, list], images: list[str], first: int) -> None:
    """Tables, and pictures of noise, each unlike any other."""
    lay(root, tables, images)
    for i, image in enumerate(images, start=first):
        write_noise(root / image, i)


def ct_rate(root: Path, patients: int) -> None:
    """Two scans of each patient, of 12 slices."""
    import nibabel

    reports, metadata = [], []
    for i in range(patients):
        for j, letter in enumerate("ab"):
            name = f"train_{i}_{letter}_1.nii.gz"
            place = root / "dataset" / "train_fixed" / f"train_{i}" / f"train_{i}_{letter}" / name
            place.parent.mkdir(parents=True)
            hu = np.random.default_rng(2 * i + j).normal(-600, 200, (32, 32, 12)).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(hu, np.diag([10.0, 10.0, 20.0, 1.0])), place)
            findings, impression = report(i + j)
            reports.append({"VolumeName": name, "Findings_EN": findings, "Impressions_EN": impression})
            about = {"PatientAge": f"0{40 + i}Y", "PatientSex": "MF"[i % 2], "StudyDate": f"20{20 + j}0131"}
            metadata.append({"VolumeName": name, **about, "NumberofSlices": "12"})
    tables = {"radiology_text_reports/train_reports.csv": reports, "metadata/train_metadata.csv": metadata}
    lay(root / "dataset", tables, ["metadata/no_chest_train.txt"])


def mimic(place: Path, patients: int) -> None:
    """``mimic-cxr-jpg``, ``mimic-cxr`` and ``mimic-iv`` in a folder: a study each, every split in turn."""
    images, splits, people, files = [], [], [], []
    for i in range(patients):
        subject, study, dicom = str(10_000_000 + i), str(50_000_000 + i), f"d{i}"
        files.append(f"files/p{subject[:2]}/p{subject}/s{study}/{dicom}.jpg")
        text = "FINAL REPORT\n FINDINGS: {}\n\n IMPRESSION: {}\n".format(*report(i))
        write_text(place / "mimic-cxr" / f"{Path(files[-1]).parent}.txt", text)
        about = {"dicom_id": dicom, "subject_id": subject, "study_id": study}
        more = {"ViewPosition": "PA", "Rows": "64", "Columns": "64", "StudyDate": "21800506", "StudyTime": "213014.531"}
        images.append(about | more)
        splits.append(about | {"split": ("train", "train", "validate", "test")[i // 10 % 4]})
        people.append({"subject_id": subject, "gender": "MF"[i % 2], "anchor_age": 40 + i, "anchor_year": 2180})
    tables = {"mimic-cxr-2.0.0-metadata.csv": images, "mimic-cxr-2.0.0-split.csv": splits}
    noise(place / "mimic-cxr-jpg", tables, files, 0)
    lay(place / "mimic-iv", {"patients.csv": people})


def iu_xray(root: Path, patients: int) -> None:
    """OpenI's two tables, a frontal film each."""
    names = [f"{i}_IM-0001-3001.dcm.png" for i in range(patients)]
    reports = [{"uid": i, **dict(zip(("findings", "impression"), report(i), strict=True))} for i in range(patients)]
    films = [{"uid": i, "filename": name, "projection": "Frontal"} for i, name in enumerate(names)]
    tables = {"indiana_reports.csv": reports, "indiana_projections.csv": films}
    noise(root, tables, [f"images/images_normalized/{name}" for name in names], 900)


def chexpert_plus(root: Path, patients: int) -> None:
    """One table, a film of each patient."""
    rows = []
    for i in range(patients):
        path, (findings, impression) = f"train/patient{i}/study1/view1_frontal.jpg", report(i)
        about = {"path_to_image": path, "frontal_lateral": "Frontal", "ap_pa": "PA", "deid_patient_id": f"patient{i}"}
        about |= {"patient_report_date_order": 1, "age": "61.0", "sex": "Female"}
        rows.append(about | {"section_findings": findings, "section_impression": impression})
    noise(root, {"df_chexpert_plus_240401.csv": rows}, [row["path_to_image"] for row in rows], 500)


def isic_2019(root: Path, patients: int) -> None:
    """Photographs, what they show, and whose they are."""
    kinds, truth, people = ("MEL", "NV", "BCC", "AK", "BKL", "DF"), [], []
    for i in range(patients):
        truth.append({"image": f"ISIC_{i}", **{kind: f"{float(kind == kinds[i % 6])}" for kind in kinds}})
        people.append({"image": f"ISIC_{i}", "age_approx": "55", "lesion_id": f"L{i}", "sex": "female"})
    tables = {"ISIC_2019_Training_GroundTruth.csv": truth, "ISIC_2019_Training_Metadata.csv": people}
    noise(root, tables, [f"ISIC_{i}.jpg" for i in range(patients)], 2000)


def nih_and_vindr(place: Path, patients: int) -> None:
    """One film of each patient, with the names that each collection gives findings."""
    kinds = ("No Finding", "Effusion", "Pneumothorax", "Consolidation", "Cardiomegaly", "Mass", "Atelectasis")
    theirs = ("No finding", "Pleural effusion", "Pneumothorax", "Consolidation", "Cardiomegaly", "Nodule/Mass")
    theirs += kinds[6:]
    entries, readings = [], []
    for i in range(patients):
        about = {"Image Index": f"{i}_000.png", "Finding Labels": kinds[i % 7]}
        entries.append(about | {"Follow-up #": 0, "Patient ID": i, "Patient Age": "057Y", "Patient Gender": "M"})
        for reader in ("R1", "R2", "R3"):
            seen = {kind: int(kind == theirs[i % 7]) for kind in theirs}
            readings.append({"image_id": f"v{i}", "rad_id": reader, **seen})
    films = [f"images_001/images/{entry['Image Index']}" for entry in entries]
    noise(place / "nih", {"Data_Entry_2017.csv": entries}, films, 3000)
    films = [f"train/v{i}.png" for i in range(patients)]
    noise(place / "vindr", {"annotations/image_labels_train.csv": readings}, films, 4000)


def oct_2017(root: Path, patients: int) -> None:
    """A picture of each patient, whose label and number its name tells."""
    kinds = [("NORMAL", "CNV", "DME", "DRUSEN")[i % 4] for i in range(patients)]
    noise(root, {}, [f"train/{kind}/{kind}-{1000 + i}-1.jpeg" for i, kind in enumerate(kinds)], 5000)


def tiny_models(place: Path) -> dict[str, str]:
    """Folders of a CvT, a ResNet and a ViT of timm, a GPT-2 without cross-attention and a Llama, by name."""
    write_cvt(place / "cvt")
    write_gpt2(place / "gpt2", " ".join(" ".join(report(i)) for i in range(6)))
    write_llama(place / "llama")
    for name, sizes in (("test_resnet", {}), ("test_vit", {"img_size": 32})):
        write_timm(place / name, name, **sizes)
    return {name: str(place / name) for name in ("cvt", "test_resnet", "test_vit", "gpt2", "llama")}
