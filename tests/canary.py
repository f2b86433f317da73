"""Marks in everything that identifies a patient, and the search for them."""

import csv
import shutil
import zipfile

from pydicom import dcmread
from tables import write_table

from fedtar_flare.data.cells import Timeline
from fedtar_flare.synthetic.sites import write_sites

MARK = "canaryqzx"
DATE = "1987-06"


def plant(folder, names):
    """Sites of these names whose data, in an empty folder, carry marks in all that identifies; folder of site files."""
    sites = folder / "sites"
    sites.mkdir(parents=True)
    for written in write_sites(folder / "made", list(names), patients=10, timeline=Timeline(2), seed=3):
        home = folder / f"{MARK}folder{written.site[-1]}"
        home.mkdir()
        rows = list(csv.DictReader(written.manifest.open(encoding="utf-8")))
        patients = {}
        for number, row in enumerate(rows):
            source = written.manifest.parent / row["image"]
            target = home / f"{MARK}series{number}"
            shutil.copytree(source, target)
            for file in target.rglob("*.dcm"):
                dataset = dcmread(file)
                dataset.PatientName = f"{MARK}Name^{number}"
                dataset.PatientID = f"{MARK}Tag{number}"
                dataset.InstitutionName = f"{MARK}Institution"
                dataset.StudyDate = "19870613"
                dataset.save_as(file)
                file.rename(file.with_name(f"{MARK}{file.name}"))
            patients.setdefault(row["patient_id"], f"{MARK}id{len(patients)}")
            row["patient_id"] = patients[row["patient_id"]]
            row["study_datetime"] = f"{DATE}-{1 + number % 28:02d}T{number % 24:02d}:00:00"
            row["image"] = target.name
            report = row.get("report") or (written.manifest.parent / row["report_path"]).read_text(encoding="utf-8")
            row["report"] = f"{report} {MARK}word{number}."
        rows.append({**rows[0], "patient_id": f"{MARK}broken", "image": f"{MARK}missing"})  # is left out, and counted
        columns = ["patient_id", "study_datetime", "image", "report", "age", "sex"]
        write_table(home / f"{MARK}table.csv", rows, columns)
        (sites / f"{written.site}.yaml").write_text(
            f"source: manifest\npath: {home / f'{MARK}table.csv'}\nstate_dir: {folder / written.site}\n"
            "policy: {min_patients: 1, min_local_steps: 1}\n...\n"  # few patients, quick jobs
        )
    return sites


def marks_in(folder):
    """Files below ``folder`` whose bytes or whose name hold a mark; archives are looked into."""
    marks = [MARK.encode(), MARK.encode("utf-16-le"), DATE.encode(), b"19870613"]
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
