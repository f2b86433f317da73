"""One of the processes that do a site's tasks together.

Started by :class:`.process_group.ProcessGroup`, as ``python -m fedtar_flare.runtime.rank SOCKET RANK
SIZE DEVICE FOLDER``, where SOCKET is the number of an inherited socket.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from fedtar_flare.learning.ranks import Ranks, join
from fedtar_flare.runtime.deployed import executor_of
from fedtar_flare.runtime.handed import OPENED, Tensors, Worker, receive
from fedtar_flare.runtime.site_executor import SiteExecutor

Orders = SimpleQueue[tuple[dict[str, Any], Tensors | None]]


def main() -> None:
    """Do tasks until told to end, or until the executor's process is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # unwinds, so that no half of a file is left
    number, rank, size, device, folder = sys.argv[1:]
    connection = Connection(int(number))
    ranks = Ranks(int(rank), int(size))
    orders: Orders = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    code = 1
    try:
        join(ranks, device, Path(folder))
        _work(connection, orders, ranks)
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # what torch does at a process's end may wait for the others


def _listen(connection: Connection, orders: Orders) -> None:
    """Take orders; when the other end is gone, this process ends, whatever it is doing.

    The folder stays: without it, a process that is still looking for the others there waits for it in C++ code that
    lets no other thread run, this one neither.
    """
    try:
        while True:
            orders.put(receive(connection))
    finally:
        os._exit(1)


def _work(connection: Connection, orders: Orders, ranks: Ranks) -> NoReturn:
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
    main()
