"""Where a task runs: the site's name, its FLARE workspace, its folders, whether it takes part, and the abort signal."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import PRIVATE, read_json, write_json
from fedtar_flare.site.policy import GUARD, PRIVACY, RESULT_FILTERS

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.signal import Signal

STATE = "fedtar_state"
"""Suffix of a site's folder for all that stays: runs by run id, ``audit/``, ``participation.json``, privacy ledger."""

HEALTH, CLOCK_AHEAD, SERVER_TIME = "fedtar_health.json", "clock_ahead", "fedtar_time"
"""File in a kit with the times of its site's heartbeats, and by how many seconds the site's clock was then ahead of the
server's, which has its time in a header of its answer."""
CLOCK_SECONDS = 60.0  # ahead or behind: more is worth a word

JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""FLARE's id of a job, and so the name of the job's folder in a kit."""

UNFIT = re.compile(r"[\s'\"\\#]")
"""Characters that no path may have where FLARE starts processes: it splits its commands there."""

SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")

CHATTY = ("nvflare.app_opt.pt.tensor_downloader.TensorDownloadable", "__main__.ClientTaskWorker")
"""FLARE's loggers of single transfers, and of single tasks in the simulator."""


class TaskAborted(Exception):
    """The job was aborted while a task ran: leave without saving."""


@dataclass
class Site:
    """The site of a task, and the task's time; no abort signal where no long work is done, or in a child process."""

    name: str
    simulated: bool
    workspace: Path
    job: str = ""
    app: Path = Path()
    """Folder of the job's app as FLARE has put it here."""
    of_job: Sequence[str] = ()
    """Sites at which the job was started, as the server says."""
    abort_signal: Signal | None = None
    at_once: int = 1
    """How many simulated sites share this machine's processors at a time."""
    most_seconds: float | None = None
    """How long the task may take; None: no limit."""
    start: float = field(default_factory=time.monotonic)

    @classmethod
    def of_task(cls, fl_ctx: FLContext, abort_signal: Signal | None = None) -> Site:
        """Make the site of a task, as FLARE describes it."""
        from nvflare.apis.fl_constant import FLContextKey  # commands that only ask for a folder need no FLARE
        from nvflare.apis.job_def import JobMetaKey

        engine, job = fl_ctx.get_engine(), str(fl_ctx.get_job_id() or "")
        workspace, simulated = engine.get_workspace(), bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False))
        clients: Any = getattr(engine, "get_clients", list)() or ()
        sites = len((fl_ctx.get_prop(FLContextKey.JOB_META) or {}).get(JobMetaKey.JOB_CLIENTS.value) or ())
        threads = getattr(getattr(getattr(engine, "client", None), "args", None), "threads", None)  # the simulator's
        return cls(
            name=str(fl_ctx.get_identity_name()),
            simulated=simulated,
            workspace=Path(workspace.get_root_dir()),
            job=job,
            app=Path(workspace.get_app_dir(job)) if job else Path(),
            of_job=[str(client.name) for client in clients],
            abort_signal=abort_signal,
            at_once=max(1, min(sites, threads or sites)) if simulated else 1,
        )

    @classmethod
    def outside_of_jobs(cls, kit: Path, simulated: str | None = None) -> Site:
        """Make the site for commands."""
        workspace = home() if simulated else kit_of(kit)
        return cls(simulated or workspace.name, bool(simulated), workspace)

    @property
    def records(self) -> Path:
        """Folder of what belongs to the site and to no single run: audit, approvals, participation, privacy ledger."""
        if not self.simulated:
            return state_of(self.workspace)
        if not SITE_NAME.fullmatch(self.name):
            raise ConfigError(f"site '{self.name}' cannot name a folder: letters, digits, '.', '_', '@', '-' only")
        return home() / "state" / "sites" / self.name

    def state_root(self, configured: Path | None) -> Path:
        """Choose the folder of the site's state: never FLARE's run folder, which is deleted with the job."""
        return configured or (home() / "state" if self.simulated else state_of(self.workspace))

    def stop_if_aborted(self) -> None:
        """Stop the task between batches, if it must end."""
        if self.abort_signal is not None and self.abort_signal.triggered:
            raise TaskAborted
        if self.most_seconds is not None and time.monotonic() - self.start > self.most_seconds:
            text = f"the task took longer than the site's policy allows (max_seconds {self.most_seconds:g})"
            raise FedTARError(text, public=text)


def check_workspace(folder: Path) -> None:
    """Refuse a simulator's workspace, or a Python, in a folder that FLARE cannot start its sites from."""
    for kind, path in (("the simulator's workspace", str(folder)), ("Python", sys.executable)):
        if UNFIT.search(path):
            text = "FLARE's simulator cannot start a site where the path has a space, a quote, a backslash or a hash"
            raise ConfigError(f"{kind} is in '{path}': {text}. Choose another folder")


def hush_simulator() -> None:
    """Take what FLARE's simulator writes of every transfer and task out of its log; warnings stay."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def home() -> Path:
    """Find the folder of caches and of simulated sites' state."""
    return Path(os.environ.get("FEDTAR_HOME") or Path.home() / ".cache" / "fedtar_flare")


def state_of(kit: Path) -> Path:
    """Folder of all that stays at a kit's site: ``<kit>.fedtar_state`` beside it, or ``$FEDTAR_STATE/<kit>``.

    Never inside the kit, whose text files FLARE's console can read.
    """
    kit = kit.resolve()
    named = os.environ.get("FEDTAR_STATE")  # for containers
    return Path(named) / kit.name if named else kit.with_name(f"{kit.name}.{STATE}")


def is_server(kit: Path) -> bool:
    """Tell a server's kit from a site's; ConfigError for any other folder."""
    if (kit / "startup" / "fed_server.json").is_file():
        return True
    if (kit / "startup" / "fed_client.json").is_file():
        return False
    raise ConfigError(f"{kit} is no kit of a FLARE server or site: startup/fed_client.json is not there")


def kit_of(folder: Path) -> Path:
    """Find the kit that a user means."""
    folder = folder.expanduser().resolve()
    for kit in (folder, folder.parent) if folder.name in ("startup", "local") else (folder,):
        if (kit / "startup" / "fed_client.json").is_file():
            return kit
    text = f"{folder} is no site's startup kit: it has no startup/fed_client.json"
    raise ConfigError(f"{text}. Name the folder that holds 'startup' and 'local'")


def end_unfit_simulator(job: str) -> None:
    """End FLARE's simulator at once, in one line, where it could not start its sites from the workspace."""
    folder = Path.cwd().parent  # the simulator builds its server in <workspace>/server
    if not (folder / "server" / job / "app_server").is_dir():
        return
    hush_simulator()
    try:
        check_workspace(folder)
    except ConfigError as error:
        logging.getLogger(__name__).error(str(error))
        raise SystemExit(2) from None  # it ends the server's thread; anything else would be three long tracebacks


def clock_ahead(kit: Path) -> float | None:
    """By how many seconds a site's clock is ahead of its server's; None where no server has said its time."""
    try:
        return float(read_json(kit / HEALTH)[CLOCK_AHEAD])
    except (ConfigError, KeyError, TypeError):
        return None


class Participation(Enum):
    """A site's decision."""

    TAKING_PART = "taking part"
    PAUSED = "paused"
    LEFT = "left"


def participation(records: Path) -> Participation:
    """Read the site's decision; without one it takes part."""
    file = records / "participation.json"
    try:
        return Participation(json.loads(file.read_text(encoding="utf-8"))["status"])
    except FileNotFoundError:
        return Participation.TAKING_PART
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{file} cannot be read ({error}). Run 'fedtar site pause', 'leave' or 'join' to write it anew"
        raise FedTARError(text, public="the site's participation file cannot be read") from error


def decide(records: Path, status: Participation) -> Path:
    """Write the site's decision atomically."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return write_json(records / "participation.json", {"status": status.value, "since": since}, PRIVATE)


def guard_is_only_filter(workspace: Path) -> bool:
    """Tell whether rows of image features may leave: only where the site's policy has no result filter but the guard,
    since any other may be a privacy filter, whose guarantee does not include them.
    """
    file = workspace / "local" / PRIVACY
    try:
        if not file.exists():
            return True
        scopes = _list(read_json(file)["scopes"])
        filters = [entry["path"] for scope in scopes for entry in _list(scope.get(RESULT_FILTERS, []))]
    except (OSError, ConfigError, KeyError, TypeError, AttributeError):
        return False
    return all(path == GUARD for path in filters)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value
