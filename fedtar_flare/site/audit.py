"""The audit: what leaves a site, one JSON line for each message, in a file at the site.

FLARE runs the job's filters after the site's own, so only the event ``AFTER_TASK_RESULT_FILTER`` shows the message that
really leaves. Scalars streamed to the server's TensorBoard pass no filter and are recorded as they are sent. A line
holds names, shapes and norms, never a value of the data: the audit may be shown to anyone who asks.

The line is on the disk before the message leaves. Where it cannot be written, an error code without any content goes in
the message's place.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import EventScope, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply

from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.messages import HEADER, TaskHeader
from fedtar_flare.registry import contract_of
from fedtar_flare.site.audit_file import append, send_to_syslog, try_to_write
from fedtar_flare.site.place import Site, state_of
from fedtar_flare.site.site_file import load_site_config

logger = logging.getLogger(__name__)
FOLDER = "audit"
HEADER_PROP = "fedtar_flare.task_header"
"""Context property with the :class:`TaskHeader` of the running task, which is gone when the filters run."""
REFUSED_PROP = "fedtar_flare.refused"
"""Context property: why a filter of this package replaced the message."""
DECISIONS = ("approved", "withdrawn")
"""Outcomes of an entry that is no message but what the site's staff has decided about a job."""
_RECORDED = "fedtar_flare.recorded"
_UNSAFE = re.compile(r"[^A-Za-z0-9._@-]")


class AuditTrail(FLComponent):
    """Records what leaves, whatever executor the job brings; what the executor recorded itself is not recorded twice.

    It listens, and empties what it cannot record; it belongs among the ``components`` of the site's ``privacy.json``.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        record_event(event_type, fl_ctx)


def record_event(event_type: str, fl_ctx: FLContext) -> None:
    """Record a message that is about to leave, or a scalar that is being streamed; empty it where that fails.

    FLARE goes on after whatever a listener raises, so the message itself is made empty.
    """
    if event_type == EventType.AFTER_TASK_RESULT_FILTER:
        result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
        task_id = fl_ctx.get_prop(FLContextKey.TASK_ID)
        if isinstance(result, Shareable) and fl_ctx.get_prop(_RECORDED) != (task_id, id(result)):
            fl_ctx.set_prop(_RECORDED, (task_id, id(result)), private=True, sticky=False)
            _record(result, fl_ctx, lambda: describe(result, fl_ctx))
    elif event_type == ANALYTIC_EVENT_TYPE and fl_ctx.get_prop(FLContextKey.EVENT_SCOPE) != EventScope.FEDERATION:
        data = fl_ctx.get_prop(FLContextKey.EVENT_DATA)
        if isinstance(data, Shareable) and fl_ctx.get_prop(_RECORDED) != id(data):
            fl_ctx.set_prop(_RECORDED, id(data), private=True, sticky=False)
            _record(data, fl_ctx, lambda: {"task": "(stream)", "outcome": "streamed", "numbers": [_tag(data)]})


def _record(message: Shareable, fl_ctx: FLContext, entry: Callable[[], Mapping[str, Any]]) -> None:
    """No record, no message."""
    try:
        write(Site(fl_ctx), _job(fl_ctx), entry())
    except Exception as error:
        logger.error("the audit could not be written, so the message was not sent: %s", error)
        message.clear()
        message.update(make_reply(ReturnCode.EXECUTION_EXCEPTION))


def describe(message: Shareable, fl_ctx: FLContext) -> dict[str, Any]:
    """One message as an audit entry, without any of its values.

    Returns task, method, run, round, step, status, reason, outcome (``passed``, ``refused`` or ``error``), ``tensors``
    (name, shape, dtype, bytes, L2 norm; the contract's group and whether it is personal data, None where the contract
    does not say), their total bytes and norm, the names of the header's ``numbers`` and ``fields``, and ``other``:
    names of anything that this package does not send.
    """
    asked = fl_ctx.get_prop(HEADER_PROP)
    refused = fl_ctx.get_prop(REFUSED_PROP)
    known = asked if isinstance(asked, TaskHeader) else None
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
    found = meta.get(HEADER)
    header: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    data = dxo.data if isinstance(dxo.data, Mapping) else {}
    contract = _contract(known.method) if known else None
    names = [name for name in sorted(data, key=str) if torch.is_tensor(data[name])]
    tensors = [_tensor(str(name), data[name], contract) for name in names]
    entry = {
        **entry,
        "outcome": entry.get("outcome") or ("refused" if refused else "passed"),
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
    """Append one entry to the job's file (see :mod:`.audit_file`), and tell the site's syslog of it.

    Raises OSError where it is not on the disk; a syslog that cannot be reached is a warning.
    """
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "job": job, "site": site.name, **entry}
    digest = append(_file(site, job), line)
    try:
        address = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated).syslog
    except ConfigError:  # every task is refused for it, and that is recorded too
        return
    try:
        if address is not None:
            what = f"{entry.get('task')} {entry.get('outcome')} {entry.get('bytes', 0)} bytes"
            send_to_syslog(address, f"{site.name} {_UNSAFE.sub('_', job)[:100]} {_UNSAFE.sub(' ', what)} {digest}")
    except OSError as error:
        logger.warning("the syslog was not told of an audit line: %s", error)


def require_writable(site: Site, fl_ctx: FLContext) -> None:
    """Before a task: raise FedTARError if its messages cannot be recorded, since nothing may leave unrecorded."""
    try:
        try_to_write(_file(site, _job(fl_ctx)))
    except OSError as error:
        raise FedTARError(
            f"the audit cannot be written ({error}); nothing is sent without it. Free the disk or repair the folder's "
            "rights",
            public="the site's audit file cannot be written",
        ) from error


def audit_files(folder: Path) -> list[Path]:
    """Audit files below a kit, a state folder, an audit folder, or the simulator's home; a file stands for itself.

    Raises FedTARError if there is none.
    """
    if folder.is_file():
        return [folder]
    patterns = ("audit/*.jsonl", "*.jsonl", "state/sites/*/audit/*.jsonl")
    for place in (state_of(folder), folder):
        for pattern in patterns:
            if found := sorted(place.glob(pattern)):
                return found
    raise FedTARError(
        f"{folder} holds no audit: looked for {', '.join(patterns)}. Name a site's startup kit, or its folder of state"
    )


def read_audit(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All entries, oldest first, without a last line that a kill cut off. Raises FedTARError if another is not JSON."""
    entries: list[dict[str, Any]] = []
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number < len(lines):
                    raise FedTARError(f"{path}, line {number}: not JSON ({error.msg})") from error
    return sorted(entries, key=lambda entry: entry.get("time", ""))


def totals(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per job, run and site: messages, refused and failed ones, streamed scalars, tensors and bytes that left."""
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    run: dict[tuple[str, str], str] = {}
    for entry in entries:
        if entry.get("outcome") in DECISIONS:
            continue
        where = str(entry.get("job")), str(entry.get("site"))
        run[where] = str(entry.get("run") or run.get(where, "-"))
        total = sums.setdefault(
            (*where, run[where]),
            {"messages": 0, "refused": 0, "errors": 0, "streamed": 0, "tensors": 0, "bytes": 0, "last": ""},
        )
        outcome = entry.get("outcome")
        total["streamed" if outcome == "streamed" else "messages"] += 1
        total["refused"] += outcome == "refused"
        total["errors"] += outcome == "error"
        total["tensors"] += len(entry.get("tensors") or [])
        total["bytes"] += int(entry.get("bytes") or 0)
        total["last"] = max(total["last"], str(entry.get("time", "")))
    return [{"job": job, "site": site, "run": run, **total} for (job, site, run), total in sums.items()]


def _file(site: Site, job: str) -> Path:
    return site.records / FOLDER / f"{_UNSAFE.sub('_', job)[:100]}.jsonl"


def _job(fl_ctx: FLContext) -> str:
    return str(fl_ctx.get_job_id() or "job")


def _contract(method: str) -> Contract | None:
    try:
        return contract_of(method)
    except FedTARError:
        return None


def _tensor(name: str, value: torch.Tensor, contract: Contract | None) -> dict[str, Any]:
    group = next((group for group in contract.groups if group.holds(name)), None) if contract else None
    norm = float(value.detach().double().square().sum()) ** 0.5 if value.numel() else 0.0
    size = value.numel() * value.element_size()
    return {
        "name": name,
        "group": group.name if group else None,
        "personal": group.personal if group else None,
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "bytes": size,
        "norm": norm,
    }


def _names(names: Iterable[Any]) -> list[str]:
    return sorted(str(name)[:200] for name in names)


def _tag(data: Shareable) -> str:
    try:
        return str(from_shareable(data).data.get("track_key", "?"))[:200]
    except (ValueError, AttributeError):
        return "?"
