"""Reports of HL7 v2 messages (ORU^R01)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hl7
from pydicom.charset import CODES_TO_ENCODINGS, decode_bytes

from fedtar_flare.core.errors import DataError, collecting, decoding, within
from fedtar_flare.curation.documents import FINAL, WITHDRAWN, Document, Identifier, moment

STATUS = {"F": FINAL, "C": FINAL, "X": WITHDRAWN}
"""Of HL7's table 0123."""
IMAGING = {"", "RAD", "CT", "CUS", "NMR", "NMS", "OUS", "RUS", "RX", "VUS", "XRC"}
"""Sections of HL7's table 0074; other sections may use the same accession numbers."""
CHARSETS = {"ASCII": "ascii", "UNICODE UTF-8": "utf-8", "GB 18030-2000": "gb18030", "BIG-5": "big5",
            "KS X 1001": "euc_kr", "ISO IR14": "shift_jisx0213", "ISO IR6": "ascii", "ISO IR87": "ascii",
            "ISO IR159": "ascii", **{f"8859/{n}": f"iso8859-{n}" for n in (*range(1, 10), 15)}}  # fmt: skip
"""Codecs of HL7's table 0211; Japanese sets of two bytes begin in ASCII and are switched to by escape sequences."""
WRONG = re.compile(r"[\x0e\x0f\x1b\x80-\x9f\ufffd]")
UNSAFE = re.compile(rb"\x1b(?:\$[^)]|\(I)[^\x1b\r\n]*(?:[\r\n]|\Z)|\x1b\(B[^\x1b\r\n]*[\x80-\xff]")
"""Characters that no set prints; and switches to two bytes beyond a segment's end, or to ASCII before other bytes."""
MESSAGE = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|(?<=[\r\n\x0b]))(?=MSH([!-/:-@\[-`{-~])(?:(?!\1).){4,5}\1)")
ESCAPES = r"[HNFRSTE]|\.(?:br|fi|nf|ce|(?:sp|in|ti|sk) ?[+-]?\d{0,3})"
ACCESSION = ("IPC-1", "OBR-18", "OBR-3")
DICOM_STUDY = ("113014", "110180")
"""OBX-3 of a result that is the StudyInstanceUID."""


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


def read_hl7(file: Path, accession: str, charset: str, problems: list[DataError]) -> Iterator[Document]:
    """The reports of a file of messages; ``accession`` names the field of the accession number, such as ``OBR-2``."""
    for n, message in enumerate(MESSAGE.split(file.read_bytes())[2::2] or [b"MSH|"], 1):
        origin = f"{file}, message {n}"
        with collecting(problems), within(origin), decoding("broken", "bad-message"):
            yield from _documents(origin, message, accession, charset)


def _documents(origin: str, content: bytes, accession: str, charset: str) -> Iterator[Document]:
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
        for number, order in enumerate(orders, 1):
            where = f"{origin}, order {number}"
            yield _order(where, hl7.parse(owner + order), CHARSETS[name], accession)


def _order(origin: str, message: hl7.Message, codec: str, accession: str) -> Document:
    _, _, repeat, between, _ = message.separators
    segments = {str(segment[0]): segment for segment in reversed(message)}
    pid, results = segments["PID"], [segment for segment in message if str(segment[0]) == "OBX"]

    def at(segment: Any, field: int, component: int = 1, repetition: int = 0) -> str:
        value = str(segment[field]) if len(segment) > field else ""
        return _unescaped(message, [*value.split(repeat)[repetition].split(between), *[""] * 5][component - 1], codec)

    owners = [[at(pid, 3, part, n) for part in (1, 4, 5)] for n in range(str(pid[3]).count(repeat) + 1)]
    owners = [owner for owner in owners if owner[2] == "MR"] or owners
    fields = [field.split("-") for field in ([accession] if accession else ACCESSION)]
    numbers = [[at(segments[name], int(field), n) for n in (1, 2, 3)] for name, field in fields if name in segments]
    number, *assigner = next((parts for parts in numbers if parts[0]), [""])
    studies = [obx for obx in results if at(obx, 3) in DICOM_STUDY]
    texts = [obx for obx in results if at(obx, 2) in ("TX", "FT", "ST") and at(obx, 11) not in ("D", "W", "X")]
    lines = [part for obx in texts if obx not in studies for part in str(obx[5]).split(repeat)]
    status = at(segments["OBR"], 25)
    filler = tuple(at(segments["OBR"], 3, n) for n in (1, 2, 3))
    return Document(
        origin=origin,
        names=frozenset({("hl7", *(filler if filler[0] else (number, *assigner)), at(segments["OBR"], 4))}),
        status=STATUS.get(status, status),
        issued=moment(at(segments["OBR"], 22) or at(segments["MSH"], 7)),
        patients=tuple({Identifier(value, issuer) for value, issuer, _ in owners if value}),
        order=Identifier(number, "|".join(filter(None, assigner))),
        study=at(studies[0], 5) if studies else "",
        text=re.sub("\r\n?", "\n", "\n".join(_unescaped(message, line, codec) for line in lines)),
        unread="" if at(segments["OBR"], 24) in IMAGING else "other-section",
    )
