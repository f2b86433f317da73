"""Reports of HL7 v2 messages (ORU^R01)."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hl7
from pydicom.charset import CODES_TO_ENCODINGS, decode_bytes

from fedtar_flare.core.errors import DataError, collecting, decoding, within
from fedtar_flare.core.files import MOST_TEXT, read_bytes
from fedtar_flare.curation.documents import (
    FINAL,
    IMAGING,
    NOBODY,
    UNKNOWN,
    UNPRINTED,
    WITHDRAWN,
    Document,
    Identifier,
    mistaken,
    moment,
    studies_of,
    understood,
)

STATUS = {"F": FINAL, "C": FINAL, "X": WITHDRAWN}  # of HL7's table 0123
GONE = {"D", "W", "X"}  # of HL7's table 0085: results that are deleted, wrong, or cannot be had
CHARSETS = {"ASCII": "ascii", "UNICODE UTF-8": "utf-8", "GB 18030-2000": "gb18030", "BIG-5": "big5",
            "KS X 1001": "euc_kr", "ISO IR14": "shift_jisx0213", "ISO IR6": "ascii", "ISO IR87": "ascii",
            "ISO IR159": "ascii", **{f"8859/{n}": f"iso8859-{n}" for n in (*range(1, 10), 15)}}  # fmt: skip
"""Codecs of HL7's table 0211; Japanese sets of two bytes begin in ASCII and are switched to by escape sequences."""
UNSAFE = re.compile(rb"\x1b(?:\$[^)]|\(I)[^\x1b\r\n]*(?:[\r\n]|\Z)|\x1b\(B[^\x1b\r\n]*[\x80-\xff]")
"""Switches to two bytes beyond a segment's end, or to ASCII before other bytes."""
MESSAGE = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|(?<=[\r\n\x0b]))(?=MSH([!-/:-@\[-`{-~])(?:(?!\1)[^\r\n]){4,5}\1)")
SEGMENT_END = r"(?<![\r\n])[\r\n]+(?=[A-Z][A-Z0-9]{2}%s)"
"""The end of a segment, whatever ends the lines of a file; other line breaks are part of a field."""
SEGMENTS = (
    "SFT|UAC|PID|PD1|NK1|NTE|PV1|PV2|PRT|ROL|AL1|DG1|GT1|IN1|IN2|IN3|ORC|OBR|TQ1|TQ2|CTD|OBX|FT1|CTI|SPM|SAC|IPC|"
    "BHS|BTS|FHS|FTS|Z.."
)
"""Of a report and a batch, and a site's own. Others, such as ADD and DSC, may go on with a text."""
ESCAPES = r"[HNFRSTE]|(?i:\.(?:br|fi|nf|ce|(?:sp|in|ti|sk) ?[+-]?\d{0,3}))"
ACCESSION = ("IPC-1", "OBR-18", "OBR-3")
STUDY, UIDS = re.compile("113014|110180|.*Study Instance UID"), re.compile("113014|110180|.*Instance UID")
"""OBX-3 of results that are the StudyInstanceUID, or that of something else, and no text."""
TEXTS = {"TX", "FT", "ST"}
FILE = re.compile(r"(?i)(application/)?pdf|im|image|(image/)?(jpe?g|png|tiff?|gif|dicom)")
"""Type or subtype of data (HL7's tables 0191 and 0291) that are no text of a message."""
ADDENDUM = {"ADT", "55107-7"}  # OBX-3 of an addendum: a suffix of HL7's own, and LOINC's code
NO_REPORT = "no HL7 message with ORU in MSH-9, in a character set other than UTF-16"

Fields = Sequence[str]
Segments = dict[str, list[Fields]]


def _characters(raw: bytes, codec: str) -> str:
    """Text by the codec and the switches of ISO 2022 in it; raises UnicodeError for what may be of another set."""
    text = decode_bytes(raw, [codec, *CODES_TO_ENCODINGS.values()], {10, 13}) if b"\x1b" in raw else raw.decode(codec)
    if UNPRINTED.search(text) or UNSAFE.search(raw) or mistaken(text, codec):
        raise UnicodeError("characters of another set")
    return text


class _Message:
    """Reads fields by the separators of a header. ``hl7.parse`` of all segments takes 200 times a message's memory.

    ``ended`` says that the message's last segment was, too: nothing of it was cut off.
    """

    def __init__(self, header: str, codec: str, ended: bool):
        self.hl7, self.codec, self.ended, self.room = hl7.parse(header), codec, ended, MOST_TEXT
        _, self.field, self.repeat, self.between, self.within = self.hl7.separators
        self.header = [header[:3], self.field, *header.split(self.field)[1:]]

    def raw(self, fields: Fields, field: int) -> str:
        return fields[field] if len(fields) > field and fields[field] != '""' else ""  # HL7's null

    def every(self, fields: Fields, field: int) -> list[list[str]]:
        """The first five components of each repetition, as they are written."""
        repeated = [part.split(self.between) for part in self.raw(fields, field).split(self.repeat)]
        return [["" if part == '""' else part for part in (*parts, "", "", "", "")][:5] for parts in repeated]

    def is_file(self, obx: Fields) -> bool:
        """Whether a result is a PDF or picture (ED), or says where one is (RP), and no words."""
        kind = self.raw(obx, 2)
        values = self.every(obx, 5) if kind in ("ED", "RP") else [[""] * 5]
        return all(
            (any(map(FILE.fullmatch, parts[1:4])) and " " not in parts[4])
            or (kind == "ED" and parts[4].startswith("JVBERi0"))
            or (kind == "RP" and re.fullmatch(r"\S+://\S+", parts[0]))
            for parts in values
        )

    def text(self, value: str) -> str:
        """What a value says; DataError for an escape character that begins no sequence of HL7."""
        esc = re.escape(self.hl7.esc)

        def read(match: re.Match[str]) -> str:
            if match[1]:  # bytes of the message's character set
                return _characters(bytes.fromhex(re.sub(f"{esc}X?", "", match[1])), self.codec)
            if match[2]:
                raise ValueError("it has to be written as an escape sequence of HL7, and in MSH-18's character set")
            code = match[0].lower() if match[0][1] == "." else match[0]
            made = str(self.hl7.unescape(code, {"H": "", "N": "", ".in": " ", ".ti": " "}))
            self.room -= len(made)  # eight characters stand for up to 999
            if self.room < 0:
                raise ValueError(f"escape sequences of a message stand for more than {MOST_TEXT:,} characters")
            return made

        with decoding(f"a '{self.hl7.esc}' in a field cannot be read", "bad-escape"):
            value = "" if value == '""' else value
            return re.sub(f"((?:{esc}X[0-9A-Fa-f]+{esc})+)|{esc}(?:{ESCAPES}){esc}|({esc})", read, value)


def read_hl7(file: Path, accession: str, charset: str, problems: list[DataError]) -> Iterator[Document]:
    """The reports of a file of messages; ``accession`` names the field of the accession number, such as ``OBR-2``."""
    before, *messages = MESSAGE.split(read_bytes(file))
    if re.sub(rb"(?:\A|[\r\n])[BF]HS[^\r\n]*", b"", before).strip(b"\r\n\x0b\x1c \0") or not messages:
        problems.append(DataError(f"{file}, its beginning: {NO_REPORT}", reason="no-report"))
    for n, message in enumerate(messages[1::2], 1):
        origin = f"{file}, message {n}"
        with collecting(problems), within(origin), decoding("broken", "bad-message"):
            yield from _documents(origin, message.rstrip(b" \0"), accession, charset)


def _documents(origin: str, content: bytes, accession: str, charset: str) -> Iterator[Document]:
    ended, content = content.endswith((b"\r", b"\n", b"\x1c")), content.strip(b"\r\n\x0b\x1c \0")
    header, esc = re.split(rb"[\r\n]", content)[0], re.escape(content[6:7])
    fields = [*header.split(header[3:4]), *[b""] * 18]
    if not any(field.startswith(b"ORU") for field in fields[8:]):  # further, where names have separators' bytes
        raise DataError(NO_REPORT, reason="no-report")
    names = [field.split(header[5:6])[0].decode("ascii", "replace") for field in fields[17:]]
    name = next((name for name in names if name in CHARSETS), names[0] or charset)  # MSH-18
    switch = esc + rb"[CM]((?:[0-9A-Fa-f]{2}){2,3})" + esc
    content = re.sub(switch, lambda match: b"\x1b" + bytes.fromhex(match[1].decode()), content)
    text, flaws = content.decode("latin-1"), list[DataError]()  # in doubt it still supersedes, by its ASCII names
    where = f"not text in '{name}'; MSH-18, else --charset, has to name its own set, or UTF-8"
    with collecting(flaws), decoding(where, "bad-charset"):
        text = _characters(content, CHARSETS[name])
    first, *segments = re.split(SEGMENT_END % re.escape(text[3]), text)
    message = _Message(first, CHARSETS.get(name, "ascii"), ended)
    for number, order in enumerate(_orders(message, segments, flaws), 1):
        yield _order(f"{origin}, order {number}", message, order, accession, flaws[:1])


def _orders(message: _Message, segments: Sequence[str], flaws: list[DataError]) -> list[Segments]:
    """The segments of each order by name, and its patient's; ``flaws`` gets what leaves a text in doubt."""
    patient: Segments = {}
    order: Segments | None = None
    orders, last, lasts = list[Segments](), 0, dict[tuple[str, ...], int]()  # the last, and of each OBX-3 with OBX-4
    for fields in (segment.split(message.field) for segment in segments):
        name, number = fields[:2]
        stray = not re.match(SEGMENTS, name) or (name == "PID" and "PID" in patient and order is None)
        if name == "PID":
            patient, order = {}, None
        elif name in ("ORC", "OBR") and (order is None or name in order or (name == "ORC" and "OBR" in order)):
            order, lasts = dict(patient), {}
            orders.append(order)
        if name == "OBX" and number.isdecimal():
            group = tuple(fields[3:5])
            before = {last, lasts.get(group, last)}
            if int(number) not in {0, 1, *before, *(n + 1 for n in before)}:  # numbers may begin anew
                flaws.append(DataError(f"OBX {number} follows OBX {last}", reason="result-missing"))
            last = lasts[group] = int(number)
        if stray or (name == "OBX" and "OBR" not in (order or ())):
            flaws.append(DataError(f"{name} is in no place of a report", reason="stray-segment"))
        elif name == "NTE" and "OBX" in (order or ()) and message.raw(fields, 3):
            flaws.append(DataError("a note (NTE) on a result", reason="note"))
        else:
            (patient if order is None else order).setdefault(name, []).append(fields)
    if not (orders := [order for order in orders if "OBR" in order]):
        raise DataError("no order (OBR)", reason="bad-message")
    return orders


def _order(origin: str, message: _Message, order: Segments, accession: str, flaws: list[DataError]) -> Document:
    raw, every, flaws = message.raw, message.every, [*flaws]
    pid, orc, obr = (order.get(name, [[]])[0] for name in ("PID", "ORC", "OBR"))
    results = [obx for obx in order.get("OBX", ()) if not any(map(UIDS.fullmatch, every(obx, 3)[0]))]
    uids = {raw(obx, 5) for obx in order.get("OBX", ()) if any(map(STUDY.fullmatch, every(obx, 3)[0]))} - {""}

    def time(fields: Fields, field: int) -> str:
        value, zone = every(fields, field)[0][0], re.search(r"[+-]\d{4}$", every(message.header, 7)[0][0])
        with collecting(flaws), decoding(f"'{value}' is no time", "bad-date"):
            return moment(value + (zone[0] if zone and re.fullmatch(r"[\d.]{9,}", value) else ""))
        return ""

    def whose() -> dict[str, Any]:
        owners = [[message.text(part[n]) for n in (0, 3, 4)] for part in every(pid, 3)]
        owners = next(filter(None, ([o for o in owners if o[2] == kind] for kind in ("MR", "PI"))), owners)
        if len(owners) > 20:
            raise DataError(f"{len(owners)} identifiers of patients", reason="several-patients")
        orders = set[Identifier]()
        for segment, field in (name.split("-") for name in ([accession] if accession else ACCESSION)):
            for part in (part for fields in order.get(segment, ()) for part in every(fields, int(field))):
                value, *issuer = map(message.text, part[:3])
                orders |= {Identifier(value, "|".join(filter(None, issuer)))} if value else set()
            if orders:
                break
        names = ["|".join(filter(None, owner[1].split(message.within)[:2])) for owner in owners]
        patients = {Identifier(owner[0], name) for owner, name in zip(owners, names, strict=True) if owner[0]}
        studies = studies_of([*((order, "") for order in orders), *((NOBODY, uid) for uid in uids)])
        return {"patients": tuple(patients), **studies}

    status, states = raw(obr, 25), {raw(obx, 11) for obx in results}
    moved = any(raw(obx, n) for obx in results for n in range(6, 11)) or len({*map(len, results)}) > 1
    if states == {""} and message.ended and not moved and (len(results) > 1 or len(results[0]) > 11):
        states = {status} if STATUS.get(status) == FINAL else states  # HL7 requires OBX-11, and some never fill it
    texts = [obx for obx in results if not message.is_file(obx)]
    files = len(results) - len(texts) if any(raw(obx, 5) for obx in texts) else 0
    if states and states <= GONE:
        status = "X"
    elif STATUS.get(status) == FINAL:
        status = next(iter(sorted(states - {"F", "C", "D", ""})), status)
    numbers = [every(*where)[0][:3] for where in ((obr, 3), (orc, 3), (obr, 2), (orc, 2))]  # the filler's, or placer's
    value, *issuers = next((number for number in numbers if number[0]), numbers[0])
    procedure = next(filter(None, every(obr, 4)[0]), "")
    issued, sent = time(obr, 22), time(message.header, 7)
    document = Document(
        origin=origin,
        sections=frozenset(f"{every(obx, 3)[0][0]}|{raw(obx, 4)}" for obx in texts),
        names=frozenset(("hl7", value, issuer, procedure) for issuer in {*issuers} - {""} or {""}),
        procedure=procedure or UNKNOWN,
        status=STATUS.get(status, status if re.fullmatch("[A-Z]", status) else "unknown"),
        issued=issued,
        clocks=(("sent", sent),),
        attached=files,
    )
    document = understood(document, whose)
    section = every(obr, 24)[0][0]
    if "" in states:
        flaws.append(DataError("a result without status (OBX-11), which may be cut short", reason="no-result-status"))
    results = texts if files else results
    return document if document.unread else understood(document, lambda: _text(message, section, results, flaws))


def _text(message: _Message, section: str, results: Sequence[Fields], flaws: Sequence[DataError]) -> dict[str, str]:
    """The lines of the results, each with the name of what it is about where that changes."""
    if section and section not in IMAGING:
        raise DataError("of another section than imaging", reason="other-section")
    if flaws:
        raise flaws[0]
    if results and all(ADDENDUM & {*re.split(r"[^\w-]", message.raw(obx, 3))} for obx in results):
        raise DataError("an addendum without its report", reason="addendum-alone")
    about = [message.every(obx, 3)[0] for obx in results]
    names = [message.text(code[1] or code[0].split(message.within)[-1]) for code in about]
    lines, last = list[str](), ""
    several = len({name for obx, name in zip(results, names, strict=True) if message.raw(obx, 5)}) > 1
    for obx, name in zip(results, names, strict=True):
        kind, state, value = (message.raw(obx, n) for n in (2, 11, 5))
        if kind not in TEXTS and value:
            kind = kind if re.fullmatch("[A-Z]{2,3}", kind) else "unknown"
            raise DataError(f"a result of type {kind} (OBX-2), which is no text", reason=f"result-type-{kind}")
        if message.raw(obx, 6):
            raise DataError("a result in a unit (OBX-6), which is no text", reason="result-with-unit")
        for line in map(message.text, value.split(message.repeat) if kind in TEXTS and state != "D" else ()):
            headed = several and name not in ("", last) and not re.match(rf"\s*(\Z|{re.escape(name)}\s*:)", line, re.I)
            lines.append(f"{name}: {line}" if headed else line)
            last = name if line.strip() else last
    return {"text": "\n".join(lines)}
