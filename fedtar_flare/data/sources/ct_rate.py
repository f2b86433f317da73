"""CT-RATE: non-contrast chest CT volumes of Istanbul Medipol University with reports (Hamamci et al.).

Layout of its repository, under ``path`` or ``path/dataset``: ``train_fixed/train_1/train_1_a/train_1_a_1.nii.gz``
(volumes in ``train`` are stored without slope and intercept: no Hounsfield units),
``radiology_text_reports/train_reports.csv`` and ``metadata/train_metadata.csv``; the same for ``valid`` (tables named
``validation_...``).

A name gives patient (1), scan (a) and reconstruction (1). Each scan is one visit; its volume is the reconstruction on
disk with most slices by ``NumberofSlices``, then the lowest number. ``StudyDate`` (and ``StudyTime`` if present) orders
scans; a scan without a date is left out, since its letter is no date. So are volumes of ``no_chest_train.txt`` beside
the table of metadata (heads, mostly): without that list they would be taken for chests, and so it must be there.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, collecting, within
from fedtar_flare.core.files import read_lines
from fedtar_flare.data.cohort import Sex, Visit
from fedtar_flare.data.report_text import with_headings
from fedtar_flare.data.sources.fields import known_age, moment_of, sex_of
from fedtar_flare.data.sources.reading import Reading
from fedtar_flare.data.sources.tables import Row, find_table, image_folder, label_table, option_path, rows_of

OPTIONS = ("part", "images", "reports", "metadata", "labels")
PARTS = {"train": "train", "valid": "validation"}
OPTIONAL_SECTIONS = {"history": "ClinicalInformation_EN", "technique": "Technique_EN"}
NEEDED_SECTIONS = {"findings": "Findings_EN", "impression": "Impressions_EN"}
METADATA_COLUMNS = ("VolumeName", "PatientAge", "PatientSex", "StudyDate")
NAME = re.compile(r"((?:train|valid)_\d+)_([A-Za-z]+)_(\d+)\.nii\.gz")


def read_ct_rate(path: Path, options: Mapping[str, Any] = {}) -> Reading:
    """Read one part of CT-RATE from its folder, or from the ``dataset`` folder in it."""
    reading = Reading.of(path, options, "ct_rate", OPTIONS, ("findings", "impression"))
    part = options.get("part", "train")
    if part not in PARTS:
        raise ConfigError(f"source 'ct_rate': part '{part}' is not one of {', '.join(PARTS)}")
    root = path / "dataset" if (path / "dataset").is_dir() else path
    what = f"source 'ct_rate': no folder of volumes in Hounsfield units; those of '{part}' lack slope and intercept"
    images = image_folder(path, options, [root / f"{part}_fixed"], what)
    tables = {}
    for what, folder in (("reports", "radiology_text_reports"), ("metadata", "metadata")):
        table = f"{PARTS[part]}_{what}.csv"
        tables[what] = option_path(path, options, what) or find_table(
            root, (f"{folder}/{table}", table), f"the table of {what}"
        )
    what = "the list of volumes that show no chest"
    listed = find_table(tables["metadata"].parent, (f"no_chest_{part}.txt",), what)
    no_chest = {line.strip().rpartition("/")[2] for line in read_lines(listed, what)}
    columns = ["VolumeName", *NEEDED_SECTIONS.values()]
    texts = {row["VolumeName"]: row for row in rows_of(tables["reports"], columns, [*OPTIONAL_SECTIONS.values()])}
    more = ("StudyTime", "NumberofSlices")
    details = {row["VolumeName"]: row for row in rows_of(tables["metadata"], METADATA_COLUMNS, more)}
    labels = label_table(option_path(path, options, "labels"), ("VolumeName",))
    scans: dict[tuple[str, str], list[str]] = {}
    for volume in sorted({*texts, *details}):
        with collecting(reading.problems):
            name = NAME.fullmatch(volume)
            if not name:
                raise DataError(f"{path}: '{volume}' is not named like train_1_a_1.nii.gz", reason="bad-name")
            if volume in no_chest:
                raise DataError(f"{path}: '{volume}' is no chest, says the collection", reason="no-chest")
            scans.setdefault((name[1], name[2]), []).append(volume)
    for (patient, scan), volumes in scans.items():
        with collecting(reading.problems):
            visit, sex = _scan(images, patient, scan, volumes, texts, details)
            sure, unsure = next((labels[v,] for v in volumes if (v,) in labels), (None, frozenset[str]()))
            reading.add(replace(visit, labels=sure, uncertain=unsure), sex)
    return reading


def _scan(
    images: Path, patient: str, scan: str, volumes: list[str], texts: Mapping[str, Row], details: Mapping[str, Row]
) -> tuple[Visit, Sex | None]:
    where = f"{patient}_{scan}"
    folder = images / patient / where
    present = [volume for volume in volumes if (folder / volume).is_file()]
    number = {v: int(v.removesuffix(".nii.gz").rpartition("_")[2]) for v in volumes}
    volume = min(present or volumes, key=lambda v: (-_slices(details.get(v, {})), number[v]))
    # reconstructions of a scan share report and date: a row missing for one is taken from another
    text = next((texts[v] for v in (volume, *volumes) if v in texts), None)
    about = next((details[v] for v in (volume, *volumes) if v in details), None)
    if text is None:
        raise DataError(f"{where}: no row in the table of reports", reason="no-report")
    report = with_headings([(name, text[column]) for name, column in (OPTIONAL_SECTIONS | NEEDED_SECTIONS).items()])
    if about is None:
        raise DataError(f"{where}: no row in the metadata, so no date", reason="no-date")
    with within(where):
        acquired, age = moment_of(about["StudyDate"], about["StudyTime"]), known_age(about["PatientAge"], where)
    return Visit(patient, where, acquired, folder / volume, report, "ct", age), sex_of(about["PatientSex"])


def _slices(row: Row) -> int:
    text = row.get("NumberofSlices", "").split(".")[0]
    return int(text) if text.isdecimal() else 0
