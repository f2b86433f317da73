"""One of the processes that do a site's tasks together (see :mod:`fedtar_flare.runtime.process_group`).

``python -m fedtar_flare.runtime.worker SOCKET RANK SIZE DEVICE FOLDER``; SOCKET is the number of an inherited socket.
"""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from fedtar_flare.learning.ranks import LostRank, Ranks, join
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.runtime.deployed import executor_of
from fedtar_flare.runtime.process_group import DONE, FAILED, LOG, LOST, OPENED, receive, send
from fedtar_flare.runtime.site_executor import SiteExecutor, reasons
from fedtar_flare.site.context import Site


class Worker:
    """Does a site's tasks as one rank; rank 0 alone sends tensors and more than warnings to ``connection``."""

    def __init__(self, connection: Connection, ranks: Ranks):
        self._connection, self._lock, self._ranks = connection, threading.Lock(), ranks
        self._executors: dict[Path, SiteExecutor] = {}
        root = logging.getLogger()
        root.handlers[:] = [_ToOtherEnd(self)]
        root.setLevel(logging.WARNING if ranks.rank else logging.INFO)

    def do(self, order: Mapping[str, Any], weights: Tensors) -> None:
        """Do one task with its app's executor, and say how it ended."""
        try:
            os.chdir(order["folder"])
            about = order["site"]
            site = Site(**about | {"workspace": Path(about["workspace"]), "app": Path(about["app"])})
            header = TaskHeader(**order["header"])
            reply, tensors = self._executor_of(site.app).perform(order["task"], header, weights, site)
        except Exception as error:
            text, public = reasons(error)
            self.say(LOST if isinstance(error, LostRank) else FAILED, {"text": text, "public": public})
        else:
            self.say(DONE, {"reply": asdict(reply)}, None if self._ranks.rank else tensors)

    def say(self, kind: str, content: Mapping[str, Any], tensors: Tensors | None = None) -> None:
        """Say one thing to the end that handed over; from any thread."""
        with self._lock:
            send(self._connection, {"kind": kind, **content}, tensors)

    def _executor_of(self, app: Path) -> SiteExecutor:
        if app not in self._executors:
            executor = executor_of(app)
            executor.require_sharing()
            executor.ranks = self._ranks
            if not self._ranks.rank:
                executor.on_opened = lambda: self.say(OPENED, {})
            self._executors[app] = executor
        return self._executors[app]


class _ToOtherEnd(logging.Handler):
    """Passes each record on, its message and traceback made one text."""

    def __init__(self, worker: Worker):
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        fields = ("name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName", "created")
        self._worker.say(LOG, {name: getattr(record, name) for name in fields} | {"msg": self.format(record)})


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
        worker = Worker(connection, ranks)
        while True:
            order, weights = orders.get()
            worker.do(order, weights or {})
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # what torch does at a process's end may wait for the others


if __name__ == "__main__":
    number, this_rank, size, device, folder = sys.argv[1:]
    rank(Connection(int(number)), Ranks(int(this_rank), int(size)), device, Path(folder))
