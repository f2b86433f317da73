"""CheXpert Plus (Stanford AIMI): chest radiographs with reports in sections, whose studies have numbers, not dates.

``df_chexpert_plus_240401.csv`` in ``path`` has a row for each image; a study is patient and study folder of
``path_to_image`` (``train/patient1/study2/view1_frontal.jpg``), since its accession numbers are no key. Its image is a
frontal radiograph: PA before AP, then the first by name; with ``views: all`` each of its radiographs is a visit. Images
are in ``path``, or the option ``images``, under that name or with the suffix ``.png`` or ``.dcm``.

The table numbers a patient's reports (``patient_report_date_order``) and has no dates. Whether the numbers follow the
dates is in doubt, so they must be asked for: ``undated: order`` takes them as days after 2000-01-01.
"""

from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, collecting
from fedtar_flare.data.cohort import Visit
from fedtar_flare.data.report_text import with_headings
from fedtar_flare.data.sources.fields import DAY_ZERO, known_age, sex_of
from fedtar_flare.data.sources.reading import Reading
from fedtar_flare.data.sources.tables import Row, find_table, option_path, rows_of

OPTIONS = ("undated", "images", "views")
COLUMNS = ("path_to_image", "frontal_lateral", "ap_pa", "deid_patient_id", "patient_report_date_order", "age", "sex")
SECTIONS = {
    "indication": "section_clinical_history",
    "history": "section_history",
    "comparison": "section_comparison",
    "technique": "section_technique",
    "findings": "section_findings",
    "impression": "section_impression",
}
VIEWS = ("PA", "AP")


def read_chexpert_plus(path: Path, options: Mapping[str, Any] = {}) -> Reading:
    """Read CheXpert Plus from the folder of its table."""
    reading = Reading.of(path, options, "chexpert_plus", OPTIONS, ("findings", "impression"))
    if options.get("undated") != "order":
        text = "write 'undated: order' under 'options' to take studies in the order of their numbers"
        raise ConfigError(f"source 'chexpert_plus' has no dates; {text}, which may not be that of time")
    table = find_table(path, ("df_chexpert_plus_*.csv", "df_chexpert_plus_*.csv.gz"), "the table of images")
    images = option_path(path, options, "images") or path
    studies: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows_of(table, COLUMNS, [*SECTIONS.values()]):
        studies[row["deid_patient_id"], PurePosixPath(row["path_to_image"]).parent.name].append(row)
    for (patient, study), rows in studies.items():
        frontal = [row for row in rows if row["frontal_lateral"] == "Frontal" and row["ap_pa"].upper() in VIEWS]
        for image_row in rows if reading.views == "all" else [min(frontal, key=_preference, default=None)]:
            with collecting(reading.problems):
                if image_row is None:
                    text = f"{patient}, {study}: no frontal radiograph (PA or AP)"
                    raise DataError(text, reason="not-frontal-radiograph")
                reading.add(_visit(patient, study, image_row, images), sex_of(image_row["sex"]))
    return reading


def _preference(row: Row) -> tuple[int, str]:
    return VIEWS.index(row["ap_pa"].upper()), row["path_to_image"]


def _visit(patient: str, study: str, row: Row, images: Path) -> Visit:
    where = f"{patient}, {study}"
    report = with_headings([(section, row[column]) for section, column in SECTIONS.items()])
    number = row["patient_report_date_order"].removesuffix(".0")
    if not number.isdecimal():
        raise DataError(f"{where}: '{number}' is no number of a report", reason="no-date")
    stated = images / row["path_to_image"]
    image = next(
        (file for end in ("", ".png", ".dcm") if (file := stated.with_suffix(end or stated.suffix)).exists()), stated
    )
    acquired = DAY_ZERO + timedelta(days=int(number))
    return Visit(patient, f"{patient}-{study}", acquired, image, report, "radiograph", known_age(row["age"], where))
