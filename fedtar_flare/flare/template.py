"""The process that FLARE's simulator copies for each task, and what such a copy does.

Started by :func:`fedtar_flare.flare.forked.connect`, as ``python -m fedtar_flare.flare.template SIMULATOR APP``.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from fedtar_flare.flare.deployed import executor_of
from fedtar_flare.flare.forked import DONE, LOG, RAISED, SCALAR, SOCKET, receive, send, template_folder, words_of
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.site.place import Site


def main() -> None:
    """Import what the app's executor needs, and fork for each that connects, until the simulator ends."""
    simulator, app = int(sys.argv[1]), Path(sys.argv[2])
    folder = template_folder(simulator)
    ends: int = os.pidfd_open(simulator)
    executor_of(app).load_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the copies' ends are nobody's concern
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / ".socket"))
        listener.listen(16)
        (folder / ".socket").rename(folder / SOCKET)  # so that whoever finds it is heard
        try:
            while ends not in select.select([listener.fileno(), ends], [], [])[0]:
                _fork(listener)
        finally:
            (folder / SOCKET).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()


def _fork(listener: socket.socket) -> None:
    connection = Connection(listener.accept()[0].detach())
    with connection:
        if os.fork() == 0:
            _do_one_task(connection, listener)


def _do_one_task(connection: Connection, listener: socket.socket) -> NoReturn:
    """What a copy does, and all of it."""
    try:
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _answer(connection)
    except (EOFError, BrokenPipeError):
        pass  # nobody waits for the answer
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _answer(connection: Connection) -> None:
    order, weights = receive(connection)
    lock = threading.Lock()

    def say(kind: str, content: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> None:
        with lock:
            send(connection, {"kind": kind, **content}, tensors)

    os.chdir(order["folder"])
    root = logging.getLogger()
    root.handlers[:] = [_Passing(lambda words: say(LOG, words))]
    root.setLevel(logging.INFO)
    try:
        site = _CopiedSite(_Heard(connection), **order["site"])
        executor = executor_of(site.app)
        executor.scalars_to = lambda tag, value, step: say(SCALAR, {"tag": tag, "value": value, "step": step})
        reply, tensors = executor.perform(order["task"], TaskHeader(**order["header"]), weights or {}, site)
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        say(RAISED, words_of(error))
    else:
        say(DONE, {"reply": asdict(reply)}, tensors)


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


class _Heard:
    """An abort signal that is triggered when anything is said on a connection, or its other end is gone."""

    def __init__(self, connection: Connection):
        self._connection = connection

    @property
    def triggered(self) -> bool:
        return self._connection.poll()


class _CopiedSite(Site):
    """A simulated site without FLARE's engine."""

    def __init__(self, abort_signal: Any, *, name: str, job: str, workspace: str, app: str):
        self.name, self.simulated, self.job, self.workspace = name, True, job, Path(workspace)
        self._app, self._abort_signal = Path(app), abort_signal
        self._start, self._most_seconds = time.monotonic(), float("inf")

    @property
    def app(self) -> Path:
        return self._app


if __name__ == "__main__":
    main()
