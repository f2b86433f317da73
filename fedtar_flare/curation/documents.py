"""What all sources of reports share: whose a document is, of which study and report, whether it is in force, its text.

A source only translates each document into a :class:`Document`; ``decide`` alone says which text belongs to which
study. Where that has no certain answer, the document is left out under a reason.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from fedtar_flare.core.errors import DataError

FINAL, WITHDRAWN = "final", "withdrawn"
COLUMNS = (
    "patient_id", "patient_issuer", "accession_number", "issuer", "study_instance_uid", "study_date", "report",
)  # fmt: skip


class Identifier(NamedTuple):
    """An identifier of a patient or order, and who issued it: ``LOCAL|UNIVERSAL``, either of them, or nothing."""

    value: str = ""
    issuer: str = ""


NOBODY = Identifier()


@dataclass(frozen=True, kw_only=True)
class Document:
    """One version of a report; what it does not state is empty.

    Documents that share one of ``names`` are versions of one report. ``status`` is FINAL, WITHDRAWN or the source's own
    word for what is neither. ``issued`` sorts by time (``moment``). ``patients`` are all identifiers that may be the
    patient's: exactly one is wanted. ``unread`` is the reason why its text cannot be trusted; it still supersedes.
    """

    origin: str
    names: frozenset[tuple[str, ...]]
    status: str
    issued: str
    patients: tuple[Identifier, ...] = ()
    order: Identifier = NOBODY  # the accession number
    study: str = ""  # the StudyInstanceUID
    day: str = ""
    text: str = ""
    unread: str = ""


def moment(text: str) -> str:
    """A date and time of any of the standards in a form that sorts: in UTC, where a zone is stated."""
    when = datetime.fromisoformat(re.sub(r"^(\d{8})(?=\d)", r"\1T", text.strip()))
    return when.replace(tzinfo=when.tzinfo or UTC).astimezone(UTC).isoformat(timespec="microseconds")


def same_issuer(issuer: str, other: str) -> bool:
    """Whether two names mean one issuer: the universal name decides where both have two."""
    names, others = (name.replace("urn:oid:", "").split("|") for name in (issuer, other))
    return names[-1] == others[-1] if len(names) == len(others) else not set(names).isdisjoint(others)


def may_be_same(identifier: Identifier, other: Identifier) -> bool:
    """Whether nothing that two identifiers state tells them apart."""
    stated = identifier.issuer and other.issuer
    return identifier.value == other.value and (not stated or same_issuer(identifier.issuer, other.issuer))


def decide(documents: Iterable[Document]) -> tuple[list[dict[str, str]], list[DataError]]:
    """The rows of the table of reports, and a problem for each document that is left out."""
    problems: list[DataError] = []
    in_force = []
    for versions in _by_report(documents):
        newest = max(version.issued for version in versions)
        last = [version for version in versions if version.issued == newest]
        problems += [_left_out(version, "superseded") for version in versions if version.issued < newest]
        if reason := _not_in_force(versions, last):
            problems += [_left_out(version, reason) for version in last]
        else:
            in_force.append(last[0])
    refused: dict[str, str] = {}  # reason by origin
    for group in _by_study(in_force):
        if len({document.patients[0].value for document in group}) > 1:
            refused |= {document.origin: "several-patients" for document in group}
        elif len({document.text.strip() for document in group}) > 1:
            refused |= {document.origin: "several-reports" for document in group}
    problems += [_left_out(d, refused[d.origin]) for d in in_force if d.origin in refused]
    rows = {_row(document): None for document in in_force if document.origin not in refused}
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows], problems


def _left_out(document: Document, reason: str) -> DataError:
    return DataError(document.origin, reason=reason)


def _row(document: Document) -> tuple[str, ...]:
    patient, order = document.patients[0], document.order
    return *patient, *order, document.study, document.day, document.text


def _by_report(documents: Iterable[Document]) -> list[list[Document]]:
    """Versions of one report together: those that share a name, also by way of a third."""
    reports: dict[tuple[str, ...], list[Document]] = {}
    for document in documents:
        names = document.names or {("origin", document.origin)}
        merged = [document]
        for known in {id(reports[name]): reports[name] for name in names if name in reports}.values():
            merged = known + merged if len(known) >= len(merged) else merged + known
        for name in {name for version in merged for name in version.names} | {*names}:
            reports[name] = merged
    return list({id(versions): versions for versions in reports.values()}.values())


def _not_in_force(versions: Sequence[Document], last: Sequence[Document]) -> str:
    """Why a report's newest version (several, where they are of one time) is no report, or nothing."""
    if any(version.status == WITHDRAWN for version in last):
        return "withdrawn"
    if others := sorted({version.status for version in last} - {FINAL}):
        return f"status-{others[0]}"
    if unread := sorted({version.unread for version in last} - {""}):
        return unread[0]
    if not all(version.patients for version in last):
        return "no-patient-id"
    patients = [patient for version in versions for patient in version.patients]
    if not all(may_be_same(patient, other) for patient in {*patients} for other in {*patients}):
        return "several-patients"
    if not any((last[0].order.value, last[0].study, last[0].day)):
        return "no-accession-number"
    if len({(version.order, version.study, version.day) for version in last}) > 1:
        return "several-studies"
    if not last[0].text.strip():
        return "no-text"
    return "two-at-once" if len({version.text for version in last}) > 1 else ""


def _by_study(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents that are, or may be, about one study."""
    studies, orders, days = (defaultdict[tuple[str, ...], list[Document]](list) for _ in range(3))
    for document in documents:
        patient = document.patients[0].value
        if document.study:
            studies[document.study,].append(document)
        if document.order.value:
            orders[patient, document.order.value].append(document)
        elif not document.study:
            days[patient, document.day].append(document)
    yield from studies.values()
    yield from days.values()
    for group in orders.values():
        issuers = {document.order.issuer for document in group}
        apart = all(a and b and not same_issuer(a, b) for a in issuers for b in issuers if a != b)
        for issuer in issuers if apart else [""]:
            members = [document for document in group if not apart or document.order.issuer == issuer]
            if not all(document.study for document in members):  # else their studies tell them apart
                yield members
