"""Identifiers left behind in reports: names, dates, telephone numbers, record numbers, e-mail addresses.

A warning for the people who prepare the data, never a proof that a report is free of them: names without a title are
not found. Rules rather than a model make each hit explainable; few false alarms keep the warning worth reading.
Placeholders of de-identified collections (``___``, ``XXXX``, ``[**...**]``) are not hits.
"""

import re

Span = tuple[int, int]

_MONTH = (
    "january|february|march|april|may|june|july|august|september|october|november|december|"
    "jan|feb|mar|apr|jun|jul|aug|sept|sep|oct|nov|dec"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_MON = r"(?:0?[1-9]|1[0-2])"
_YEAR = r"(?:1[89]|2[01])\d\d"
_WORD = r"[A-ZÀ-ÖØ-Þ][\w'’-]*[^\W\d_]"
_PARTICLES = r"(?:(?:van|von|der|den|de|del|della|di|da|dos|la|le|el|al|bin|ibn|ter|zu)\s+)*"
_TITLE = r"\b(?:(?:Drs?|Doctor|Prof|Professor|Mr|Mrs|Ms|Miss|Mister)\b\.?|(?:DR|MR|MRS|MS|PROF)\.)\s+"
_PHONES = "tel(?:ephone)?|phone|pager|fax|beeper"
_NUMBERS = "mrn|medical record|patient id|patient no|accession|protocol no|case no|file no|ssn|nhs|social security"
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("email", r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    # a title and a capitalised word; in capitals it needs the point: MR angiography, MS plaques and DR are no people
    ("name", rf"{_TITLE}(?!X{{2,}}\b)(?:[A-Z]\.\s*)*{_PARTICLES}{_WORD}(?:\s+(?:[A-Z]\.\s*)?{_PARTICLES}{_WORD})?"),
    ("name", rf"(?i:\bpatient(?:'s)? name\s*:\s*)(?!X{{2,}}\b){_WORD}(?:[ ,]+{_WORD})*"),
    ("name", rf"(?i:\b(?:dictated|signed|reported|interpreted|approved) by\s*:?\s*)(?!X{{2,}}\b){_WORD}\s+{_WORD}"),
    # calendar days: the same separator twice, a plausible day and month
    ("date", rf"(?<![\d./-]){_YEAR}([-/.]){_MON}\1{_DAY}(?![\d])"),
    ("date", rf"(?<![\d./-])(?:{_DAY}([-/.]){_MON}|{_MON}([-/.]){_DAY})(?:\1|\2){_YEAR}(?!\d)"),
    ("date", rf"(?<![\d./-])(?:{_DAY}/{_MON}|{_MON}/{_DAY})/\d\d(?![\d/])"),
    ("date", rf"\b(?i:{_MONTH})\.?\s+{_DAY}(?:st|nd|rd|th)?,?\s+{_YEAR}\b"),
    ("date", rf"\b{_DAY}(?:st|nd|rd|th)?(?:\s+of)?\s+(?i:{_MONTH})\.?,?\s+{_YEAR}\b"),
    ("date", rf"\b(?i:{_MONTH})\.?,?\s+(?:of\s+)?{_YEAR}\b"),
    ("phone", r"(?<![\w+])\+\d{1,3}[ .()-]*(?:\d[ .()-]*){7,12}(?!\d)"),
    ("phone", r"(?<![\w.])(?:\(\d{3}\)\s*|\d{3}[-.])\d{3}[-.]\d{4}(?![\w-])"),
    ("phone", rf"(?i:\b(?:{_PHONES})\b[ .:#]*(?:(?:no|number)\b[ .:]*)?)\(?\+?\d[\d ()./-]{{3,}}\d"),
    ("id", rf"(?i:\b(?:{_NUMBERS})\b(?:\s*(?:number|no|id|#))?[ .:#]*)(?=[\w-]*\d)[A-Za-z0-9][\w-]{{3,}}"),
)
_RULES = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)


def find_identifiers(text: str) -> list[tuple[str, Span]]:
    """Passages that look like identifiers, in order and without overlap: (kind, (start, end)).

    >>> find_identifiers("Discussed with Dr. Smith on 03/14/2019. Nodule 3 mm.")
    [('name', (15, 24)), ('date', (28, 38))]
    """
    taken: list[tuple[str, Span]] = []
    for kind, rule in _RULES:
        for hit in rule.finditer(text):
            if not any(hit.start() < end and start < hit.end() for _, (start, end) in taken):
                taken.append((kind, hit.span()))
    return sorted(taken, key=lambda item: item[1])
