"""CT-RATE's public reports, each beside a volume of noise, in the layout of the collection (folder ct-rate)."""

import csv
import sys
from pathlib import Path

import nibabel
import numpy as np

reports, texts, about, root = {}, [], [], Path("ct-rate/dataset")
with Path(sys.argv[1]).open(encoding="utf-8") as file:
    for row in csv.DictReader(file):
        reports.setdefault(row["report_text"], row["AccessionNo"])  # of equal reports the first
for i, (text, patient) in enumerate(reports.items()):
    findings, _, impression = text.partition('"')  # each sentence of the impression begins with a quotation mark
    name = f"{patient}_a_1.nii.gz"
    volume = root / "train_fixed" / patient / f"{patient}_a" / name
    volume.parent.mkdir(parents=True)
    noise = np.random.default_rng(i).normal(-600, 200, (32, 32, 24)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(noise, np.diag([10.0, 10.0, 10.0, 1.0])), volume)
    texts.append({"VolumeName": name, "Findings_EN": findings, "Impressions_EN": impression.replace('"', " ")})
    about.append({"VolumeName": name, "PatientAge": "", "PatientSex": "", "StudyDate": "20200101"})
for name, rows in (("radiology_text_reports/train_reports", texts), ("metadata/train_metadata", about)):
    (root / name).parent.mkdir(parents=True)
    with (root / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
