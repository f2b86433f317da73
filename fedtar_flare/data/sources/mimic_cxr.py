"""MIMIC-CXR-JPG: chest radiographs of the Beth Israel Deaconess Medical Center, dated, with free-text reports.

PhysioNet's layout: ``files/p10/p10000032/s50414267/<dicom_id>.jpg`` and ``mimic-cxr-2.0.0-metadata.csv[.gz]`` in
``path``; MIMIC-CXR's reports in a folder of their own: ``files/p10/p10000032/s50414267.txt``. De-identification shifts
dates per patient (into 2100 to 2200) but keeps their order and distances.

Each study is one visit. Its image is a frontal radiograph: PA before AP, then the earliest, the largest, the first by
name; the study's first lateral one by name goes with it. With ``views: all`` each radiograph is a visit.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, collecting, within
from fedtar_flare.data.cells import Split
from fedtar_flare.data.cohort import Sex, Visit
from fedtar_flare.data.sources.fields import age_of, checked_age, clock_of, moment_of, sex_of
from fedtar_flare.data.sources.reading import Reading, read_report
from fedtar_flare.data.sources.tables import Row, find_table, label_table, option_path, rows_of

OPTIONS = ("reports", "patients", "split", "labels", "views")
COLUMNS = ("dicom_id", "subject_id", "study_id", "ViewPosition", "StudyDate", "StudyTime")
FRONTAL, LATERAL = ("PA", "AP"), ("LATERAL", "LL")
SPLITS: dict[str, Split] = {"train": "train", "validate": "validation", "test": "test"}
Person = tuple[float | None, int, Sex | None]  # age in the anchor year, the anchor year, sex


def read_mimic_cxr(path: Path, options: Mapping[str, Any] = {}) -> Reading:
    """Read MIMIC-CXR-JPG with the reports of MIMIC-CXR."""
    reading = Reading.of(path, options, "mimic_cxr", OPTIONS, ("findings", "impression"))
    reports = option_path(path, options, "reports") or path
    if not reports.is_dir():
        raise ConfigError(f"source 'mimic_cxr': the folder of reports {reports} is not there")
    reports = reports / "files" if (reports / "files").is_dir() else reports
    people: dict[str, Person] = {}
    of_people = option_path(path, options, "patients")
    for row in rows_of(of_people, ("subject_id", "gender", "anchor_age", "anchor_year")) if of_people else ():
        try:
            people[row["subject_id"]] = (age_of(row["anchor_age"]), int(row["anchor_year"]), sex_of(row["gender"]))
        except (DataError, ValueError) as error:
            raise ConfigError(f"{of_people}: subject {row['subject_id']}: {error}") from error
    split = options.get("split")
    official = None if split is None else _official(path, split)
    labels = label_table(option_path(path, options, "labels"), ("subject_id", "study_id"))
    metadata = find_table(path, ("mimic-cxr-*-metadata.csv", "mimic-cxr-*-metadata.csv.gz"), "the table of images")
    studies: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows_of(metadata, COLUMNS, ("Rows", "Columns")):
        if official is None or split == "official" or row["dicom_id"] in official:
            studies[row["subject_id"], row["study_id"]].append(row)
    for (subject, study), rows in studies.items():
        frontal = [row for row in rows if row["ViewPosition"].upper() in FRONTAL]
        laterals = [row["dicom_id"] for row in rows if row["ViewPosition"].upper() in LATERAL]
        for image_row in rows if reading.views == "all" else [min(frontal, key=_preference, default=None)]:
            with collecting(reading.problems):
                visit, sex = _study(path, reports, subject, study, image_row, people.get(subject))
                if reading.views == "frontal" and laterals:
                    visit = replace(visit, lateral=visit.image.with_stem(min(laterals)))
                sure, unsure = labels.get((subject, study), (None, frozenset[str]()))
                reading.add(replace(visit, labels=sure, uncertain=unsure), sex)
                if split == "official" and official and visit.image.stem in official:
                    reading.stated[subject].add(official[visit.image.stem])
    return reading


def _study(
    path: Path, reports: Path, subject: str, study: str, image_row: Row | None, person: Person | None
) -> tuple[Visit, Sex | None]:
    where = f"p{subject}, study s{study}"
    if image_row is None:
        raise DataError(f"{where}: no frontal radiograph (PA or AP)", reason="not-frontal-radiograph")
    with within(where):
        acquired = moment_of(image_row["StudyDate"], image_row["StudyTime"])
    folder = Path(f"p{subject[:2]}") / f"p{subject}"
    image = path / "files" / folder / f"s{study}" / f"{image_row['dicom_id']}.jpg"
    age, sex = None, None
    if person is not None:
        at_anchor, anchor_year, sex = person
        age = None if at_anchor is None else checked_age(at_anchor + acquired.year - anchor_year)
    text = read_report(reports / folder / f"s{study}.txt", where)
    return Visit(subject, f"s{study}", acquired, image, text.strip(), "radiograph", age), sex


def _preference(image_row: Row) -> tuple[int, str, str, int, str]:
    size = image_row["Rows"], image_row["Columns"]
    pixels = int(size[0]) * int(size[1]) if all(text.isdecimal() for text in size) else 0
    view = FRONTAL.index(image_row["ViewPosition"].upper())
    return view, image_row["StudyDate"], clock_of(image_row["StudyTime"]), -pixels, image_row["dicom_id"]


def _official(path: Path, split: Any) -> dict[str, Split]:
    """The official split of each image in those asked for: ``official`` (all), one or several."""
    names = [*SPLITS] if split == "official" else [split] if isinstance(split, str) else split
    if not isinstance(names, list | tuple) or not names or any(name not in [*SPLITS] for name in names):
        text = f"split must be 'official', or one or a list of {', '.join(SPLITS)}, not {split!r}"
        raise ConfigError(f"source 'mimic_cxr': {text}")
    table = find_table(path, ("mimic-cxr-*-split.csv", "mimic-cxr-*-split.csv.gz"), "the table of official splits")
    return {
        row["dicom_id"]: SPLITS[row["split"]] for row in rows_of(table, ("dicom_id", "split")) if row["split"] in names
    }
