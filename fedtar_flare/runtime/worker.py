"""Processes that do tasks which another has handed over (see :mod:`fedtar_flare.runtime.handed`).

``python -m fedtar_flare.runtime.worker template SIMULATOR APP``: the process that the simulator's tasks copy (see
:mod:`fedtar_flare.runtime.forked`). ``... rank SOCKET RANK SIZE DEVICE FOLDER``: one of those that do a site's tasks
together (:mod:`fedtar_flare.runtime.process_group`); SOCKET is the number of an inherited socket.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from fedtar_flare.learning.ranks import Ranks, join
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.runtime.deployed import executor_of
from fedtar_flare.runtime.forked import SOCKET, template_folder
from fedtar_flare.runtime.handed import DONE, LOG, OPENED, RAISED, SCALAR, HandedSite, receive, send, words_of
from fedtar_flare.runtime.site_executor import SiteExecutor


class Worker:
    """The end that does tasks; what it says, and log records from ``level`` on, go to ``connection``."""

    def __init__(self, connection: Connection, level: int = logging.INFO):
        self._connection, self._lock = connection, threading.Lock()
        root = logging.getLogger()
        root.handlers[:] = [_ToOtherEnd(self)]
        root.setLevel(level)

    def do(
        self,
        order: Mapping[str, Any],
        weights: Tensors,
        executor_of: Callable[[Path], SiteExecutor],
        abort_signal: Any = None,
        leads: bool = True,
    ) -> None:
        """Do one task with its app's executor, and say how it ended; points and tensors only where this end leads."""

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


class _ToOtherEnd(logging.Handler):
    """Passes each record on, its message made."""

    def __init__(self, worker: Worker):
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        kept = ("name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName", "created")
        words = {name: getattr(record, name) for name in kept} | {"msg": record.getMessage()}
        if record.exc_info:
            words["exc_text"] = logging.Formatter().formatException(record.exc_info)
        self._worker.say(LOG, words)


# ---------------------------------------------------------------------- the simulator's template
class _HungUp:
    """An abort signal that is triggered when anything is said on a connection, or its other end is gone."""

    def __init__(self, connection: Connection):
        self._connection = connection

    @property
    def triggered(self) -> bool:
        return self._connection.poll()


def template(simulator: int, app: Path) -> None:
    """Import what the app's executor needs, and fork for each that connects, until the simulator ends."""
    folder = template_folder(simulator)
    ends: int = os.pidfd_open(simulator)
    executor_of(app).load_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the copies' ends are nobody's concern
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / ".socket"))
        listener.listen(16)
        (folder / ".socket").rename(folder / SOCKET)  # so that whoever finds it is answered
        try:
            while ends not in select.select([listener.fileno(), ends], [], [])[0]:
                with Connection(listener.accept()[0].detach()) as connection:
                    if os.fork() == 0:
                        _do_one_task(connection, listener)
        finally:
            (folder / SOCKET).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()


def _do_one_task(connection: Connection, listener: socket.socket) -> NoReturn:
    """What a copy does, and all of it."""
    try:
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        worker = Worker(connection)
        order, weights = receive(connection)
        worker.do(order, weights or {}, executor_of, _HungUp(connection))
    except (EOFError, BrokenPipeError):
        pass  # nobody waits for the answer
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


# ---------------------------------------------------------------------- a process among several
def rank(connection: Connection, ranks: Ranks, device: str, folder: Path) -> NoReturn:
    """Do tasks until told to end, or until the executor's process is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # unwinds, so that no half of a file is left
    orders: SimpleQueue[tuple[dict[str, Any], Tensors | None]] = SimpleQueue()

    def listen() -> None:
        """Take orders; when the other end is gone, this process ends, whatever it is doing.

        The folder stays: without it, a process that is still looking for the others there waits for it in C++ code that
        lets no other thread run, this one neither.
        """
        try:
            while True:
                orders.put(receive(connection))
        finally:
            os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    code = 1
    try:
        join(ranks, device, folder)
        _work(connection, orders, ranks)
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # what torch does at a process's end may wait for the others


def _work(connection: Connection, orders: SimpleQueue[tuple[dict[str, Any], Tensors | None]], ranks: Ranks) -> NoReturn:
    leads = ranks.rank == 0
    worker = Worker(connection, logging.INFO if leads else logging.WARNING)
    built: dict[Path, SiteExecutor] = {}

    def built_of(app: Path) -> SiteExecutor:
        if app not in built:
            executor = executor_of(app)
            executor.require_sharing()
            executor.load_libraries()
            executor.ranks = ranks
            if leads:
                executor.opened = lambda: worker.say(OPENED, {})
            built[app] = executor
        return built[app]

    while True:
        order, weights = orders.get()
        worker.do(order, weights or {}, built_of, leads=leads)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["template", simulator, app]:
            template(int(simulator), Path(app))
        case ["rank", number, place, size, device, folder]:
            rank(Connection(int(number)), Ranks(int(place), int(size)), device, Path(folder))
