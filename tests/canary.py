"""Marks in everything that identifies a patient, and the search for them."""

import zipfile

import numpy as np
from make_dicom import write_radiograph
from tables import write_table

MARK = "canaryqzx"
DATE = "1987-06"
MARKS = (MARK, DATE, "19870613")


def plant(folder):
    """A table, in a folder, of 14 patients of two radiographs each, with marks in all that identifies; its place.

    One row's image is missing, one has no report, and one stands there twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(28):
        tags = {"PatientName": f"{MARK}Name^{number}", "PatientID": f"{MARK}Tag{number}", "StudyDate": "19870613"}
        pixels = np.random.default_rng(number).integers(0, 4096, (64, 64))
        write_radiograph(folder / f"{MARK}{number}.dcm", pixels, InstitutionName=f"{MARK}Institution", **tags)
        row = {"patient_id": f"{MARK}id{number // 2}", "study_datetime": f"{DATE}-{1 + number:02d}T08:00:00"}
        text = f"No finding. {MARK}word{number}."
        rows.append(row | {"image": f"{MARK}{number}.dcm", "report": text, "age": 30 + number, "sex": "F"})
    rows.append({**rows[0], "patient_id": f"{MARK}broken", "image": f"{MARK}missing.dcm"})
    rows.append({**rows[2], "patient_id": f"{MARK}none", "report": " ", "sex": "unknown"})
    return write_table(folder / f"{MARK}table.csv", [*rows, rows[0]])


def marks_in(folder):
    """Files below ``folder`` whose bytes or whose name hold a mark; archives are looked into."""
    marks = [*(mark.encode() for mark in MARKS), MARK.encode("utf-16-le")]
    marked = []
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        if MARK in str(path.relative_to(folder)) or any(mark in data for mark in marks for data in contents):
            marked.append(str(path.relative_to(folder)))
    return marked
