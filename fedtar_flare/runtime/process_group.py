"""A site's tasks in several processes that train together, one per GPU where there are GPUs.

Where the site file says ``processes: N`` above 1, the executor starts N processes of this package (:mod:`.worker`) and
hands them every task. Each builds the job's executor as FLARE did; rank 0 does all of a task, writes the site's state
and gives the answer; the others do their share of what a task trains, validates and scores
(:mod:`fedtar_flare.learning.ranks`), and write nothing. They stay for the run's next task, so that imports and the
model are paid for once. No job can request them, or say what is started.

They are not started by ``torchrun``, whose rendezvous listens on every network interface of the machine and unpickles
what it is sent, and whose processes stay when it is killed. Here orders and answers go through a pair of sockets that
one process inherits, as JSON and safetensors; the processes find each other through a file in a folder of this account
alone, and talk over the loopback interface; and a process ends when its pipe does, so none outlives the executor's.
"""

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader
from fedtar_flare.runtime.task import Answer
from fedtar_flare.site.context import Site

WORKER = "fedtar_flare.runtime.worker"
POLL_SECONDS = 0.1
"""Interval at which whoever waits for an answer looks at the abort signal."""
GRACE_SECONDS = 5.0
"""Seconds for a process to end when asked, and to wait for one that another process has lost."""
LOG, OPENED, DONE, FAILED, LOST = "log", "opened", "done", "failed", "lost"
"""What a process says of a task: the last three once, at its end; before it, the first one, that the site is open."""


def send(connection: Connection, content: Mapping[str, Any], tensors: Tensors | None = None) -> None:
    """Send JSON-able content, and tensors where there are any (None stays None)."""
    connection.send_bytes(json.dumps({"content": content, "tensors": tensors is not None}).encode())
    if tensors is not None:
        connection.send_bytes(save({name: value.contiguous() for name, value in tensors.items()}))


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    """What :func:`send` has sent. Raises EOFError, OSError when the other end is gone."""
    message = json.loads(connection.recv_bytes())
    return message["content"], load(connection.recv_bytes()) if message["tensors"] else None


class ProcessGroup:
    """``size`` processes (at least 2) that do tasks together; on ``cuda`` rank r computes on the GPU of that number."""

    def __init__(self, size: int, device: str):
        self.size, self.device = size, device
        self._folder = tempfile.TemporaryDirectory(prefix="fedtar-", ignore_cleanup_errors=True)  # 0700
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            for rank in range(size):
                self._start(rank)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether it can take a task: it was not closed, and no process has ended."""
        return bool(self._processes) and all(process.poll() is None for process in self._processes)

    def perform(self, task: str, header: TaskHeader, weights: Tensors, site: Site) -> Answer:
        """As ``executor.perform``, whatever a rank raises as FedTARError; then the group is closed."""
        about = {"name": site.name, "simulated": site.simulated, "job": site.job}
        about |= {"workspace": str(site.workspace), "app": str(site.app), "of_job": site.of_job}
        order = {"task": task, "header": asdict(header), "site": about, "folder": str(Path.cwd())}
        try:
            return self._perform(order, weights, site)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process; none is left when this returns."""
        for process in self._processes:
            process.terminate()
        end = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    # ------------------------------------------------------------------ pieces
    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        packages = filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")))
        with ours, theirs, Path(self._folder.name, f"{rank}.txt").open("wb") as words:
            arguments = [theirs.fileno(), rank, self.size, self.device, self._folder.name]
            process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", WORKER, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)},
            )
            self._processes.append(process)
            self._connections.append(Connection(ours.detach()))

    def _perform(self, order: dict[str, Any], weights: Tensors, site: Site) -> Answer:
        rank_of = {connection: rank for rank, connection in enumerate(self._connections)}
        answer: Answer | None = None
        lost: FedTARError | None = None
        end = math.inf
        working = self._hand_over([0], order, weights)
        while working and time.monotonic() < end:
            site.stop_if_aborted()
            for connection in wait(list(rank_of), POLL_SECONDS):  # also one that has no task yet may end
                assert isinstance(connection, Connection)
                rank = rank_of[connection]
                try:
                    content, tensors = receive(connection)
                except (EOFError, OSError) as error:
                    raise self._ended(rank) from error
                kind = content.pop("kind")
                if kind == LOG and (logger := logging.getLogger(content["name"])).isEnabledFor(content["levelno"]):
                    logger.handle(logging.makeLogRecord(content))
                elif kind == OPENED:
                    working |= self._hand_over(range(1, self.size), order, weights)
                elif kind == FAILED:
                    raise FedTARError(content["text"], public=content["public"])
                elif kind == LOST:
                    # another has ended, or stands still: which one, and why, is soon known from itself, if ever
                    working.remove(rank)
                    lost = FedTARError(content["text"], public=content["public"])
                    end = min(end, time.monotonic() + GRACE_SECONDS)
                elif kind == DONE:
                    working.remove(rank)
                    if rank == 0:
                        answer = Reply(**content["reply"]), tensors
        if lost is not None:
            raise lost
        assert answer is not None
        return answer

    def _hand_over(self, ranks: Iterable[int], order: dict[str, Any], weights: Tensors) -> set[int]:
        """Hand the task to these ranks, and return them."""
        working = set(ranks)
        for rank in working:
            try:
                send(self._connections[rank], order, weights)
            except OSError as error:
                raise self._ended(rank) from error
        return working

    def _ended(self, rank: int) -> FedTARError:
        """The error of a process that ended without an answer."""
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        code = process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        text = f"one of the {self.size} processes that do this site's tasks together ended without an answer"
        words = Path(self._folder.name, f"{rank}.txt").read_text(errors="replace").strip().rpartition("\n")[2]
        why = f": {words}" if words else " (too little memory?)"
        return FedTARError(f"{text}: rank {rank}, {how}{why}", public=text)
