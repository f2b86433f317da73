"""The audit: what leaves a site, one JSON line for each message, in a file at the site.

FLARE runs the job's filters after the site's own, so only the event ``AFTER_TASK_RESULT_FILTER`` shows the message that
really leaves. A line holds names, shapes and norms, never a value of the data: the audit may be shown to anyone.

The line is on the disk before the message leaves. Where it cannot be written, an error code without any content goes in
the message's place. A line ends with ``prev``, the SHA-256 of the line before it (64 zeros in the first): a line that
is changed, left out or put in breaks the chain at the next one. Lines cut off at the end, and whole files, leave no
gap: for these, let the site file send every line's digest to a syslog on another machine.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import clean, json_lines, private_folder
from fedtar_flare.core.settings import matches
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.messages import ABSTAIN, HEADER, OK, TaskHeader
from fedtar_flare.registry import contract_of
from fedtar_flare.site.context import CLOCK_AHEAD, CLOCK_SECONDS, Site, clock_ahead, state_of
from fedtar_flare.site.site_file import SITE_FILE, load_site_config, sites_folder

logger = logging.getLogger(__name__)
FOLDER = "audit"
HEADER_PROP = "fedtar_flare.task_header"
"""Context property with the :class:`TaskHeader` of the running task, which is gone when the filters run."""
REFUSED_PROP = "fedtar_flare.refused"
"""Context property: why a filter of this package replaced the message."""
DECISIONS = ("approved", "withdrawn", "released")
"""Outcomes of an entry that is no message but a decision of the site's staff."""
_RECORDED = "fedtar_flare.recorded"
_UNSAFE = re.compile(r"[^A-Za-z0-9._@-]")
FIRST = "0" * 64
"""``prev`` of a file's first line."""
LINK = "prev"
TRIAL = 65536
"""Bytes that must find room before a task begins."""
LARGEST_LINE = 16_000_000
"""How far back the last line's beginning is looked for, in bytes: more than a message of 200,000 tensors takes."""


class AuditTrail(FLComponent):
    """Records what leaves, whatever executor the job brings, and nothing twice; a component of ``privacy.json``."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        record_event(event_type, fl_ctx)


def record_event(event_type: str, fl_ctx: FLContext) -> None:
    """Record a message that is about to leave; empty it where that fails.

    FLARE goes on after whatever a listener raises, so the message itself is made empty.
    """
    if event_type != EventType.AFTER_TASK_RESULT_FILTER:
        return
    message = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
    known = (fl_ctx.get_prop(FLContextKey.TASK_ID), id(message))
    if not isinstance(message, Shareable) or fl_ctx.get_prop(_RECORDED) == known:
        return
    fl_ctx.set_prop(_RECORDED, known, private=True, sticky=False)
    try:
        site = Site.of_task(fl_ctx)
        write(site, site.job or "job", describe_message(message, fl_ctx))
    except Exception as error:
        logger.error("the audit could not be written, so the message was not sent: %s", error)
        message.clear()
        message.update(make_reply(ReturnCode.EXECUTION_EXCEPTION))


def describe_message(message: Shareable, fl_ctx: FLContext) -> dict[str, Any]:
    """Describe one message as an audit entry, without any of its values.

    Of each tensor it has the L2 norm, the contract's group, and whether that is personal data (None where the contract
    does not say); ``other`` names anything that this package does not send.
    """
    task = fl_ctx.get_prop(HEADER_PROP)
    known = task if isinstance(task, TaskHeader) else None
    entry: dict[str, Any] = {"task": str(fl_ctx.get_prop(FLContextKey.TASK_NAME))}
    for name, field in (("method", "method"), ("run", "run_id"), ("round", "round"), ("step", "step")):
        entry[name] = getattr(known, field, None)
    code = message.get_return_code()
    if code not in (None, ReturnCode.OK):
        entry |= {"outcome": "error", "status": str(code)}
    try:
        dxo = from_shareable(message)
    except ValueError:
        return {"outcome": "passed", **entry, "other": _names(set(message) - {ReservedHeaderKey.HEADERS})}
    meta = dxo.meta if isinstance(dxo.meta, Mapping) else {}
    header: Mapping[str, Any] = meta[HEADER] if isinstance(meta.get(HEADER), Mapping) else {}
    data = dxo.data if isinstance(dxo.data, Mapping) else {}
    contract = None
    with suppress(FedTARError):
        contract = contract_of(known.method) if known else None
    names = [name for name in sorted(data, key=str) if torch.is_tensor(data[name])]
    tensors = [_tensor(str(name), data[name], contract) for name in names]
    entry = {
        **entry,
        "outcome": entry.get("outcome") or ("refused" if fl_ctx.get_prop(REFUSED_PROP) else "passed"),
        "status": header.get("status", entry.get("status")),
        "reason": str(header.get("reason") or "")[:512],
        "kind": str(getattr(dxo.data_kind, "value", dxo.data_kind)),
        "tensors": tensors,
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "norm": sum(tensor["norm"] ** 2 for tensor in tensors) ** 0.5,
        "numbers": _names(header.get("numbers") or {}),
        "fields": _names(header.get("payload") or {}),
    }
    other = [name for name in data if not torch.is_tensor(data[name])] + [name for name in meta if name != HEADER]
    return entry | {"other": _names([*other, *(set(message) - {ReservedHeaderKey.HEADERS, "DXO"})])}


def write(site: Site, job: str, entry: Mapping[str, Any]) -> None:
    """Append one entry to the job's file and send its digest to the site's syslog, if that can be reached."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "job": job, "site": site.name, **entry}
    if not site.simulated and abs(ahead := clock_ahead(site.workspace) or 0.0) > CLOCK_SECONDS:
        logger.warning("this machine's clock is %+.0f s off the server's: see 'fedtar doctor'", ahead)
        line |= {CLOCK_AHEAD: round(ahead)}
    digest = append(_file(site, job), line)
    try:
        if (address := _syslog_address(site)) is not None:
            text = f"{entry.get('task')} {entry.get('outcome')} {entry.get('bytes', 0)} bytes"
            send_to_syslog(address, f"{site.name} {_UNSAFE.sub('_', job)[:100]} {_UNSAFE.sub(' ', text)} {digest}")
    except OSError as error:
        logger.warning("an audit line was not sent to the syslog: %s", error)


def require_writable(site: Site) -> None:
    """Refuse a task whose messages cannot be recorded, since nothing may leave unrecorded."""
    try:
        try_to_write(_file(site, site.job or "job"))
    except OSError as error:
        text = f"the audit cannot be written ({error}), without which nothing is sent: free the disk or mend its rights"
        raise FedTARError(text, public="the site's audit file cannot be written") from error


def audit_files(folder: Path) -> list[Path]:
    """Find the files of an audit."""
    if folder.is_file():
        return [folder]
    patterns = ("audit/*.jsonl", "*.jsonl", "state/sites/*/audit/*.jsonl")
    for parent in (state_of(folder), folder):
        for pattern in patterns:
            if files := sorted(parent.glob(pattern)):
                return files
    raise FedTARError(f"{folder} holds no audit ({', '.join(patterns)}): name a site's startup kit, or its state")


def read_audit(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Read all entries, without a last line that a kill cut off."""
    entries = [entry for path in files for _, entry in json_lines(path, "an audit")]
    return sorted(entries, key=lambda entry: entry.get("time", ""))


def totals(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Count what left."""
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    run: dict[tuple[str, str], str] = {}
    for entry in entries:
        if entry.get("outcome") in DECISIONS:
            continue
        where = str(entry.get("job")), str(entry.get("site"))
        run[where] = str(entry.get("run") or run.get(where, "-"))
        none = dict.fromkeys(("messages", "refused", "errors", "tensors", "bytes"), 0)
        total = sums.setdefault((*where, run[where]), none | {"last": ""})
        outcome = entry.get("outcome")
        total["messages"] += 1
        total["refused"] += outcome == "refused"
        total["errors"] += outcome != "refused" and entry.get("status") not in (None, OK, ABSTAIN)
        total["tensors"] += len(entry.get("tensors") or [])
        total["bytes"] += int(entry.get("bytes") or 0)
        total["last"] = max(total["last"], str(entry.get("time", "")))
    return [{"job": job, "site": site, "run": run, **total} for (job, site, run), total in sums.items()]


_syslog: dict[tuple[Any, ...], str | None] = {}
"""Syslog addresses by site and by the identity of its site file, which is read once and not for every message."""


def _syslog_address(site: Site) -> str | None:
    """Where the site file wants digests sent; None: nowhere. A change of the file counts from the next message on."""
    folder = sites_folder()
    identity: tuple[Any, ...] = site.name, site.simulated, folder
    for file in (*([folder / f"{site.name}.yaml"] if folder else []), site.workspace / "local" / SITE_FILE):
        status = file.stat() if file.is_file() else None
        identity += (file, status and (status.st_ino, status.st_size, status.st_mtime_ns))
    if identity not in _syslog:
        try:
            config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        except ConfigError:  # every task is refused for it, and that is recorded too
            return None
        _syslog[identity] = config.syslog
    return _syslog[identity]


def _file(site: Site, job: str) -> Path:
    return site.records / FOLDER / f"{_UNSAFE.sub('_', job)[:100]}.jsonl"


def _tensor(name: str, value: torch.Tensor, contract: Contract | None) -> dict[str, Any]:
    group = next((group for group in contract.groups if matches(name, group.names)), None) if contract else None
    return {
        "name": name,
        "group": group.name if group else None,
        "personal": group.personal if group else None,
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "bytes": value.numel() * value.element_size(),
        "norm": float(value.detach().double().square().sum()) ** 0.5,
    }


def _names(names: Iterable[Any]) -> list[str]:
    return sorted(str(name)[:200] for name in names)


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
    """Result of :func:`verify`: chained lines, the last one's digest (the syslog has it), the first problem, if any."""

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
    private_folder(file.parent)
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
