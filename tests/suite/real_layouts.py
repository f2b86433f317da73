"""Made-up collections in the real ones' layouts, and tiny models in folders as the published ones are."""

from pathlib import Path

import numpy as np
from kits import write_noise
from tables import write_table

WORDS = ("effusion", "nodule", "opacity", "edema", "fracture", "atelectasis")


def report(i: int) -> str:
    """Reports of as many kinds as there are words, with both sections."""
    word = WORDS[i % len(WORDS)]
    return f"There is {word} on the left, of {i} mm. The heart is normal.", f"{word.capitalize()}, unchanged."


def ct_rate(root: Path, patients: int) -> None:
    """Two scans of each patient, of 12 slices."""
    import nibabel

    reports, metadata = [], []
    for i in range(patients):
        for j, letter in enumerate("ab"):
            name = f"train_{i}_{letter}_1.nii.gz"
            place = root / "dataset" / "train" / f"train_{i}" / f"train_{i}_{letter}" / name
            place.parent.mkdir(parents=True)
            hu = np.random.default_rng(2 * i + j).normal(-600, 200, (32, 32, 12)).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(hu, np.diag([10.0, 10.0, 20.0, 1.0])), place)
            findings, impression = report(i + j)
            reports.append({"VolumeName": name, "Findings_EN": findings, "Impressions_EN": impression})
            about = {"PatientAge": f"0{40 + i}Y", "PatientSex": "MF"[i % 2], "StudyDate": f"20{20 + j}0131"}
            metadata.append({"VolumeName": name, **about, "NumberofSlices": "12"})
    write_table(root / "dataset" / "radiology_text_reports" / "train_reports.csv", reports)
    write_table(root / "dataset" / "metadata" / "train_metadata.csv", metadata)


def mimic(place: Path, patients: int) -> None:
    """``mimic-cxr-jpg``, ``mimic-cxr`` and ``mimic-iv`` in a folder: a study each, every split in turn."""
    root, images, splits, people = place / "mimic-cxr-jpg", [], [], []
    for i in range(patients):
        subject, study, dicom = str(10_000_000 + i), str(50_000_000 + i), f"d{i}"
        folder = f"files/p{subject[:2]}/p{subject}"
        (root / folder / f"s{study}").mkdir(parents=True)
        write_noise(root / folder / f"s{study}" / f"{dicom}.jpg", i)
        (place / "mimic-cxr" / folder).mkdir(parents=True)
        findings, impression = report(i)
        text = f"FINAL REPORT\n FINDINGS: {findings}\n\n IMPRESSION: {impression}\n"
        (place / "mimic-cxr" / folder / f"s{study}.txt").write_text(text)
        about = {"dicom_id": dicom, "subject_id": subject, "study_id": study}
        more = {"ViewPosition": "PA", "Rows": "64", "Columns": "64", "StudyDate": "21800506", "StudyTime": "213014.531"}
        images.append(about | more)
        splits.append(about | {"split": ("train", "train", "validate", "test")[i // 10 % 4]})
        people.append({"subject_id": subject, "gender": "MF"[i % 2], "anchor_age": 40 + i, "anchor_year": 2180})
    write_table(root / "mimic-cxr-2.0.0-metadata.csv", images)
    write_table(root / "mimic-cxr-2.0.0-split.csv", splits)
    write_table(place / "mimic-iv" / "patients.csv", people)


def iu_xray(root: Path, patients: int) -> None:
    """OpenI's two tables, a frontal film each."""
    reports, films = [], []
    (root / "images" / "images_normalized").mkdir(parents=True)
    for i in range(patients):
        name, (findings, impression) = f"{i}_IM-0001-3001.dcm.png", report(i)
        write_noise(root / "images" / "images_normalized" / name, 900 + i)
        reports.append({"uid": str(i), "findings": findings, "impression": impression})
        films.append({"uid": str(i), "filename": name, "projection": "Frontal"})
    write_table(root / "indiana_reports.csv", reports)
    write_table(root / "indiana_projections.csv", films)


def chexpert_plus(root: Path, patients: int) -> None:
    """One table, a film of each patient."""
    rows = []
    for i in range(patients):
        path, (findings, impression) = f"train/patient{i}/study1/view1_frontal.jpg", report(i)
        (root / path).parent.mkdir(parents=True)
        write_noise(root / path, 500 + i)
        about = {"path_to_image": path, "frontal_lateral": "Frontal", "ap_pa": "PA", "deid_patient_id": f"patient{i}"}
        about |= {"patient_report_date_order": 1, "age": "61.0", "sex": "Female"}
        rows.append(about | {"section_findings": findings, "section_impression": impression})
    write_table(root / "df_chexpert_plus_240401.csv", rows)


def labelled(root: Path, patients: int, labels: tuple[str, ...]) -> None:
    """A manifest of pictures with labels (empty: none), and the classes that a Dirichlet draw spreads."""
    rows, classes = [], []
    root.mkdir()
    for i in range(patients):
        name, label = f"p{i}", labels[i % len(labels)]
        picture = write_noise(root / f"{name}.png", 2000 + i + 1000 * len(labels))
        about = {"patient_id": name, "study_datetime": "2000-01-01", "image": picture.name}
        rows.append(about | {"labels": label, "age": "", "sex": "", "report": ""})
        classes.append({"patient_id": name, "label": label or "none"})
    write_table(root / "manifest.csv", rows)
    write_table(root / "classes.csv", classes)


def tiny_models(place: Path) -> dict[str, str]:
    """Folders of a CvT, a GPT-2 without cross-attention and a Llama, by the preset's setting of each."""
    import torch
    from tiny_llama import write_llama
    from tokenizers import ByteLevelBPETokenizer
    from transformers.models.cvt.configuration_cvt import CvtConfig
    from transformers.models.cvt.modeling_cvt import CvtForImageClassification
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = CvtConfig(embed_dim=[8, 16, 24], num_heads=[1, 1, 2], depth=[1, 2, 3], drop_path_rate=[0.0, 0.0, 0.0])
    CvtForImageClassification(sizes).save_pretrained(place / "cvt")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([" ".join(report(i)) for i in range(6)], 300, special_tokens=["<|endoftext|>"])
    (place / "gpt2").mkdir()
    tokenizer.save(str(place / "gpt2" / "tokenizer.json"))
    sizes = GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(sizes).save_pretrained(place / "gpt2")
    write_llama(place / "llama")
    return {name: str(place / name) for name in ("cvt", "gpt2", "llama")}
