"""Dates, ages and sex as people write them in tables. Each is either understood or refused, never guessed."""

from __future__ import annotations

import logging
import re
from datetime import datetime

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cohort import MAX_AGE, Sex

logger = logging.getLogger(__name__)
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
"""Suffixes of radiographs that are not DICOM."""
YEAR_DAYS = 365.2425
DAY_ZERO = datetime(2000, 1, 1)
"""Stands where a collection has no dates, or counts days from a moment of its own."""
UNKNOWN = ("", "NAN", "NA", "N/A", "NONE", "NULL", "UNKNOWN", "-", "?")
UNITS = {"Y": 1.0, "M": 1 / 12, "W": 7 / YEAR_DAYS, "D": 1 / YEAR_DAYS}
SEXES: dict[str, Sex] = {"F": "F", "FEMALE": "F", "M": "M", "MALE": "M"}


def date_of(text: str) -> datetime:
    """ISO 8601 (``2020-01-31``, ``2020-01-31 12:30``, zone allowed) or DICOM (``20200131``, ``20200131123000``).

    Raises :class:`DataError` ``no-date`` when empty, else ``bad-date``: 01/02/2020 means two days in two countries.
    """
    text = text.strip()
    if not text:
        raise DataError("no date; a visit cannot be put in order without one", reason="no-date")
    if dicom := re.fullmatch(r"(\d{8})(\d{2})(\d{2})?(\d{2})?(\.\d+)?", text):
        text = f"{dicom[1]}T{dicom[2]}{dicom[3] or '00'}{dicom[4] or '00'}"
    try:
        if not re.fullmatch(r"\d{4}(-?)\d{2}\1\d{2}([T ].+)?", text):  # fromisoformat takes any sign as separator
            raise ValueError(text)
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise DataError(f"'{text}' is no date of the form 2020-01-31 or 2020-01-31 12:30", reason="bad-date") from error


def moment_of(day: str, clock: str) -> datetime:
    """:func:`date_of` two columns that a spreadsheet made numbers: 20200131.0, and 85320.515 for 08:53:20, or empty."""
    day = day.split(".")[0]
    return date_of(day + clock_of(clock) if day and clock else day)


def clock_of(text: str) -> str:
    """HHMMSS of a time as a number."""
    return text.split(".")[0].zfill(6)


def age_of(text: str) -> float | None:
    """Years as a number (``54``, ``54.5``), with a unit (``45 years``, ``054Y``, ``018M``) or with a bound (``90+`` and
    ``>89`` count as 90 and 89); None when empty, ``nan``, ``N/A`` or ``000Y``: nobody entered it.

    Raises :class:`DataError` ``bad-age`` or ``age-out-of-range``; see :func:`known_age`.
    """
    text = text.strip().upper()
    if text in UNKNOWN:
        return None
    parts = re.fullmatch(r"(?:>=? ?)?(\d+(?:\.\d+)?) ?(?:\+|(Y|M|W|D)(?:EARS?|RS?|ONTHS?|EEKS?|AYS?)?)?", text)
    if not parts:
        raise DataError(f"'{text}' is no age in years", reason="bad-age")
    if parts[2] and float(parts[1]) == 0:
        return None
    return checked_age(float(parts[1]) * UNITS[parts[2] or "Y"])


def known_age(text: str, where: str) -> float | None:
    """:func:`age_of`, and None with a warning for ``bad-age``: words that nobody understands do not cost a study."""
    try:
        return age_of(text)
    except DataError as error:
        if error.reason != "bad-age":
            raise DataError(f"{where}: {error}", reason=error.reason) from error
        logger.warning("%s: %s; it is taken as unknown", where, error)
        return None


def age_at(born: str, visit: datetime) -> float | None:
    """Years from a birth date to a visit; None without one. Raises as :func:`date_of` and :func:`checked_age`."""
    if not born.strip():
        return None
    return checked_age((visit.replace(tzinfo=None) - date_of(born).replace(tzinfo=None)).days / YEAR_DAYS)


def checked_age(years: float) -> float:
    """The same age; raises :class:`DataError` ``age-out-of-range`` unless within 0 to 130."""
    if not 0 <= years <= MAX_AGE:
        raise DataError(f"age {years:g} is not within 0 to {MAX_AGE:g} years", reason="age-out-of-range")
    return years


def sex_of(text: str) -> Sex | None:
    """``F``, ``female``, ``M``, ``male`` in any case; anything else is None: unknown or other."""
    return SEXES.get(text.strip().upper())


def labels_of(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Labels of an image, and those of which nobody is sure, marked by ``?``; separated by ``;`` or ``|``.

    >>> labels_of("effusion; ?nodule")
    (frozenset({'effusion'}), frozenset({'nodule'}))
    """
    parts = [part.strip() for part in re.split(r"[;|]", text) if part.strip()]
    unsure = frozenset(part[1:].strip() for part in parts if part.startswith("?"))
    return frozenset(part for part in parts if not part.startswith("?")), unsure


def labels_text(labels: frozenset[str], uncertain: frozenset[str]) -> str:
    """What :func:`labels_of` reads."""
    return ";".join([*sorted(labels), *(f"?{label}" for label in sorted(uncertain))])
