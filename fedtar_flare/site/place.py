"""Where a task runs: the site's name, its FLARE workspace, its folders, and the abort signal."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fedtar_flare.errors import ConfigError

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.signal import Signal

STATE = "fedtar_state"
"""Folder of a kit for all that stays: state of runs by run id, ``audit/``, ``participation.json``, privacy ledger."""

_SITE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")


class TaskAborted(Exception):
    """The job was aborted while a task ran: leave without saving."""


class Site:
    """Where a task runs; ``abort_signal`` is None where no long work is done."""

    def __init__(self, fl_ctx: FLContext, abort_signal: Signal | None = None):
        from nvflare.apis.fl_constant import FLContextKey  # commands that only ask for a folder need no FLARE

        self.name = str(fl_ctx.get_identity_name())
        self.simulated = bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False))
        self.engine = fl_ctx.get_engine()
        self.workspace = Path(self.engine.get_workspace().get_root_dir())
        self._abort_signal = abort_signal

    @property
    def records(self) -> Path:
        """Folder of what belongs to the site and to no single run: audit, participation, privacy ledger."""
        return simulated_records(self.name) if self.simulated else self.workspace / STATE

    def state_root(self, configured: Path | None) -> Path:
        """Folder of the site state: the site file's, else the kit's own, else (simulator) the user's cache.

        It is never FLARE's run folder, which is deleted with the job and, in the simulator, at every start.
        """
        if configured is not None:
            return configured
        return home() / "state" if self.simulated else self.workspace / STATE

    def stop_if_aborted(self) -> None:
        """Raise :class:`TaskAborted` if the job was aborted; called between batches."""
        if self._abort_signal is not None and self._abort_signal.triggered:
            raise TaskAborted


def home() -> Path:
    """``$FEDTAR_HOME``, else ``~/.cache/fedtar_flare``: caches and simulated site state."""
    return Path(os.environ.get("FEDTAR_HOME") or Path.home() / ".cache" / "fedtar_flare")


def simulated_records(site: str) -> Path:
    """A simulated site's ``fedtar_state``. Raises ConfigError if the site's name cannot name a folder."""
    if not _SITE_NAME.match(site):
        raise ConfigError(f"site '{site}' cannot name a folder: letters, digits, '.', '_', '@', '-' only")
    return home() / "state" / "sites" / site


def kit_of(folder: Path) -> Path:
    """The kit that a user means by this folder: the folder itself, or the one above ``startup`` or ``local``.

    Raises ConfigError if it is no site's kit.
    """
    folder = folder.expanduser().resolve()
    for kit in (folder, folder.parent) if folder.name in ("startup", "local") else (folder,):
        if (kit / "startup" / "fed_client.json").is_file():
            return kit
    raise ConfigError(
        f"{folder} is no site's startup kit: it has no startup/fed_client.json. Name the folder that holds 'startup' "
        "and 'local'"
    )
