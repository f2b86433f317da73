"""Tasks of FLARE's simulator in copies of one process that has imported what tasks need.

With fewer threads than sites, the simulator starts a process per site and task, and half of such a process's seconds
are imports. Here the first task starts one more process, the *template* (:mod:`fedtar_flare.runtime.worker`), which
imports and then waits. Each later task's process connects to it; the template forks, its copy builds the executor from
the job's own configuration and does the task, and the task's own process passes on logs and scalars and sends the
answer. A copy has what a new process has, and nothing of an earlier task: the same bits come out.

The template ends with the simulator. There is none at a real site, with a GPU (whose driver forbids copies), for
classes outside this package, and on other systems than Linux; a task that finds none is done where it is.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path

import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.signal import Signal

from fedtar_flare.errors import FedTARError
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.runtime.handed import POLL_SECONDS, Answer, Scalar, environment, order_of, receive, send, take
from fedtar_flare.site.place import Site

PACKAGE = "fedtar_flare."
WORKER = "fedtar_flare.runtime.worker"
SOCKET = "socket"


def is_swapped(fl_ctx: FLContext) -> bool:
    """Whether the simulator ends this process after its task, to let another site's run."""
    threads, sites = _threads_and_sites(fl_ctx)
    return threads is not None and threads < sites


def at_once(fl_ctx: FLContext) -> int:
    """How many of the simulator's sites share this machine's processors at a time."""
    threads, sites = _threads_and_sites(fl_ctx)
    return max(1, min(sites if threads is None else threads, sites))


def _threads_and_sites(fl_ctx: FLContext) -> tuple[int | None, int]:
    arguments = getattr(getattr(fl_ctx.get_engine(), "client", None), "args", None)
    sites = (fl_ctx.get_prop(FLContextKey.JOB_META) or {}).get(JobMetaKey.JOB_CLIENTS.value, ())
    return getattr(arguments, "threads", None), len(sites)


def may_fork(executor: object) -> bool:
    """Whether copies of a process may do this executor's tasks here."""
    ours = type(executor).__module__.startswith(PACKAGE)
    return ours and sys.platform == "linux" and hasattr(os, "pidfd_open") and not torch.cuda.is_available()


def connect(app: Path, simulator: int) -> Connection | None:
    """A fresh copy of this simulator's template; None while there is none: the first call starts it, for this app."""
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
            [sys.executable, "-P", "-W", "ignore", "-m", WORKER, "template", str(simulator), str(app)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment(),
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
) -> Answer:
    """``executor.perform(task, header, weights, site)`` in a copy; FedTARError also if it ends without an answer."""
    with connection:
        send(connection, order_of(task, header, site), weights)
        aborted, answer = False, None
        while answer is None:
            if abort_signal.triggered and not aborted:
                connection.send_bytes(b"abort")
                aborted = True
            try:
                if not connection.poll(POLL_SECONDS):
                    continue
                said, tensors = receive(connection)
            except (EOFError, OSError) as error:
                text = "the process that did the task ended without an answer (too little memory?)"
                raise FedTARError(text, public=text) from error
            answer = take(said, tensors, scalar)
    return answer
