"""Collect reports of other systems (FHIR R4, HL7 v2, DICOM SR, OMOP) for ``fedtar data index``.

Reports count whose status is final, amended, corrected or appended; of several states of a report the newest, unless it
withdraws the report. All others are counted by reason.
"""

import base64
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hl7
from pydicom import dcmread
from pydicom.charset import CODES_TO_ENCODINGS, convert_encodings, decode_bytes, default_encoding

from fedtar_flare.core.errors import DataError, collecting, decoding, within
from fedtar_flare.curation.archive_files import issuer_of
from fedtar_flare.data.sources.tables import open_table

COUNTED = ("final", "amended", "corrected", "appended", "F", "C", "COMPLETE VERIFIED FINAL")
"""Status that counts: of FHIR's DiagnosticReport, HL7's table 0123, DICOM's completion, verification, preliminary."""
WITHDRAWN = ("cancelled", "entered-in-error", "X")
IMAGING = {"", "RAD", "CT", "CUS", "NMR", "NMS", "OUS", "RUS", "RX", "VUS", "XRC", "LP29684-5"}
"""Sections of HL7's table 0074, and LOINC's radiology; other sections may use the same accession numbers."""
CHARSETS = {"ASCII": "ascii", "UNICODE UTF-8": "utf-8", "GB 18030-2000": "gb18030", "BIG-5": "big5",
            "KS X 1001": "euc_kr", "ISO IR14": "shift_jisx0213", "ISO IR6": "ascii", "ISO IR87": "ascii",
            "ISO IR159": "ascii", **{f"8859/{n}": f"iso8859-{n}" for n in (*range(1, 10), 15)}}  # fmt: skip
"""Codecs of HL7's table 0211; Japanese sets of two bytes begin in ASCII and are switched to by escape sequences."""
WRONG = re.compile(r"[\x0e\x0f\x1b\x80-\x9f\ufffd]")
UNSAFE = re.compile(rb"\x1b(?:\$[^)]|\(I)[^\x1b\r\n]*(?:[\r\n]|\Z)|\x1b\(B[^\x1b\r\n]*[\x80-\xff]")
"""Characters that no set prints; and switches to two bytes beyond a segment's end, or to ASCII before other bytes."""
MESSAGE = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|(?<=[\r\n\x0b]))(?=MSH([!-/:-@\[-`{-~])(?:(?!\1).){4,5}\1)")
ESCAPES = r"[HNFRSTE]|\.(?:br|fi|nf|ce|(?:sp|in|ti|sk) ?[+-]?\d{0,3})"
TEXT_SR = ("1.2.840.10008.5.1.4.1.1.88.11", "1.2.840.10008.5.1.4.1.1.88.22")
DICOM_STUDY = ("113014", "110180")
"""OBX-3 of a result that is the StudyInstanceUID."""
ACCESSION = ("IPC-1", "OBR-18", "OBR-3")
COLUMNS = ("patient_id", "accession_number", "issuer", "study_instance_uid", "study_date", "report")
Report = dict[str, str]
"""One state of a report: those of ``COLUMNS`` that it states, ``status``, and ``issued`` in a form that sorts."""


def collect(source: Path, accession: str = "", charset: str = "ASCII") -> tuple[list[Report], Counter[str], list[str]]:
    """Collect the reports of a file or folder."""
    states: list[Report] = []
    problems: list[DataError] = []
    resources: dict[str, Any] = {}
    reports: list[Any] = []
    for file in filter(Path.is_file, sorted(source.rglob("*")) if source.is_dir() else [source]):
        with collecting(problems), within(str(file)), decoding("cannot be read"), file.open("rb") as opened:
            if (head := opened.read(132))[128:] == b"DICM":
                states += _sr(file)
            elif file.suffix == ".csv":
                states += _omop(file, accession, problems)
            elif file.suffix in (".json", ".ndjson"):
                text = (head + opened.read()).decode("utf-8-sig")
                lines = filter(str.strip, text.split("\n")) if file.suffix == ".ndjson" else [text]
                for item in map(json.loads, lines):
                    for entry in item.get("entry", [{"resource": item}]):
                        inner = entry.get("resource") or {"resourceType": ""}
                        names = f"{inner['resourceType']}/{inner.get('id')}", entry.get("fullUrl") or "none"
                        resources |= dict.fromkeys(names, inner)
                        reports += [inner] if inner["resourceType"] == "DiagnosticReport" else []
            else:
                messages = MESSAGE.split(head + opened.read())[2::2]
                for n, message in enumerate(messages or [b"MSH|"], 1):
                    with collecting(problems), within(f"{file}, message {n}"), decoding("broken", "bad-message"):
                        states += _hl7(message, accession, charset)
    for item in reports:
        with collecting(problems), within(str(source)), decoding("cannot be read", "bad-resource"):
            states.append(_fhir(item, resources))
    rows, counts = _newest(states)
    first = {problem.reason: f"{problem.reason}, such as {problem}" for problem in reversed(problems)}
    return rows, counts + Counter(problem.reason for problem in problems), sorted(first.values())


def _newest(reports: Iterable[Report]) -> tuple[list[Report], Counter[str]]:
    """The newest state of each report, unless it is withdrawn, empty or contradictory, and counts of all others."""
    states, rows, counts = defaultdict(list), [], Counter[str]()
    for i, r in enumerate(reports):
        study = r.get("accession_number") or r.get("study_instance_uid") or (r.get("study_date") and str(i))
        if r.get("section", "") not in IMAGING:
            counts["other-section"] += 1
        elif r["status"] not in COUNTED + WITHDRAWN:
            counts[f"status-{r['status']}"] += 1
        elif not study or not r["patient_id"]:
            counts["no-patient-id" if study else "no-accession-number"] += 1
        else:
            states[r["patient_id"], r.get("issuer"), study].append(r)
    for several in states.values():
        newest = max(r["issued"] for r in several)
        last = [r for r in several if r["issued"] == newest]
        counts["superseded"] += len(several) - len(last)
        if any(r["status"] in WITHDRAWN for r in last):
            counts["withdrawn"] += 1
        elif len({r["report"] for r in last}) > 1 or not last[0]["report"].strip():
            counts["no-text" if not last[0]["report"].strip() else "two-at-once"] += 1
        else:
            rows.append({name: last[0].get(name, "") for name in COLUMNS})
    return rows, +counts


def _when(text: str) -> str:
    """A date and time of any of the standards in a form that sorts: in UTC, where a zone is stated."""
    when = datetime.fromisoformat(re.sub(r"^(\d{8})(?=\d)", r"\1T", text.strip()))
    return when.replace(tzinfo=when.tzinfo or UTC).astimezone(UTC).isoformat(timespec="microseconds")


def _fhir(report: Any, resources: dict[str, Any]) -> Report:
    inside = {f"#{inner['id']}": inner for inner in report.get("contained", ())}

    def identifiers(reference: Any) -> list[Any]:
        name = reference.get("reference", "")
        resource = inside.get(name) or resources.get(name) or resources.get("/".join(name.split("/")[-2:])) or reference
        value = resource.get("identifier", {})
        return value if isinstance(value, list) else [value]

    def typed(values: list[Any], code: str) -> list[Any]:
        return [i for i in values if any(c.get("code") == code for c in i.get("type", {}).get("coding", ()))]

    related = (report, *report.get("basedOn", ()), *report.get("imagingStudy", ()))
    values = [value for reference in related for value in identifiers(reference)]
    owners = identifiers(report["subject"])
    owners = typed(owners, "MR") or owners
    number: dict[str, str] = next(iter(typed(values, "ACSN")), {})
    texts = [base64.b64decode(form["data"]).decode("utf-8") for form in report.get("presentedForm", ())
             if form.get("contentType", "").startswith("text/plain") and "data" in form]  # fmt: skip
    studies = [i["value"].removeprefix("urn:oid:") for i in values if i.get("system") == "urn:dicom:uid"]
    sections = {c.get("code") for kind in report.get("category", ()) for c in kind.get("coding", ())}
    issued = report.get("issued") or report.get("meta", {}).get("lastUpdated")
    state = {
        "section": "" if not sections or sections & IMAGING else "other",
        "status": report["status"],
        "issued": _when(issued or report["effectiveDateTime"]),
        "patient_id": owners[0].get("value", "") if len(owners) == 1 else "",
        "accession_number": number.get("value", ""),
        "issuer": number.get("system", ""),
        "study_instance_uid": studies[0] if len(studies) == 1 else "",
        "report": "\n".join(texts) or report.get("conclusion", ""),
    }
    if not all(isinstance(value, str) for value in state.values()):
        raise DataError("not text where the standard has text", reason="bad-resource")
    return state


def _characters(raw: bytes, codec: str) -> str:
    """Text by the codec and the switches of ISO 2022 in it; raises UnicodeError for what may be of another set."""
    text = decode_bytes(raw, [codec, *CODES_TO_ENCODINGS.values()], {10, 13}) if b"\x1b" in raw else raw.decode(codec)
    if WRONG.search(text) or UNSAFE.search(raw):
        raise UnicodeError("characters of another set")
    return text


def _unescaped(message: hl7.Message, value: str, codec: str) -> str:
    esc = re.escape(message.esc)

    def read(match: re.Match[str]) -> str:
        if match[1]:  # bytes of the message's character set
            return _characters(bytes.fromhex(re.sub(f"{esc}X?", "", match[1])), codec)
        if match[2]:
            raise ValueError("it has to be written as an escape sequence of HL7, and in MSH-18's character set")
        return str(message.unescape(match[0], {"H": "", "N": "", ".in": " ", ".ti": " "}))

    with decoding(f"a '{message.esc}' in a field cannot be read", "bad-escape"):
        return re.sub(f"((?:{esc}X[0-9A-Fa-f]+{esc})+)|{esc}(?:{ESCAPES}){esc}|({esc})", read, value)


def _hl7(content: bytes, accession: str, charset: str) -> Iterator[Report]:
    header, esc = re.split(rb"[\r\n]", content)[0], re.escape(content[6:7])
    fields = [*header.split(header[3:4]), *[b""] * 18]
    if not any(field.startswith(b"ORU") for field in fields[8:]):  # further, where names have separators' bytes
        raise DataError("no HL7 message with ORU in MSH-9, in a character set other than UTF-16", reason="no-report")
    names = [field.split(header[5:6])[0].decode("ascii", "replace") for field in fields[17:]]
    name = next((name for name in names if name in CHARSETS), names[0] or charset)  # MSH-18
    switch = esc + rb"[CM]((?:[0-9A-Fa-f]{2}){2,3})" + esc
    content = re.sub(switch, lambda match: b"\x1b" + bytes.fromhex(match[1].decode()), content.strip(b"\r\n\x0b\x1c"))
    with decoding(f"not text in '{name}'; MSH-18, else --charset, has to name its own set, or UTF-8", "bad-charset"):
        text = re.sub("\r?\n", "\r", _characters(content, CHARSETS[name]))
    head, *patients = text.split(f"\rPID{text[3]}")
    for patient, *orders in (group.split(f"\rOBR{text[3]}") for group in patients):
        owner = f"{head}\rPID{text[3]}{patient}\rOBR{text[3]}"
        yield from (_order(hl7.parse(owner + order), CHARSETS[name], accession) for order in orders)


def _order(message: hl7.Message, codec: str, accession: str) -> Report:
    _, _, repeat, between, _ = message.separators
    segments = {str(segment[0]): segment for segment in reversed(message)}
    pid, results = segments["PID"], [segment for segment in message if str(segment[0]) == "OBX"]

    def at(segment: Any, field: int, component: int = 1, repetition: int = 0) -> str:
        value = str(segment[field]) if len(segment) > field else ""
        return _unescaped(message, [*value.split(repeat)[repetition].split(between), *[""] * 5][component - 1], codec)

    owners = [(at(pid, 3, 1, n), at(pid, 3, 5, n)) for n in range(str(pid[3]).count(repeat) + 1)]
    owners = [owner for owner in owners if owner[1] == "MR"] or owners
    fields = [field.split("-") for field in ([accession] if accession else ACCESSION)]
    numbers = [[at(segments[name], int(field), n) for n in (1, 2, 3)] for name, field in fields if name in segments]
    number, *issuer = next((parts for parts in numbers if parts[0]), [""])
    studies = [obx for obx in results if at(obx, 3) in DICOM_STUDY]
    texts = [obx for obx in results if at(obx, 2) in ("TX", "FT", "ST") and at(obx, 11) not in ("D", "W", "X")]
    lines = [part for obx in texts if obx not in studies for part in str(obx[5]).split(repeat)]
    return {
        "section": at(segments["OBR"], 24),
        "status": at(segments["OBR"], 25),
        "issued": _when(at(segments["OBR"], 22) or at(segments["MSH"], 7)),
        "patient_id": owners[0][0] if len(owners) == 1 else "",
        "accession_number": number,
        "issuer": "|".join(filter(None, issuer)),
        "study_instance_uid": at(studies[0], 5) if studies else "",
        "report": re.sub("\r\n?", "\n", "\n".join(_unescaped(message, line, codec) for line in lines)),
    }


def _sr(file: Path) -> Iterator[Report]:
    def lines(items: Iterable[Any]) -> Iterator[str]:
        for item in items:
            heading = item.ConceptNameCodeSequence[0].CodeMeaning if "ConceptNameCodeSequence" in item else ""
            yield ": ".join(filter(None, (heading, item.get("TextValue", "").replace("\x1b$)A", ""))))  # of GB 2312
            yield from lines(item.get("ContentSequence", ()))

    ds = dcmread(file, stop_before_pixels=True)
    if ds.get("Modality") == "SR":
        if ds.SOPClassUID not in TEXT_SR:
            raise DataError("no text report", reason="other-sr")
        state = {
            "status": " ".join(ds.get(f"{n}Flag", "FINAL") for n in ("Completion", "Verification", "Preliminary")),
            "issued": _when(ds.ContentDate + ds.ContentTime),
            "patient_id": str(ds.PatientID),
            "accession_number": ds.get("AccessionNumber", ""),
            "issuer": issuer_of(ds),
            "study_instance_uid": ds.StudyInstanceUID,
            "report": "\n".join(filter(None, lines(ds.get("ContentSequence", ())))),
        }
        text = "".join(state.values())  # pydicom reads characters of other sets as Latin-1, or replaces them
        sets = convert_encodings(ds.get("SpecificCharacterSet"))
        sets = ["ascii" if codec == default_encoding else codec for codec in sets]
        if WRONG.search(text) or not all(any(c.encode(codec, "ignore") for codec in sets) for c in {*text}):
            raise DataError("text of another character set than SpecificCharacterSet names", reason="bad-charset")
        yield state


def _omop(file: Path, accession: str, problems: list[DataError]) -> Iterator[Report]:
    with open_table(file, "the table of notes") as opened:
        for _, row in opened.rows(problems):
            state = {"patient_id": row["person_id"], "study_date": row["note_date"], "report": row["note_text"]}
            yield state | {"status": "final", "issued": row["note_date"], "accession_number": row.get(accession, "")}
