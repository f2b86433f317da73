"""The sections of a report, by their headings, its cleaning before training, and identifiers left behind in it.

A heading is one of the names below followed by a colon: in any case at the start of a line ("Findings:"), or in
capitals anywhere ("... lateral.  FINDINGS: ..."). A text without headings has no sections; nothing is guessed.
"""

import re
from collections.abc import Sequence

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.core.settings import suggestion

HEADINGS: dict[str, tuple[str, ...]] = {
    "examination": ("examination", "exam", "study", "type of examination"),
    "indication": ("indication", "indications", "clinical indication", "reason for exam", "reason for examination"),
    "history": ("history", "clinical history", "clinical information", "patient history"),
    "technique": ("technique", "techniques", "procedure"),
    "comparison": ("comparison", "comparisons", "comparison study", "comparison film", "comparison films"),
    "findings": ("findings", "finding"),
    "impression": ("impression", "impressions", "conclusion", "conclusions"),
    "recommendation": ("recommendation", "recommendations", "recommendation(s)"),
    "notification": ("notification",),
    "addendum": ("addendum", "final addendum"),
}
SECTIONS = tuple(HEADINGS)
_OTHER = ("final report", "wet read", "findings and impression", "findings/impression", "comment", "comments", "date")
"""Headings that end a section without beginning one."""
_NAMES = {heading: section for section, headings in HEADINGS.items() for heading in headings}
_ANY = "|".join(re.escape(name) for name in sorted([*_NAMES, *_OTHER], key=len, reverse=True))
_HEADING = re.compile(
    rf"(?im:^[^\S\n]*(?P<line>{_ANY})[^\S\n]*:)"
    rf"|(?<![\w/])(?P<capitals>{_ANY.upper()}):"
    r"|(?m:^[^\S\n]*(?P<bare>FINAL REPORT|FINAL ADDENDUM|WET READ)\b)"
    r"|(?im:^[^\S\n]*(?P<views>(?=[^:\n]*\b(?:views?|pa|ap|lateral|portable|films?)\b)"
    r"[\w ,/()-]{0,40}\bchest\b[\w ,/()-]{0,40}):)"
)


def sections_of(text: str) -> dict[str, str]:
    """Section to its text, in the order of the report; repeated sections are joined by a new line."""
    sections: dict[str, str] = {}
    marks = list(_HEADING.finditer(text))
    for i, mark in enumerate(marks):
        heading = " ".join((mark["line"] or mark["capitals"] or mark["bare"] or mark["views"]).lower().split())
        section = _NAMES.get(heading) or ("findings" if mark["views"] or heading.startswith("findings") else "")
        end = marks[i + 1].start() if i + 1 < len(marks) else len(text)
        body = text[mark.end() : end].strip()
        if section and body:
            sections[section] = f"{sections[section]}\n{body}" if section in sections else body
    return sections


def select_sections(text: str, wanted: Sequence[str]) -> str:
    """The wanted sections in their order, one per line; the whole text if none is wanted; DataError ``no-section``."""
    if not wanted:
        return text
    sections = sections_of(text)
    parts = [sections[name] for name in wanted if name in sections]
    if not parts:
        have = ", ".join(sections) or "no headings at all"
        raise DataError(f"the report has no section {' or '.join(wanted)} ({have})", reason="no-section")
    return "\n".join(parts)


def check_sections(value: object, where: str) -> tuple[str, ...]:
    """``all``, a section or a list of them as a tuple (empty: all); ConfigError names an unknown section."""
    if value is None or value == "all":
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: sections must be 'all' or a list of {', '.join(SECTIONS)}, not {value!r}")
    for name in names:
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ConfigError(f"{where}: unknown section '{name}'{suggestion(name, SECTIONS)} (known: {known}, or all)")
    return tuple(dict.fromkeys(names))


def with_headings(parts: Sequence[tuple[str, str]]) -> str:
    """A report from (section, text) pairs, for sources that keep sections in columns; empty ones are left out."""
    return "\n".join(f"{name.upper()}: {text.strip()}" for name, text in parts if text.strip())


CLEANINGS = ("none", "r2gen-v1")

# removed inside a sentence; not a hyphen, since R2Gen's pattern has it as a range of characters
_PUNCTUATION = re.compile(r"[.,?;:*!%^&_+()<=>@\[\]{}\"'/\\]")


def clean_report(text: str, cleaning: str = "none") -> str:
    """A report in the form used for training; ``cleaning`` is one of ``CLEANINGS``.

    >>> clean_report("1. No effusion.  2. Well-defined nodule (right)..", "r2gen-v1")
    'no effusion . well-defined nodule right .'
    """
    if cleaning == "none":
        return text
    text = re.sub(r" {2,}", " ", re.sub(r"_{2,}", "_", re.sub(r"\r?\n", " ", text)))
    text = re.sub(r"\.{2,}", ".", text).replace("1. ", "")
    for before in (". ", " "):
        for number in "2345":
            text = text.replace(f"{before}{number}. ", ". ")
    sentences = [_PUNCTUATION.sub("", sentence).strip() for sentence in text.strip().lower().split(". ")]
    return " ".join(" . ".join([*sentences, ""]).split())


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
    """Names, dates, telephone and record numbers and e-mail addresses, in order and without overlap.

    A warning for the people who prepare the data, never a proof that a report is free of them: names without a title
    are not found. Rules rather than a model make each hit explainable; few false alarms keep the warning worth reading.
    Placeholders of de-identified collections (``___``, ``XXXX``, ``[**...**]``) are not hits.

    >>> find_identifiers("Discussed with Dr. Smith on 03/14/2019. Nodule 3 mm.")
    [('name', (15, 24)), ('date', (28, 38))]
    """
    taken: list[tuple[str, Span]] = []
    for kind, rule in _RULES:
        for hit in rule.finditer(text):
            if not any(hit.start() < end and start < hit.end() for _, (start, end) in taken):
                taken.append((kind, hit.span()))
    return sorted(taken, key=lambda item: item[1])
