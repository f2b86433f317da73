"""Tasks of FLARE's simulator in copies of one process that has imported what tasks need.

With fewer threads than sites, the simulator starts a process per site and task, and half of such a process's seconds
are imports. Here the first task starts one more process, the *template* (:mod:`fedtar_flare.flare.template`), which
imports and then waits. Each later task's process connects to it; the template forks, its copy builds the executor from
the job's own configuration and does the task, and the task's own process passes on logs and scalars and sends the
answer. A copy has what a new process has, and nothing of an earlier task: the same bits come out.

What goes between the two is JSON and safetensors: nothing is unpickled.

The template ends with the simulator. There is none at a real site, beside a GPU (whose driver forbids copies), for
classes outside this package, and on other systems than Linux; a task that finds none is done where it is.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.job_def import JobMetaKey
from safetensors.torch import load, save

from fedtar_flare import errors
from fedtar_flare.errors import FedTARError
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.site.place import Site, TaskAborted

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.signal import Signal

    from fedtar_flare.protocol.messages import TaskHeader

PACKAGE = "fedtar_flare."
TEMPLATE = "fedtar_flare.flare.template"
SOCKET = "socket"
POLL_SECONDS = 0.1
"""Interval at which a waiting task looks at the abort signal."""
LOG, SCALAR, DONE, RAISED = "log", "scalar", "done", "raised"
"""What a copy says: the last two once, at its end."""

Scalar = Callable[[str, float, int], None]
Tensors = Mapping[str, torch.Tensor]


def is_swapped(fl_ctx: FLContext) -> bool:
    """Whether the simulator ends this process after its task, to let another site's run."""
    arguments = getattr(getattr(fl_ctx.get_engine(), "client", None), "args", None)
    threads = getattr(arguments, "threads", None)
    sites = (fl_ctx.get_prop(FLContextKey.JOB_META) or {}).get(JobMetaKey.JOB_CLIENTS.value, ())
    return threads is not None and threads < len(sites)


def may_fork(executor: object) -> bool:
    """Whether copies of a process may do this executor's tasks here."""
    ours = type(executor).__module__.startswith(PACKAGE)
    return ours and sys.platform == "linux" and hasattr(os, "pidfd_open") and not torch.cuda.is_available()


def connect(app: Path, simulator: int) -> Connection | None:
    """A fresh copy of the template of this simulator (a process id); starts the template where there is none.

    ``app`` is the folder of the job's app, whose executor the template gets ready for. None while there is no template
    to be had.
    """
    folder = template_folder(simulator)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if folder.lstat().st_uid != os.getuid() or folder.lstat().st_mode & 0o077:
            return None  # somebody else's
        with suppress(OSError):
            return Client(str(folder / SOCKET), "AF_UNIX")
        return None
    except OSError:
        return None
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", TEMPLATE, str(simulator), str(app)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(),
        )
    return None


def template_folder(simulator: int) -> Path:
    """Where the template of a simulator is reached."""
    started = Path(f"/proc/{simulator}/stat").read_text().rpartition(")")[2].split()[19]
    return Path(tempfile.gettempdir()) / f"fedtar-{os.getuid()}-{simulator}-{started}"


def perform(
    connection: Connection,
    task: str,
    header: TaskHeader,
    weights: Tensors,
    site: Site,
    abort_signal: Signal,
    scalar: Scalar,
) -> tuple[Reply, Tensors | None]:
    """As ``executor.perform(task, header, weights, site)``, in a copy of the template; raises what that raises.

    ``scalar`` takes the points of curves (tag, value, step) that the copy would send to the server.

    Raises:
        FedTARError: also when the copy ends without an answer.
    """
    place = {"name": site.name, "job": site.job, "workspace": str(site.workspace), "app": str(site.app)}
    order = {"task": task, "header": asdict(header), "site": place, "folder": str(Path.cwd())}
    with connection:
        send(connection, order, weights)
        told = False
        while True:
            if abort_signal.triggered and not told:
                connection.send_bytes(b"abort")
                told = True
            try:
                if not connection.poll(POLL_SECONDS):
                    continue
                said, tensors = receive(connection)
            except (EOFError, OSError) as error:
                text = "the process that did the task ended without an answer (too little memory?)"
                raise FedTARError(text, public=text) from error
            kind = said.pop("kind")
            if kind == LOG:
                logger = logging.getLogger(said["name"])
                if logger.isEnabledFor(said["levelno"]):
                    logger.handle(logging.makeLogRecord(said))
            elif kind == SCALAR:
                scalar(said["tag"], said["value"], said["step"])
            elif kind == RAISED:
                raise error_of(said)
            else:
                return Reply(**said["reply"]), tensors


def _environment() -> dict[str, str]:
    """This process's environment, with the package's own place first on Python's path."""
    packages = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


# ---------------------------------------------------------------------- what goes between the two
def send(connection: Connection, content: Mapping[str, Any], tensors: Tensors | None = None) -> None:
    """Send JSON-able content, and tensors where there are any (None stays None)."""
    connection.send_bytes(json.dumps({"content": content, "tensors": tensors is not None}).encode())
    if tensors is not None:
        connection.send_bytes(save({name: value.contiguous() for name, value in tensors.items()}))


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    """What :func:`send` has sent. Raises EOFError, OSError when the other end is gone."""
    message = json.loads(connection.recv_bytes())
    return message["content"], load(connection.recv_bytes()) if message["tensors"] else None


def words_of(error: Exception) -> dict[str, Any]:
    """An exception in JSON-able words, for :func:`error_of`."""
    own = {name: getattr(error, name, None) for name in ("public", "reason", "errno", "strerror", "filename")}
    types = [one.__name__ for one in type(error).__mro__]
    return {"types": types, "text": str(error), "notes": getattr(error, "__notes__", [])} | own


def error_of(words: Mapping[str, Any]) -> Exception:
    """The exception again: an error of this package, an abort or an OSError as what it was; else one of its name."""
    types, text = words["types"], words["text"]
    ours = getattr(errors, types[0], None)
    error: Exception
    if types[0] == TaskAborted.__name__:
        error = TaskAborted(text)
    elif FedTARError.__name__ in types:
        kind = ours if isinstance(ours, type) and issubclass(ours, FedTARError) else FedTARError
        error = FedTARError.__new__(kind)
        Exception.__init__(error, text)
        vars(error).update({name: words[name] for name in ("public", "reason") if words[name] is not None})
    elif OSError.__name__ in types and words["errno"] is not None:
        error = OSError(words["errno"], words["strerror"], words["filename"])
    else:
        error = type(types[0], (RuntimeError,), {})(text)
    for note in words["notes"]:
        error.add_note(note)
    return error
