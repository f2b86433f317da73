"""The process that FLARE's simulator copies for each task, and what such a copy does.

Started by :func:`fedtar_flare.runtime.forked.connect`, as ``python -m fedtar_flare.runtime.template SIMULATOR APP``.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from fedtar_flare.runtime.deployed import executor_of
from fedtar_flare.runtime.forked import SOCKET, template_folder
from fedtar_flare.runtime.handed import Worker, receive


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
    worker = Worker(connection)
    order, weights = receive(connection)
    worker.do(order, weights or {}, executor_of, _Heard(connection))


class _Heard:
    """An abort signal that is triggered when anything is said on a connection, or its other end is gone."""

    def __init__(self, connection: Connection):
        self._connection = connection

    @property
    def triggered(self) -> bool:
        return self._connection.poll()


if __name__ == "__main__":
    main()
