"""Dates, ages, sex and reports as people write them in tables. Each is either understood or refused, never guessed."""

import logging
import re
from datetime import UTC, datetime

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cohort import MAX_AGE, Sex

logger = logging.getLogger(__name__)
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")  # of images that are not DICOM
YEAR_DAYS = 365.2425
DAY_ZERO = datetime(2000, 1, 1)  # date of studies without one; also day 0 where a collection only counts days
UNKNOWN = ("", "NAN", "NA", "N/A", "<NA>", "#N/A", "NONE", "NULL", "UNKNOWN", "-", "?")
UNITS = {"Y": 1.0, "M": 1 / 12, "W": 7 / YEAR_DAYS, "D": 1 / YEAR_DAYS}
_TAGS = "a|b|body|br|div|em|font|h[1-6]|head|hr|html|i|img|li|meta|ol|p|pre|script|span|strong|su[bp]|table|t[dhr]|ul?"
MARKUP = {
    "bad-charset": re.compile(r"[\0-\x08\x0e-\x1f]"),  # as in UTF-16 that is read as UTF-8
    "is-rtf": re.compile(r"\{\\rtf"),
    "is-pdf": re.compile(r"%PDF-\d|JVBERi0"),
    "is-xml": re.compile(r"<\?xml\b|\bxmlns(?::\w+)?\s*=|<(?:\w+:)?(?:ClinicalDocument|structuredBody|paragraph)\b"),
    "is-html": re.compile(rf"(?i)</?(?:{_TAGS})(?:\s[^<>]*)?/?>|<!(?:--|doctype)|&(?:nbsp|lt|gt|amp|quot|#x?\w+);"),
}
"""Marks of what is no plain text, by the reason under which it is refused."""
_ENCODED = re.compile(r"[A-Za-z0-9+/]{60,}")
SEXES: dict[str, Sex] = {"F": "F", "FEMALE": "F", "M": "M", "MALE": "M"}


def date_of(text: str) -> datetime:
    """Read a date, with or without a time. 01/02/2020 is refused: it means two days in two countries."""
    text = text.strip()
    if not text:
        raise DataError("no date; a visit cannot be put in order without one", reason="no-date")
    if dicom := re.fullmatch(r"(\d{8})(\d{2})(\d{2})?(\d{2})?(\.\d+)?", text):
        text = f"{dicom[1]}T{dicom[2]}{dicom[3] or '00'}{dicom[4] or '00'}"
    try:
        if not re.fullmatch(r"\d{4}(-?)\d{2}\1\d{2}([T ].+)?", text):  # fromisoformat takes any sign as separator
            raise ValueError(text)
        moment = datetime.fromisoformat(text)
        if moment.tzinfo:
            moment.astimezone(UTC)  # in which the first and the last day may be beyond the calendar
        return moment
    except (ValueError, OverflowError) as error:
        raise DataError(f"'{text}' is no date of the form 2020-01-31 or 2020-01-31 12:30", reason="bad-date") from error


def moment_of(day: str, clock: str) -> datetime:
    """Read a DICOM date and time of two columns that a spreadsheet has turned into numbers."""
    day = day.split(".")[0]
    return date_of(day + clock_of(clock) if day and clock else day)


def clock_of(text: str) -> str:
    """HHMMSS of a time that was stored as a number."""
    return text.split(".")[0].zfill(6)


def age_of(text: str) -> float | None:
    """Read an age."""
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
    """As :func:`age_of`, but None with a warning for ``bad-age``: an unreadable age does not cost a study."""
    try:
        return age_of(text)
    except DataError as error:
        if error.reason != "bad-age":
            raise DataError(f"{where}: {error}", reason=error.reason) from error
        logger.warning("%s: %s; it is taken as unknown", where, error)
        return None


def age_at(born: str, visit: datetime) -> float | None:
    """Compute the age at a visit."""
    if not stated(born):
        return None
    return checked_age((visit.replace(tzinfo=None) - date_of(born).replace(tzinfo=None)).days / YEAR_DAYS)


def checked_age(years: float) -> float:
    """The age itself; DataError ``age-out-of-range`` unless it is within 0 to 130 years."""
    if not 0 <= years <= MAX_AGE:
        raise DataError(f"age {years:g} is not within 0 to {MAX_AGE:g} years", reason="age-out-of-range")
    return years


def sex_of(text: str) -> Sex | None:
    """Read a sex."""
    return SEXES.get(text.strip().upper())


def stated(text: str) -> str:
    """A cell's text; nothing where it is only what programs write for an empty one."""
    return "" if text.strip().upper() in UNKNOWN else text


def markup(text: str) -> str:
    """The reason why a text is no plain text (HTML, RTF, XML such as CDA, PDF, base64, bytes of UTF-16), or nothing."""
    runs = _ENCODED.findall(text)
    if any(re.search(r"[a-z]", run) and re.search(r"[A-Z]", run) and re.search(r"\d", run) for run in runs):
        return "is-pdf" if MARKUP["is-pdf"].search(text) else "is-base64"
    return next((reason for reason, mark in MARKUP.items() if mark.search(text)), "")


def labels_of(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Read the labels of an image.

    >>> labels_of("effusion; ?nodule")
    (frozenset({'effusion'}), frozenset({'nodule'}))
    """
    parts = [part.strip() for part in re.split(r"[;|]", text) if part.strip()]
    unsure = frozenset(part[1:].strip() for part in parts if part.startswith("?"))
    return frozenset(part for part in parts if not part.startswith("?")), unsure


def labels_text(labels: frozenset[str], uncertain: frozenset[str]) -> str:
    """Write labels so that :func:`labels_of` reads them."""
    return ";".join([*sorted(labels), *(f"?{label}" for label in sorted(uncertain))])
