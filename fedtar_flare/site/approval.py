"""A site's own decisions: its yes to a job, and whether it takes part at all.

What is approved is the app that FLARE puts at a site (``<job id>/app_<site>``), file by file and without FLARE's
signatures: a changed job needs another yes, one that is given beforehand or submitted again does not.

The executor reads ``participation.json`` before and after each task. A paused site abstains and the job goes on without
it; after 'join' it is asked again, or joins at the next round if it missed the handshake. A site that left declines
every task.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.files import PRIVATE, read_json, write_json

FOLDER, PARTICIPATION = "approvals", "participation.json"
CLIENT_CONFIG = Path("config", "config_fed_client.json")
SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
"""Files that FLARE adds when a job is submitted: they differ from one submission to the next."""

DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Approval:
    """One approved job: its digest and name, when (UTC), and by which account."""

    digest: str
    name: str
    time: str
    by: str


def digest_of(app: Path) -> str:
    """SHA-256 of an app's files, by name and content. Raises ConfigError if the folder is no app of a job."""
    if not (app / CLIENT_CONFIG).is_file():
        raise ConfigError(f"{app} is no app of a job: it has no {CLIENT_CONFIG}")
    digest = hashlib.sha256()
    for file in sorted(path for path in app.rglob("*") if path.is_file() and path.name not in SIGNATURES):
        name, content = file.relative_to(app).as_posix().encode(), file.read_bytes()
        digest.update(b"%d %d\n" % (len(name), len(content)) + name + content)
    return digest.hexdigest()


def approve(records: Path, digest: str, name: str) -> Approval:
    """Write into the site's own folder ``records`` that it takes part in this job."""
    entry = Approval(digest, name, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), getpass.getuser())
    write_json(_file(records, digest), asdict(entry), PRIVATE)
    return entry


def withdraw(records: Path, digest: str) -> bool:
    """Take an approval back, from the next task on; returns whether there was one."""
    there = (file := _file(records, digest)).is_file()
    file.unlink(missing_ok=True)
    return there


def approvals(records: Path) -> list[Approval]:
    """All approvals, the latest last. Raises ConfigError if one cannot be read."""
    found = [_read(file) for file in (records / FOLDER).glob("*.json") if DIGEST.fullmatch(file.stem)]
    return sorted(found, key=lambda entry: (entry.time, entry.digest))


def is_approved(records: Path, digest: str) -> bool:
    """Whether the site has approved the job of this digest. Raises ConfigError if the record cannot be read."""
    file = _file(records, digest)
    return file.is_file() and _read(file).digest == digest


def require_approval(records: Path, app: Path, kind: type, runs: Callable[[Mapping[str, Any]], bool]) -> None:
    """Hold the job (:class:`Declined`) unless the site has approved it, and it is what runs.

    FLARE replaces an app's files when the server sends the job again, also while it runs. So ``runs`` must be true of
    the arguments that the approved files give an executor of class ``kind``.
    """
    from fedtar_flare.site.admission import Declined  # imports torch, which the doctor does not need

    digest = digest_of(app)
    if not is_approved(records, digest):
        raise Declined(f"held: not approved by this site (digest of the job: {digest})")
    described = [entry for entry in executors(app) if entry.get("path") == f"{kind.__module__}.{kind.__qualname__}"]
    if not any(runs(entry.get("args") or {}) for entry in described):
        raise Declined("held: the job that runs is not the one that was approved")


def executors(app: Path) -> list[dict[str, Any]]:
    """The executors that an app builds at a site, as its configuration names them: ``path``, ``args``."""
    found = [entry.get("executor") for entry in read_json(app / CLIENT_CONFIG).get("executors") or []]
    return [entry for entry in found if isinstance(entry, dict)]


def _file(records: Path, digest: str) -> Path:
    if not DIGEST.fullmatch(digest):
        raise ConfigError(f"'{digest}' is no digest of a job: 64 digits, 0-9 and a-f")
    return records / FOLDER / f"{digest}.json"


def _read(file: Path) -> Approval:
    try:
        return Approval(**read_json(file))
    except TypeError as error:
        raise ConfigError(f"{file}: not an approval ({error}); delete it, and approve the job again") from error


class Participation(Enum):
    """What a site decided."""

    TAKING_PART = "taking part"
    PAUSED = "paused"
    LEFT = "left"


def participation(records: Path) -> Participation:
    """What the site decided, from its folder ``records``; without a file it takes part.

    Raises FedTARError if the file cannot be read: the site then does nothing rather than act against its own will.
    """
    file = records / PARTICIPATION
    try:
        return Participation(json.loads(file.read_text(encoding="utf-8"))["status"])
    except FileNotFoundError:
        return Participation.TAKING_PART
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedTARError(
            f"{file} cannot be read ({error}). Run 'fedtar site pause', 'leave' or 'join' to write it anew",
            public="the site's participation file cannot be read",
        ) from error


def decide(records: Path, status: Participation) -> Path:
    """Write the site's decision atomically; returns the file."""
    records.mkdir(parents=True, exist_ok=True, mode=0o700)
    records.mkdir(parents=True, exist_ok=True, mode=0o700)
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return write_json(records / PARTICIPATION, {"status": status.value, "since": since})
