"""The COVID-19 image data collection: public chest radiographs of patients over time, with clinical notes as reports.

Only frontal radiographs with notes count; for methods that classify, also those whose finding is known. ``offset``,
days since the first symptoms (possibly negative), orders a patient's visits but is no calendar date. ``location`` names
the hospital and so divides the collection into natural sites: Spain, Australia and others.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, collecting
from fedtar_flare.data.cohort import Visit
from fedtar_flare.data.sources.fields import DAY_ZERO, known_age, sex_of
from fedtar_flare.data.sources.reading import Reading
from fedtar_flare.data.sources.tables import rows_of

OPTIONS = ("location", "without_notes")
COLUMNS = ("patientid", "offset", "sex", "age", "view", "modality", "location", "folder", "filename", "clinical_notes")
FRONTAL = ("PA", "AP", "AP SUPINE", "APS", "AP ERECT", "AP SEMI ERECT")
NAMED_SITES = ("Spain", "Australia")


def read_covid_chestxray(path: Path, options: Mapping[str, Any] = {}) -> Reading:
    """Read the collection, or one site's part of it, from a folder with ``metadata.csv`` and the images."""
    reading = Reading.of(path, options, "covid_chestxray", OPTIONS)
    without_notes = options.get("without_notes", False)
    if not isinstance(without_notes, bool):
        raise ConfigError(f"source 'covid_chestxray': without_notes must be true or false, not {without_notes!r}")
    rows = list(rows_of(path / "metadata.csv", COLUMNS, ("finding",), strict=False))
    home: dict[str, str] = {}
    for row in rows:  # a patient belongs to one site, even if a later radiograph was taken elsewhere
        named = (name for name in NAMED_SITES if name.lower() in row["location"].lower())
        home.setdefault(row["patientid"], next(named, "others"))
    site = options.get("location")
    if site not in (None, "others", *NAMED_SITES):
        allowed = ", ".join(NAMED_SITES)
        raise ConfigError(f"source 'covid_chestxray': location must be one of {allowed}, others, not {site!r}")
    usable = []
    for row in rows:
        if site not in (None, home[row["patientid"]]):
            continue
        with collecting(reading.problems):
            _check(row, without_notes)
            usable.append(row)
    radiographs = Counter(row["patientid"] for row in usable)
    for row in usable:
        with collecting(reading.problems):
            visit = _visit(row, path, only=radiographs[row["patientid"]] == 1)
            reading.add(visit, sex_of(row["sex"]), home[visit.patient_id])
    return reading


def _check(row: Mapping[str, str], without_notes: bool) -> None:
    name = row["filename"]
    if row["modality"].lower() != "x-ray" or row["view"].upper() not in FRONTAL:
        text = f"{name}: {row['modality']}, view '{row['view']}' is not a frontal radiograph"
        raise DataError(text, reason="not-frontal-radiograph")
    if not row["clinical_notes"] and not (without_notes and _labels(row["finding"]) is not None):
        raise DataError(f"{name}: no clinical notes", reason="empty-report")


def _visit(row: Mapping[str, str], path: Path, only: bool) -> Visit:
    name = row["filename"]
    if not row["offset"] and not only:
        raise DataError(f"{name}: no offset, so it cannot be put in order", reason="no-date")
    try:
        acquired = DAY_ZERO + timedelta(days=float(row["offset"] or 0))
    except (ValueError, OverflowError) as error:
        raise DataError(f"{name}: offset '{row['offset']}' is no number of days", reason="bad-date") from error
    image, labels = path / row["folder"] / name, _labels(row["finding"])
    age, notes = known_age(row["age"], name), row["clinical_notes"]
    return Visit(row["patientid"], name, acquired, image, notes, "radiograph", age, labels=labels)


def _labels(finding: str) -> frozenset[str] | None:
    """The diseases that the table names (``COVID-19, ARDS``), none for ``No Finding``; None where it says nothing."""
    named = frozenset(part.strip() for part in finding.split(",") if part.strip())
    return None if not named or named == {"todo"} else named - {"No Finding"}
