"""A site's approval of a job.

An approval is for one run of the app that FLARE puts at a site (``<job id>/app_<site>``), file by file and without
FLARE's signatures: a changed job needs another approval, and so does one that is to run again.
"""

import getpass
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, locked, read_json, write_json

FOLDER = "approvals"
CLIENT_CONFIG, SERVER_CONFIG = Path("config", "config_fed_client.json"), Path("config", "config_fed_server.json")
SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
"""Files that FLARE adds when a job is submitted: they differ from one submission to the next."""

DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Approval:
    """One approved job: its digest and name, when (UTC), by which account, and for which run (empty: not begun)."""

    digest: str
    name: str
    time: str
    by: str
    run: str = ""


def digest_of(app: Path) -> str:
    """Compute the digest of a job."""
    if not (app / CLIENT_CONFIG).is_file():
        raise ConfigError(f"{app} is no app of a job: it has no {CLIENT_CONFIG}")
    digest = hashlib.sha256()
    for file in sorted(path for path in app.rglob("*") if path.is_file() and path.name not in SIGNATURES):
        name, content = file.relative_to(app).as_posix().encode(), file.read_bytes()
        digest.update(b"%d %d\n" % (len(name), len(content)) + name + content)
    return digest.hexdigest()


def approve(records: Path, digest: str, name: str) -> Approval:
    """Record in the site's own folder ``records`` that it takes part in this job."""
    entry = Approval(digest, name, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), getpass.getuser())
    write_json(_file(records, digest), asdict(entry), PRIVATE)
    return entry


def withdraw(records: Path, digest: str) -> bool:
    """Take an approval back, from the next task on; returns whether there was one."""
    existed = (file := _file(records, digest)).is_file()
    file.unlink(missing_ok=True)
    return existed


def approvals(records: Path) -> list[Approval]:
    """All approvals, the latest last. Raises ConfigError if one cannot be read."""
    entries = [_read(file) for file in (records / FOLDER).glob("*.json") if DIGEST.fullmatch(file.stem)]
    return sorted(entries, key=lambda entry: (entry.time, entry.digest))


def is_approved(records: Path, digest: str) -> bool:
    """Tell whether the site has approved a job."""
    file = _file(records, digest)
    return file.is_file() and _read(file).digest == digest


def require_approval(
    records: Path, app: Path, kind: type, runs: Callable[[Mapping[str, Any]], bool], run_id: str
) -> None:
    """Hold a job unless the site has approved it for this run, also if FLARE replaced its files while it runs."""
    from fedtar_flare.site.admission import Declined  # imports torch, which the doctor does not need

    digest = digest_of(app)
    if not is_approved(records, digest):
        raise Declined(f"held: not approved by this site (digest of the job: {digest})")
    described = executor_entry(app)
    if described.get("path") != f"{kind.__module__}.{kind.__qualname__}" or not runs(described.get("args") or {}):
        raise Declined("held: the job that runs is not the one that was approved")
    with locked(file := _file(records, digest)):
        entry = _read(file)
        if entry.run not in ("", run_id):
            text = f"held: this site's approval was for one run ({entry.run}); another needs another approval"
            raise Declined(f"{text} (digest of the job: {digest})")
        if not entry.run:
            write_json(file, asdict(replace(entry, run=run_id)), PRIVATE)


def executor_entry(app: Path) -> dict[str, Any]:
    """Find the executor that an app builds at a site."""
    executor = only(app / CLIENT_CONFIG, "executors").get("executor")
    if not isinstance(executor, dict):
        raise ConfigError(f"{app / CLIENT_CONFIG}: 'executor' is no mapping")
    return executor


def only(file: Path, key: str) -> dict[str, Any]:
    """Read the one entry of a list in a job's configuration."""
    entries = mappings(read_json(file), key, file)
    if len(entries) != 1:
        raise ConfigError(f"{file}: a job of this package has one {key[:-1]}, not {len(entries)}")
    return entries[0]


def mappings(content: Mapping[str, Any], key: str, where: Path) -> list[dict[str, Any]]:
    """Get a list of a configuration."""
    entries = content.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where}: '{key}' is no list of mappings")
    return entries


def _file(records: Path, digest: str) -> Path:
    if not DIGEST.fullmatch(digest):
        raise ConfigError(f"'{digest}' is no digest of a job: 64 digits, 0-9 and a-f")
    return records / FOLDER / f"{digest}.json"


def _read(file: Path) -> Approval:
    try:
        return Approval(**read_json(file))
    except TypeError as error:
        raise ConfigError(f"{file}: not an approval ({error}); delete it, and approve the job again") from error
