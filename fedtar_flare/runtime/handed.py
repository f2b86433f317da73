"""A task handed to another process on this machine: what goes to and fro, and what either end does with it.

The copies of the simulator's template (:mod:`fedtar_flare.runtime.forked`) and the processes that train together
(:mod:`fedtar_flare.runtime.process_group`) speak this. The other end builds the executor from the job's configuration
and does the task; logs and points of curves come back while it works, and at its end the answer or the error. All of it
is JSON and safetensors: nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load, save

from fedtar_flare import errors
from fedtar_flare.errors import FedTARError
from fedtar_flare.protocol.messages import Reply, TaskHeader
from fedtar_flare.site.place import Site, TaskAborted

POLL_SECONDS = 0.1
"""Interval at which whoever waits for an answer looks at the abort signal."""
LOG, SCALAR, OPENED, DONE, RAISED = "log", "scalar", "opened", "done", "raised"
"""What is said of a task: the last two once, at its end; before it, where others wait for that, that a site is open."""

Scalar = Callable[[str, float, int], None]
Tensors = Mapping[str, torch.Tensor]
Answer = tuple[Reply, Tensors | None]


class DoesTasks(Protocol):
    """What is used of an executor here (:class:`fedtar_flare.runtime.executor.MethodExecutor`)."""

    scalars_to: Scalar | None

    def perform(self, task: str, header: TaskHeader, weights: Tensors, site: Site) -> Answer:
        """Do a task."""


def environment() -> dict[str, str]:
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


# ---------------------------------------------------------------------- the end that hands over
def order_of(task: str, header: TaskHeader, site: Site) -> dict[str, Any]:
    """A task in JSON-able words, for :class:`Worker`."""
    place = {"name": site.name, "simulated": site.simulated, "job": site.job}
    place |= {"workspace": str(site.workspace), "app": str(site.app)}
    return {"task": task, "header": asdict(header), "site": place, "folder": str(Path.cwd())}


def heard(said: dict[str, Any], tensors: Tensors | None, scalar: Scalar) -> Answer | None:
    """Take one thing that the other end said: the answer at the end, else None; raises what was raised there.

    ``scalar`` takes the points of curves (tag, value, step) that the other end would send to the server.
    """
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


# ---------------------------------------------------------------------- the end that does the task
class Worker:
    """The end that does tasks; what it says goes to ``connection``.

    Args:
        level: of the log records that are passed on.
    """

    def __init__(self, connection: Connection, level: int = logging.INFO):
        self._connection, self._lock = connection, threading.Lock()
        root = logging.getLogger()
        root.handlers[:] = [_Passing(lambda words: self.say(LOG, words))]
        root.setLevel(level)

    def do(
        self,
        order: Mapping[str, Any],
        weights: Tensors,
        executor_of: Callable[[Path], DoesTasks],
        abort_signal: Any = None,
        leads: bool = True,
    ) -> None:
        """Do one task and say how it ended.

        Args:
            order: of :func:`order_of`.
            executor_of: gives the executor of the app in a folder.
            abort_signal: None: the task is never aborted from outside.
            leads: whether it tells points of curves, and the tensors of its answer.
        """

        def scalar(tag: str, value: float, step: int) -> None:
            if leads:
                self.say(SCALAR, {"tag": tag, "value": value, "step": step})

        try:
            os.chdir(order["folder"])
            site = HandedSite(abort_signal, **order["site"])
            executor = executor_of(site.app)
            executor.scalars_to = scalar
            reply, tensors = executor.perform(order["task"], TaskHeader(**order["header"]), weights, site)
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            self.say(RAISED, words_of(error))
        else:
            self.say(DONE, {"reply": asdict(reply)}, tensors if leads else None)

    def say(self, kind: str, content: Mapping[str, Any], tensors: Tensors | None = None) -> None:
        """Say one thing to the end that handed over; from any thread."""
        with self._lock:
            send(self._connection, {"kind": kind, **content}, tensors)


class _Passing(logging.Handler):
    """Gives on each record, its message made."""

    def __init__(self, give: Callable[[dict[str, Any]], None]):
        super().__init__()
        self._give = give

    def emit(self, record: logging.LogRecord) -> None:
        told = ("name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName", "created")
        words = {name: getattr(record, name) for name in told} | {"msg": record.getMessage()}
        if record.exc_info:
            words["exc_text"] = logging.Formatter().formatException(record.exc_info)
        self._give(words)


class HandedSite(Site):
    """A site without FLARE's engine."""

    def __init__(self, abort_signal: Any, *, name: str, simulated: bool, job: str, workspace: str, app: str):
        self.name, self.simulated, self.job, self.workspace = name, simulated, job, Path(workspace)
        self._app, self._abort_signal = Path(app), abort_signal
        self._start, self._most_seconds = time.monotonic(), float("inf")

    @property
    def app(self) -> Path:
        return self._app
