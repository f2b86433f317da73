"""The audit's files: lines that are on the disk before a message leaves, each bound to the one before.

A line ends with ``prev``, the SHA-256 of the line before it (64 zeros in the first): a line that is changed, left out
or put in breaks the chain at the next one. Lines cut off at the end, and whole files, leave no gap: for these, let the
site file send every line's digest to a syslog on another machine.
"""

import errno
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtar_flare.core.files import clean

FIRST = "0" * 64
"""``prev`` of a file's first line."""
LINK = "prev"
TRIAL = 65536
"""Bytes that must find room before a task begins."""
LARGEST_LINE = 16_000_000
"""How far back the last line's beginning is looked for, in bytes: more than a message of 200,000 tensors takes."""


def append(file: Path, entry: Mapping[str, Any]) -> str:
    """Append an entry as one line, sync it to the disk, read it back; returns the line's SHA-256.

    The file is made if need be, for its owner alone. A line that a kill cut off is taken away first: its message never
    left. Raises OSError, with the file as it was before, if the line is not on the disk whole.
    """
    new = not file.exists()
    with _locked(file) as handle:
        end, last = _last_line(handle)
        line = json.dumps({**clean(entry), LINK: _digest(last) if last else FIRST}, allow_nan=False).encode() + b"\n"
        try:
            os.ftruncate(handle, end)
            written = os.pwrite(handle, line, end)
            os.fsync(handle)
            if written != len(line) or os.pread(handle, len(line), end) != line:
                raise OSError(errno.ENOSPC, "a line was not written whole", str(file))
        except OSError:
            os.ftruncate(handle, end)
            raise
    if new:
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return _digest(line[:-1])


def try_to_write(file: Path) -> None:
    """Raise OSError if a line cannot be appended now; nothing is left of the trial."""
    with _locked(file) as handle:
        end = os.fstat(handle).st_size
        try:
            os.pwrite(handle, bytes(TRIAL), end)
            os.fsync(handle)
            if len(os.pread(handle, TRIAL, end)) != TRIAL:
                raise OSError(errno.ENOSPC, "there is no room for a line", str(file))
        finally:
            os.ftruncate(handle, end)


@dataclass(frozen=True)
class Verified:
    """Result of :func:`verify`: the number of chained lines, the last one's digest (the syslog has it), and the first
    problem, if any.
    """

    file: Path
    lines: int
    digest: str
    problem: str = ""


def verify(file: Path) -> Verified:
    """Follow a file's chain from its first line."""
    before = FIRST
    *whole, rest = file.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            link = json.loads(line).get(LINK)
        except (ValueError, AttributeError):
            return Verified(file, number - 1, before, f"line {number} is not one of the audit")
        if link != before:
            return Verified(file, number - 1, before, f"line {number} does not follow the line before it")
        before = _digest(line)
    cut = f"line {len(whole) + 1} is cut off (its message did not leave)" if rest else ""
    return Verified(file, len(whole), before, cut)


def send_to_syslog(address: str, text: str) -> None:
    """Send one datagram to a syslog at a socket's path, or ``host:port``; OSError also for a wrong address."""
    message = f"<110>fedtar: {text}".encode()  # facility 13 (audit), informational
    host, _, port = address.rpartition(":")
    if address.startswith("/"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(message, address)
        return
    family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sender:
        sender.sendto(message, target)


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _last_line(handle: int) -> tuple[int, bytes]:
    """Where the last whole line ends, and that line; (0, nothing) in an empty file."""
    size = os.fstat(handle).st_size
    start = max(0, size - LARGEST_LINE)
    tail = os.pread(handle, size - start, start)
    end = tail.rfind(b"\n") + 1
    last = tail[tail.rfind(b"\n", 0, max(0, end - 1)) + 1 : max(0, end - 1)]
    return (start + end, last) if end else (0, b"")


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
