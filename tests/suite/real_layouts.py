"""Made-up collections in the real ones' layouts, and tiny models in folders as the published ones are."""

from pathlib import Path

import numpy as np
from kits import write_noise
from tables import write_table

WORDS = ("pleural effusion", "pneumothorax", "consolidation", "cardiomegaly", "lung mass", "atelectasis")


def report(i: int) -> str:
    """Reports of as many kinds as there are words, with both sections; the findings of every tenth are short."""
    word, more = WORDS[i % len(WORDS)], "" if i % 10 == 9 else " No rib is broken, and the mediastinum is not widened."
    return f"There is {word} on the left, of {i} mm. The heart is normal.{more}", f"{word.capitalize()}, unchanged."


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
    (root / "dataset" / "metadata" / "no_chest_train.txt").touch()


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


def isic_2019(root: Path, patients: int) -> None:
    """Photographs, what they show, and whose they are."""
    kinds, truth, people = ("MEL", "NV", "BCC", "AK", "BKL", "DF"), [], []
    root.mkdir()
    for i in range(patients):
        write_noise(root / f"ISIC_{i}.jpg", 2000 + i)
        truth.append({"image": f"ISIC_{i}", **{kind: f"{float(kind == kinds[i % 6])}" for kind in kinds}})
        people.append({"image": f"ISIC_{i}", "age_approx": "55", "lesion_id": f"L{i}", "sex": "female"})
    write_table(root / "ISIC_2019_Training_GroundTruth.csv", truth)
    write_table(root / "ISIC_2019_Training_Metadata.csv", people)


def nih_and_vindr(place: Path, patients: int) -> None:
    """One film of each patient, with the names that each collection gives findings."""
    kinds = ("No Finding", "Effusion", "Pneumothorax", "Consolidation", "Cardiomegaly", "Mass", "Atelectasis")
    theirs = ("No finding", "Pleural effusion", "Pneumothorax", "Consolidation", "Cardiomegaly", "Nodule/Mass")
    theirs += kinds[6:]
    entries, readings = [], []
    for folder in ("nih/images_001/images", "vindr/train"):
        (place / folder).mkdir(parents=True)
    for i in range(patients):
        write_noise(place / "nih/images_001/images" / f"{i}_000.png", 3000 + i)
        write_noise(place / "vindr/train" / f"v{i}.png", 4000 + i)
        about = {"Image Index": f"{i}_000.png", "Finding Labels": kinds[i % 7]}
        entries.append(about | {"Follow-up #": 0, "Patient ID": i, "Patient Age": "057Y", "Patient Gender": "M"})
        for reader in ("R1", "R2", "R3"):
            seen = {kind: int(kind == theirs[i % 7]) for kind in theirs}
            readings.append({"image_id": f"v{i}", "rad_id": reader, **seen})
    write_table(place / "nih" / "Data_Entry_2017.csv", entries)
    write_table(place / "vindr" / "annotations" / "image_labels_train.csv", readings)


def oct_2017(root: Path, patients: int) -> None:
    """A picture of each patient, whose label and number its name tells."""
    for i in range(patients):
        kind = ("NORMAL", "CNV", "DME", "DRUSEN")[i % 4]
        (root / "train" / kind).mkdir(parents=True, exist_ok=True)
        write_noise(root / "train" / kind / f"{kind}-{1000 + i}-1.jpeg", 5000 + i)


def tiny_models(place: Path) -> dict[str, str]:
    """Folders of a CvT, a ResNet and a ViT of timm, a GPT-2 without cross-attention and a Llama, by name."""
    import json

    import timm
    import torch
    from safetensors.torch import save_file
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
    for name in ("test_resnet", "test_vit"):
        model = timm.create_model(name, num_classes=0, **({"img_size": 32} if name == "test_vit" else {}))
        (place / name).mkdir()
        published = {**model.pretrained_cfg, "num_classes": 0, "input_size": [3, 32, 32]}
        about = {"architecture": name, "num_classes": 0, "pretrained_cfg": published}
        (place / name / "config.json").write_text(json.dumps(about))
        save_file(model.state_dict(), place / name / "model.safetensors")
    return {name: str(place / name) for name in ("cvt", "test_resnet", "test_vit", "gpt2", "llama")}
