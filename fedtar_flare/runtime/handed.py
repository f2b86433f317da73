"""A task handed to the processes that train together (:mod:`fedtar_flare.runtime.process_group`): what goes to and fro.

The other end (:mod:`fedtar_flare.runtime.worker`) builds the executor from the job's configuration and does the task;
logs and points of curves come back while it works, and at its end the answer or the error. All of it is JSON and
safetensors: nothing is unpickled.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from fedtar_flare import errors
from fedtar_flare.errors import FedTARError
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader
from fedtar_flare.site.place import Site, TaskAborted

POLL_SECONDS = 0.1
"""Interval at which whoever waits for an answer looks at the abort signal."""
LOG, SCALAR, OPENED, DONE, RAISED = "log", "scalar", "opened", "done", "raised"
"""What is said of a task: the last two once, at its end; before it, where others wait for that, that a site is open."""

Scalar = Callable[[str, float, int], None]
"""Takes a point of a curve (tag, value, step) that the other end would send to the server."""
Answer = tuple[Reply, Tensors | None]


def environment() -> dict[str, str]:
    """This process's environment, with the package's own place first on Python's path."""
    packages = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


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


def order_of(task: str, header: TaskHeader, site: Site) -> dict[str, Any]:
    """A task in JSON-able words."""
    place = {"name": site.name, "simulated": site.simulated, "job": site.job}
    place |= {"workspace": str(site.workspace), "app": str(site.app)}
    return {"task": task, "header": asdict(header), "site": place, "folder": str(Path.cwd())}


def take(said: dict[str, Any], tensors: Tensors | None, scalar: Scalar) -> Answer | None:
    """Take one thing that the other end said: the answer at the end, else None; raises what was raised there."""
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
    return None


class HandedSite(Site):
    """A site without FLARE's engine; the processes end with a task that is aborted or takes too long."""

    def __init__(self, *, name: str, simulated: bool, job: str, workspace: str, app: str):
        self.name, self.simulated, self.job, self.workspace = name, simulated, job, Path(workspace)
        self._app, self._abort_signal = Path(app), None
        self._start, self._most_seconds = time.monotonic(), float("inf")

    @property
    def app(self) -> Path:
        return self._app
