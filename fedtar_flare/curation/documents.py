"""What all sources of reports share: whose a document is, of which study and report, whether it is in force, its text.

A source only translates each document into a :class:`Document`; ``decide`` alone says which text belongs to which
study. Where that has no certain answer, the document is left out under a reason.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, combinations
from typing import Any, NamedTuple

from fedtar_flare.core.errors import DataError, decoding
from fedtar_flare.data.cells import linked
from fedtar_flare.data.sources.fields import markup, stated

FINAL, WITHDRAWN, UNKNOWN = "final", "withdrawn", "unknown"
COLUMNS = (
    "patient_id", "patient_issuer", "accession_number", "issuer", "study_instance_uid", "study_date", "report",
)  # fmt: skip
UNPRINTED = re.compile(r"[\0-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")
"""Characters that no report prints: its bytes are of another character set."""
IMAGING = {"RAD", "CT", "CUS", "NMR", "NMS", "OUS", "RUS", "RX", "VUS", "XRC"}
"""Sections of HL7's table 0074; other sections may use the same accession numbers."""
POINTER = re.compile(
    r"(?i)attach|enclosed|\b(pdf|document|anhang|anlage|beilage|jointe|adjunt[oa]|allegato|bijlage)\b|附|添付|첨부"
)
"""In a few words beside a file: the report may be in the file alone."""
_PARTS = r"(?:-?(\d\d)(?:-?(\d\d)(?:[T ]?(\d\d)(?::?(\d\d)(?::?(\d\d)([.,]\d+)?)?)?)?)?)?"
_TIME = re.compile(rf"(\d{{4}}){_PARTS}(Z|[+-]\d\d:?\d\d)?", re.ASCII)


class Identifier(NamedTuple):
    """An identifier of a patient or order, and who issued it: ``LOCAL|UNIVERSAL``, either of them, or nothing."""

    value: str = ""
    issuer: str = ""


NOBODY = Identifier()


@dataclass(frozen=True, kw_only=True)
class Document:
    """One version of a report; what it does not state is empty.

    Documents that share one of ``names`` (source, value, and what else tells it apart) are versions of one report; a
    name of no value counts for nothing. ``status`` is FINAL, WITHDRAWN or the source's own word for what is neither.
    ``issued`` and ``clocks`` (by name) are times as ``moment`` has them, which grow from version to version.
    ``procedure`` is a code or UNKNOWN: versions of one report may come under different names.
    ``further`` are other orders and studies that it is about as well, as ``studies_of`` has them. ``attached`` counts
    files beside its text that were not read.
    ``patients`` are all identifiers that may be the patient's: exactly one is wanted. ``unread`` is the reason why its
    text cannot be trusted, and ``detail`` says more; it still supersedes. ``sections`` are names of the text's parts: a
    newer version without one of them is a correction or an addendum alone.
    """

    origin: str
    names: frozenset[tuple[str, ...]]
    status: str
    issued: str
    clocks: tuple[tuple[str, str], ...] = ()
    patients: tuple[Identifier, ...] = ()
    procedure: str = UNKNOWN
    order: Identifier = NOBODY  # the accession number
    study: str = ""  # the StudyInstanceUID
    further: tuple[tuple[Identifier, str], ...] = ()
    day: str = ""
    text: str = ""
    unread: str = ""
    detail: str = ""
    sections: frozenset[str] = frozenset()
    attached: int = 0


def understood(document: Document, read: Callable[[], Mapping[str, Any]]) -> Document:
    """The document with the fields that ``read`` gives; else as before, and unread for the reason why that failed."""
    try:
        with decoding("cannot be read", "bad-document"):
            return replace(document, **read())
    except DataError as error:
        return replace(document, unread=error.reason, detail=str(error))


def moment(text: str) -> str:
    """A date and time of any of the standards, as precise as it is stated, in a form that sorts; empty for none.

    Times with a zone are in UTC and say so. Of two times of which one begins like the other, neither is later.
    """
    if not text.strip():
        return ""
    parts = _TIME.fullmatch(text.strip())
    if parts is None:
        raise ValueError(f"'{text}' is no time")
    *fields, fraction, zone = parts.groups()
    given = [int(field) for field in fields if field]
    year, month, day, hour, minute, second = [*given, *(1, 1, 1, 0, 0, 0)[len(given) :]]
    when = datetime(year, month, day, hour, minute, second)
    if zone and len(given) > 3:
        when = when.replace(tzinfo=datetime.fromisoformat(f"2000-01-01T00:00{zone}").tzinfo).astimezone(UTC)
    text = when.isoformat()[: (4, 7, 10, 13, 16, 19)[len(given) - 1]] + (fraction or "").replace(",", ".")
    return f"UTC {text}" if when.tzinfo else text


def mistaken(text: str, codec: str) -> bool:
    """Whether a line that was read by the codec of an 8-bit set is UTF-8 in truth."""
    for line in text.splitlines() if codec.startswith(("iso8859", "latin")) else ():
        with suppress(UnicodeError):
            if line.encode(codec).decode("utf-8") != line:
                return True
    return False


def same_issuer(issuer: str, other: str) -> bool:
    """Whether two names mean one issuer: the universal name decides where both have two."""
    names, others = (name.replace("urn:oid:", "").split("|") for name in (issuer, other))
    return names[-1] == others[-1] if len(names) == len(others) else not set(names).isdisjoint(others)


def may_be_same(identifier: Identifier, other: Identifier) -> bool:
    """Whether nothing that two identifiers state tells them apart."""
    both = identifier.issuer and other.issuer
    return identifier.value == other.value and (not both or same_issuer(identifier.issuer, other.issuer))


def one_identity(identifiers: Iterable[Identifier]) -> bool:
    """Whether nothing tells these identifiers apart."""
    return all(may_be_same(a, b) for a, b in combinations({*identifiers}, 2))


def fullest(identifiers: Iterable[Identifier]) -> Identifier:
    """Of identifiers that may be one the one that states most."""
    return max(identifiers, default=NOBODY, key=lambda known: (bool(known.value), len(known.issuer), known))


def studies_of(pairs: Iterable[tuple[Identifier, str]]) -> dict[str, Any]:
    """The fields of a document that names these orders and StudyInstanceUIDs, some of them together.

    DataError where it is not certain which of several belong together, or one order is of two studies.
    """
    pairs = {*pairs}
    about, uids = list[tuple[Identifier, str]](), {uid for _, uid in pairs} - {""}
    for number in sorted({order.value for order, _ in pairs} - {""}):
        same = [(order, uid) for order, uid in pairs if order.value == number]
        of = {uid for _, uid in same} - {""}
        if not one_identity(order for order, _ in same) or len(of) > 1:
            raise DataError("about several studies or orders of one number", reason="several-studies")
        about.append((fullest(order for order, _ in same), "".join(of)))
    numbers, uids = [order for order, uid in about if not uid], uids - {uid for _, uid in about}
    if len(about) == len(numbers) == len(uids) == 1:
        about = [(numbers[0], uids.pop())]
    elif numbers and uids:
        raise DataError("about several studies or orders, which are not told apart", reason="several-studies")
    else:
        about += [(NOBODY, uid) for uid in sorted(uids)]
    (order, study), *further = about or [(NOBODY, "")]
    return {"order": order, "study": study, "further": tuple(further)}


def decide(documents: Iterable[Document]) -> tuple[list[dict[str, str]], list[DataError], list[DataError]]:
    """The rows of the table of reports, a problem for each document that is left out, and a note for each report with
    files that were not read.
    """
    problems: list[DataError] = []
    candidates: list[Document] = []  # in force, or withdrawn from a known study
    holders: dict[tuple[str, ...], int] = {}
    every = [replace(document, text=re.sub("\r\n?", "\n", document.text)) for document in documents]
    names = [(name, n) for n, document in enumerate(every) for name in document.names if name[1]]
    alone = [(n, n) for n in range(len(every))]
    for same in linked([*alone, *((holders.setdefault(name, n), n) for name, n in names)]):  # those that share a name
        versions = [every[n] for n in sorted(same)]
        last = _newest(versions)
        current = {id(version) for version in last}
        problems += [_left_out(version, "superseded") for version in versions if id(version) not in current]
        reason = _not_in_force(versions, last)
        problems += [_left_out(version, reason) for version in last if reason]
        if not reason or (reason == "withdrawn" and any(version.patients for version in last)):
            joined = replace(_joined(last), status=WITHDRAWN if reason else FINAL)
            about = ((joined.order, joined.study), *joined.further)
            candidates += [replace(joined, order=order, study=study) for order, study in about]
    refused: dict[str, str] = {}  # by origin: a report of several studies is left out as a whole
    for group in _by_study(candidates):
        in_force = [document for document in group if document.status == FINAL]
        if not one_identity(document.patients[0] for document in in_force):
            refused |= {document.origin: "several-patients" for document in in_force}
        elif len({document.text.strip() for document in in_force}) > 1:
            refused |= {document.origin: "several-reports" for document in in_force}
        gone = [document for document in group if document.status == WITHDRAWN]
        refused |= {d.origin: "withdrawn-elsewhere" for d in in_force if any(_contradicts(other, d) for other in gone)}
    reports = [document for document in candidates if document.status == FINAL]
    whole = {document.origin: document for document in reports}.items()
    problems += [_left_out(document, refused[origin]) for origin, document in whole if origin in refused]
    files = [(origin, document.attached) for origin, document in whole if origin not in refused and document.attached]
    notes = [DataError(f"{origin}: {n} file(s) beside the text", reason="attachment") for origin, n in files]
    rows = dict.fromkeys(_row(document) for document in reports if document.origin not in refused)
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows], problems, notes


def _left_out(document: Document, reason: str) -> DataError:
    detail = document.detail if reason == document.unread else ""
    return DataError(": ".join(filter(None, (document.origin, detail))), reason=reason)


def _row(document: Document) -> tuple[str, ...]:
    patient, order = document.patients[0], document.order
    return *patient, *order, document.study, document.day, document.text


def _times(document: Document) -> list[tuple[tuple[str, bool], str]]:
    """Times by clock; one that tells its zone is another clock than one that does not."""
    clocks = (("issued", document.issued), *document.clocks)
    return [((name, time.startswith("UTC")), time) for name, time in clocks if time]


def _newest(versions: Sequence[Document]) -> list[Document]:
    """The versions that no clock calls older than another; all of them, where the clocks contradict each other."""
    latest: dict[tuple[str, bool], str] = {}
    for clock, time in chain.from_iterable(map(_times, versions)):
        latest[clock] = max(time, latest.get(clock, ""))
    return [v for v in versions if all(latest[clock] < f"{time}~" for clock, time in _times(v))] or [*versions]


def _not_in_force(versions: Sequence[Document], last: Sequence[Document]) -> str:
    """Why a report's newest version (several, where none is surely the newest) is no report, or nothing."""
    if any(version.status == WITHDRAWN for version in last):
        return "withdrawn"
    if others := sorted({version.status for version in last} - {FINAL}):
        return f"status-{others[0]}"
    if unread := sorted({version.unread for version in last} - {""}):
        return unread[0]
    if not all(version.patients for version in last):
        return "no-patient-id"
    if not one_identity(chain.from_iterable(version.patients for version in versions)):
        return "several-patients"
    about = _joined(last)
    if not any((about.order.value, about.study, about.day)):
        return "no-accession-number"
    orders = {version.order for version in versions if version.order.value}
    about_one = [{version.study for version in versions}, {version.day for version in versions}]
    further = {version.further for version in versions if version.order.value or version.study}
    if not one_identity(orders) or any(len(values - {""}) > 1 for values in about_one) or len(further) > 1:
        return "several-studies"
    sections = frozenset[str]().union(*(version.sections for version in versions if version.status == FINAL))
    if any(sections - version.sections for version in last):
        return "part-of-a-report"
    if len({version.text.strip() for version in last}) > 1:
        return "two-at-once"
    if UNPRINTED.search("".join((*_row(about), *(part for order, uid in about.further for part in (*order, uid))))):
        return "bad-charset"
    if not stated(about.text):
        return "no-text"
    if about.attached and len(about.text.split()) < 20 and POINTER.search(about.text):
        return "text-in-attachment"
    return markup(about.text)


def _joined(last: Sequence[Document]) -> Document:
    """One document for a report's newest versions, with what any of them states."""
    patients = [patient for version in last for patient in version.patients]
    return replace(
        min(last, key=lambda version: version.origin),
        patients=(fullest(patients),),
        order=fullest(version.order for version in last),
        study=max(version.study for version in last),
        day=max(version.day for version in last),
        text=min(version.text for version in last),
        further=max(version.further for version in last),
        attached=max(version.attached for version in last),
    )


def _by_study(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents that are, or may be, about one study."""
    studies: dict[str, list[Document]] = defaultdict(list)
    groups: dict[tuple[str, ...], list[Document]] = defaultdict(list)
    for document in documents:
        patient = document.patients[0].value
        if document.study:
            studies[document.study].append(document)
        if document.order.value:
            groups["order", patient, document.order.value].append(document)
        if document.day:
            groups["day", patient, document.day].append(document)
    yield from studies.values()
    for (kind, *_), group in groups.items():
        for members in _clusters(group):
            marks = [document.study or (kind == "day" and document.order.value) for document in members]
            if not all(marks):  # else that tells them apart
                yield members


def _clusters(group: Sequence[Document]) -> list[list[Document]]:
    """Documents of one patient's and order's number, apart where their issuers are."""
    by_owner: dict[tuple[Identifier, Identifier], list[Document]] = defaultdict(list)
    for document in group:
        by_owner[document.patients[0], document.order].append(document)
    pairs = [(owner, owner) for owner in by_owner]
    for one, other in combinations(by_owner, 2):
        (patient, order), (owner, number) = one, other
        if may_be_same(patient, owner) and (not (order.value and number.value) or may_be_same(order, number)):
            pairs.append((one, other))
    return [[document for owner in by_owner if owner in ours for document in by_owner[owner]] for ours in linked(pairs)]


def _contradicts(gone: Document, report: Document) -> bool:
    """Whether what was withdrawn may be this report, of another source or under another name, and is not older."""
    apart = gone.procedure != report.procedure and UNKNOWN not in (gone.procedure, report.procedure)
    if apart and {name[0] for name in gone.names} & {name[0] for name in report.names}:
        return False
    comparable = gone.issued and gone.issued[:3] == report.issued[:3]
    return not comparable or report.issued <= f"{gone.issued}~"
