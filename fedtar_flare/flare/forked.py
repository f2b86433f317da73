"""Tasks of FLARE's simulator in copies of one process that has imported what tasks need.

With fewer threads than sites, the simulator starts a process per site and task, and half of such a process's seconds
are imports. Here the first task starts one more process, the *template*, which imports and then waits. Each later
task's process connects to it; the template forks, its copy does the task, and the task's own process passes on logs and
scalars and sends the answer. A copy has what a new process has, and nothing of an earlier task: the same bits come out.

The template ends with the simulator. There is none at a real site, beside a GPU (whose driver forbids copies), for
classes outside this package, and on other systems than Linux; a task that finds none is done where it is.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.job_def import JobMetaKey

from fedtar_flare.errors import FedTARError
from fedtar_flare.site.place import Site

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.signal import Signal

    from fedtar_flare.protocol.messages import Reply, TaskHeader

PACKAGE = "fedtar_flare."
SOCKET = "socket"
POLL_SECONDS = 0.1
"""Interval at which a waiting task looks at the abort signal."""
LOG, SCALAR, DONE, RAISED = "log", "scalar", "done", "raised"
"""What a copy says: the last two once, at its end."""

Scalar = Callable[[str, float, int], None]
Tensors = Mapping[str, torch.Tensor]


class Performer(Protocol):
    """What of an executor is needed here; it survives pickling before its first task."""

    scalars_to: Scalar | None

    def load_libraries(self) -> None: ...

    def perform(self, task: str, header: TaskHeader, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]: ...


def is_swapped(fl_ctx: FLContext) -> bool:
    """Whether the simulator ends this process after its task, to let another site's run."""
    arguments = getattr(getattr(fl_ctx.get_engine(), "client", None), "args", None)
    threads = getattr(arguments, "threads", None)
    sites = (fl_ctx.get_prop(FLContextKey.JOB_META) or {}).get(JobMetaKey.JOB_CLIENTS.value, ())
    return threads is not None and threads < len(sites)


def may_fork(executor: Performer) -> bool:
    """Whether copies of a process may do this executor's tasks here."""
    ours = type(executor).__module__.startswith(PACKAGE)
    return ours and sys.platform == "linux" and hasattr(os, "pidfd_open") and not torch.cuda.is_available()


def connect(executor: Performer, simulator: int) -> Connection | None:
    """A fresh copy of the template of this simulator (a process id); starts the template where there is none.

    None while there is none to be had.
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
        start_template(executor, simulator)
    return None


def template_folder(simulator: int) -> Path:
    """Where the template of a simulator is reached."""
    started = Path(f"/proc/{simulator}/stat").read_text().rpartition(")")[2].split()[19]
    return Path(tempfile.gettempdir()) / f"fedtar-{os.getuid()}-{simulator}-{started}"


def start_template(executor: Performer, simulator: int) -> subprocess.Popen[bytes]:
    """Start a template for tasks of this executor; it ends with the process ``simulator``."""
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(simulator)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, env=_environment()
    )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(pickle.dumps(executor))
    return process


def perform(
    connection: Connection,
    executor: Performer,
    task: str,
    header: TaskHeader,
    weights: Tensors,
    site: Site,
    abort_signal: Signal,
    scalar: Scalar,
) -> tuple[Reply, Tensors | None]:
    """As ``executor.perform(task, header, weights, site)``, in a copy of the template; raises what that raises.

    ``scalar`` takes the points of curves (tag, value, step) that the copy would send to the server.
    """
    place = (site.name, site.job, site.workspace, site.app)
    with connection:
        connection.send_bytes(pickle.dumps((executor, task, header, dict(weights), place, str(Path.cwd()))))
        told = False
        while True:
            if abort_signal.triggered and not told:
                connection.send_bytes(b"abort")
                told = True
            try:
                if not connection.poll(POLL_SECONDS):
                    continue
                kind, content = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError) as error:
                text = "the process that did the task ended without an answer (too little memory?)"
                raise FedTARError(text, public=text) from error
            if kind == LOG:
                logger = logging.getLogger(content.name)
                if logger.isEnabledFor(content.levelno):
                    logger.handle(content)
            elif kind == SCALAR:
                scalar(*content)
            elif kind == RAISED:
                raise content
            else:
                reply, tensors = content
                return reply, tensors


def _environment() -> dict[str, str]:
    """This process's environment, with the package's own place first on Python's path."""
    packages = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


# ---------------------------------------------------------------------- the template, and its copies
def main() -> None:
    """Import what the executor on standard input needs, and fork for each that connects, until the simulator ends."""
    simulator = int(sys.argv[1])
    folder = template_folder(simulator)
    ends: int = os.pidfd_open(simulator)
    executor: Performer = pickle.load(sys.stdin.buffer)
    executor.load_libraries()
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
    executor, task, header, weights, place, folder = pickle.loads(connection.recv_bytes())
    lock = threading.Lock()

    def say(kind: str, content: Any) -> None:
        with lock:
            connection.send_bytes(pickle.dumps((kind, content)))

    os.chdir(folder)
    root = logging.getLogger()
    root.handlers[:] = [_Passing(lambda record: say(LOG, record))]
    root.setLevel(logging.INFO)
    executor.scalars_to = lambda *point: say(SCALAR, point)
    try:
        outcome: tuple[str, Any] = (
            DONE,
            executor.perform(task, header, weights, _CopiedSite(_Heard(connection), *place)),
        )
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        outcome = RAISED, _portable(error)
    say(*outcome)


def _portable(error: Exception) -> Exception:
    """The error if it survives pickling, else a RuntimeError that tells of it."""
    with suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError("".join(traceback.format_exception(error)))


class _Passing(logging.Handler):
    """Gives on each record, its message made."""

    def __init__(self, give: Callable[[logging.LogRecord], None]):
        super().__init__()
        self._give = give

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
        record.msg, record.args = record.getMessage(), None
        self._give(record)


class _Heard:
    """An abort signal that is triggered when anything is said on a connection, or its other end is gone."""

    def __init__(self, connection: Connection):
        self._connection = connection

    @property
    def triggered(self) -> bool:
        return self._connection.poll()


class _CopiedSite(Site):
    """A simulated site without FLARE's engine."""

    def __init__(self, abort_signal: Any, name: str, job: str, workspace: Path, app: Path):
        self.name, self.simulated, self.job, self.workspace = name, True, job, workspace
        self._app, self._abort_signal = app, abort_signal
        self._start, self._most_seconds = time.monotonic(), float("inf")

    @property
    def app(self) -> Path:
        return self._app


if __name__ == "__main__":
    main()
