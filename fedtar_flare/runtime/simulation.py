"""Run a recipe in FLARE's simulator and say where its results are."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path

from nvflare.recipe.sim_env import SimEnv

from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.record.events import End
from fedtar_flare.record.log import read_events
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.results import BOX_LOGGER
from fedtar_flare.site.place import SITE_NAME
from fedtar_flare.site.site_file import SITES_VARIABLE, sites_folder

ALLOW_LIST = {"format_version": 2, "class_allow_list": ["nvflare.", "fedtar_flare."]}
"""The simulator's own policy: on a researcher's machine a job may use these two packages."""

RESERVED = ("server", "local", "startup")
"""Names of folders beside those of the sites in a simulator's workspace."""

TOO_CHATTY = ("TensorDownloadable", "ClientTaskWorker", BOX_LOGGER)
"""FLARE's loggers that write INFO lines at every exchange, and the closing box, which the command prints last."""


def simulate(
    recipe: MethodRecipe, sites: int | Sequence[str], *, workspace: Path | str, threads: int | None = None
) -> Path:
    """Run a recipe in the simulator; returns the results folder, ``<workspace>/<name>/server/simulate_job/fedtar``.

    An earlier run of the recipe's name in the workspace is replaced. ``sites`` as for :func:`site_names`; ``threads``
    is how many of them run at the same time, all by default.

    Raises:
        FedTARError: the run failed; names the server's log.
    """
    names = site_names(sites)
    place = Path(workspace).resolve() / recipe.name
    policy = place / "local" / "resources.json"
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text(json.dumps(ALLOW_LIST, indent=2), encoding="utf-8")
    folder = place / "server" / "simulate_job" / "fedtar"
    log = place / "server" / "log.txt"
    if (sites_files := sites_folder()) is not None:
        os.environ[SITES_VARIABLE] = str(sites_files.resolve())  # the sites' processes start in other folders
    environment = SimEnv(
        clients=names,
        num_threads=threads or len(names),
        workspace_root=str(place.parent),
        log_config=str(_console_log(place / "local" / "console_log.json")),
    )
    with contextlib.suppress(RuntimeError):  # the run record says why, better than FLARE's return code
        recipe.execute(environment)  # or exports it, where a job.py was called with FLARE's --export
    status = run_status(folder)
    if status != "completed":
        raise FedTARError(f"the run did not complete ({status}); the server's log: {log}")
    return folder


def site_names(sites: int | str | Sequence[str]) -> list[str]:
    """Names of simulated sites: a number gives site-1, site-2, ...; a text is a number, or is split at its commas.

    Raises ConfigError for no site, a name twice, and one that could not name a folder of the workspace.
    """
    if isinstance(sites, int) or (isinstance(sites, str) and sites.lstrip("-").isdecimal()):
        sites = int(sites)
        names = [f"site-{i}" for i in range(1, sites + 1)]
    else:
        names = [name.strip() for name in (sites.split(",") if isinstance(sites, str) else sites)]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"sites: at least one, and no name twice; got {sites!r}")
    for name in names:
        if not SITE_NAME.fullmatch(name) or name in RESERVED:
            raise ConfigError(
                f"sites: '{name}' cannot name a site: letters, digits, '.', '_', '@' and '-', and none of "
                + ", ".join(RESERVED)
            )
    return names


def _console_log(file: Path) -> Path:
    """FLARE's concise log without :data:`TOO_CHATTY`; warnings and log files stay whole."""
    from nvflare.fuel.utils.log_utils import concise_log_dict

    config = copy.deepcopy(concise_log_dict)
    config["filters"]["ConciseFilter"]["exclude_logger_names"] = list(TOO_CHATTY)
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return file


def run_status(folder: Path) -> str:
    """How the run in a results folder ended: ``completed``, or what happened instead."""
    try:
        events = read_events(folder)
    except FedTARError:
        return "it did not start"
    last = events[-1] if events else None
    if not isinstance(last, End):
        return "it stopped in the middle"
    return last.status if last.status == "completed" else f"{last.status}: {last.reason}"
