"""Process many studies in parallel. Workers are processes, since reading headers and decoding hold Python's lock
(measured: eight studies of 150 slices took 2.7 s in one thread and 2.9 s in two).

They are loky's, which start afresh: safe beside running threads, and never running their parent's main module again.
A process that dies (out of memory, a decoder that crashes) is replaced and its item tried once more; an item that
kills two is refused by name and the others go on. So is an item that takes longer than it may, and one that meets a
fault of the code (its traceback is in the log).
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from loky.backend import get_context

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.imaging.limits import too_slow

logger = logging.getLogger(__name__)

ALONE_SECONDS = 5.0
"""Work begins in this process; workers take seconds to start and are not started for less than this."""
WORTH_SECONDS = 20.0
"""Estimated remaining time from which workers are started."""
STOP_SECONDS = 5.0
"""How long a process that was ended is waited for: one that hangs in a file system may not end."""
MOST = 4
"""Default limit of workers: each holds one volume in memory."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
Task = Callable[..., Any]
"""A function at the top of its module; a :class:`DataError` that it raises is an outcome as well."""
Outcome = Any
"""The task's result, or a :class:`DataError`: the one it raised, or what became of it."""


def worker_count(asked: int | None = None) -> int:
    """As many as asked for (:class:`ConfigError` below one), else one per usable processor, at most four."""
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"workers must be at least 1, not {asked}")
        return asked
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, usable)


def attempt(task: Task, arguments: dict[str, Any]) -> Outcome:
    """The outcome of one item, whatever happens to it.

    Too little memory is ``out-of-memory``; any other error that the task does not name is a fault of the code:
    ``internal-error``, with its traceback in the log.
    """
    try:
        return task(**arguments)
    except DataError as error:
        return error
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # libraries wrap it
            if isinstance(cause, MemoryError):
                return DataError(f"not enough memory for {_what(arguments)}", reason="out-of-memory")
            cause = cause.__cause__
        logger.exception("a fault of the code in '%s'", task.__name__)
        text = f"{_what(arguments)}: a fault of the code ({type(error).__name__}: {error}); its traceback is in the log"
        return DataError(text, reason="internal-error")


def _what(arguments: dict[str, Any]) -> str:
    return str(arguments.get("image", "this item"))


def each(
    task: Task, items: Sequence[dict[str, Any]], workers: int, seconds: float = math.inf
) -> Iterator[tuple[int, Outcome]]:
    """Do a task for every item and yield (index, outcome) pairs in order of completion.

    Parameters
    ----------
    task : function at the top of a module
    items : sequence of dict
        The task's keyword arguments for each item.
    workers : int
        Processes, started when the work takes long; with one, this process does everything.
    seconds : float, default inf
        After which a process is ended and its item refused (``too-slow``).
    """
    worked = 0.0  # without the first item, which pays for the imports
    for index, arguments in enumerate(items):
        start = time.monotonic()
        outcome = attempt(task, arguments)
        worked += time.monotonic() - start if index else 0.0
        yield index, outcome
        begun = index + 1
        rest = (len(items) - begun) * worked / max(index, 1)
        if workers > 1 and worked > ALONE_SECONDS and rest > WORTH_SECONDS:
            for later, outcome in _in_processes(task, items[begun:], min(workers, len(items) - begun), seconds):
                yield begun + later, outcome
            return


def _in_processes(
    task: Task, items: Sequence[dict[str, Any]], workers: int, seconds: float = math.inf
) -> Iterator[tuple[int, Outcome]]:
    waiting, tried = deque(range(len(items))), set()
    team: list[_Worker] = []
    try:
        while waiting or team:
            while waiting and len(team) < workers:
                try:
                    team.append(_Worker(task))
                except OSError:  # no further process can be started: those that are there go on, or this one
                    workers = len(team)
                    break
                team[-1].begin(index := waiting.popleft(), items[index])
            if not team:
                yield (index := waiting.popleft()), attempt(task, items[index])
                continue
            nearest = min(worker.end for worker in team) - time.monotonic()
            ready = wait([worker.pipe for worker in team], None if nearest == math.inf else max(0.0, nearest))
            for worker in [*team]:
                index, outcome = worker.item, None
                if worker.pipe in ready:
                    try:
                        outcome = worker.pipe.recv()
                    except (EOFError, OSError):
                        code = worker.stop()
                        team.remove(worker)
                        if index not in tried:
                            tried.add(index)
                            waiting.append(index)
                            continue
                        text = f"reading it ended two worker processes (exit code {code}); out of memory?"
                        outcome = DataError(f"{_what(items[index])}: {text}", reason="worker-died")
                    if outcome is BEGUN:
                        worker.end = time.monotonic() + seconds
                        continue
                elif time.monotonic() > worker.end:
                    worker.stop()
                    team.remove(worker)
                    outcome = too_slow(_what(items[index]), seconds)
                else:
                    continue
                if worker in team and waiting:
                    worker.begin(later := waiting.popleft(), items[later])
                elif worker in team:
                    worker.stop()
                    team.remove(worker)
                yield index, outcome
    finally:
        for worker in team:
            worker.stop()


BEGUN = ...
"""What a worker says before it does an item: its time runs from there."""


class _Worker:
    """A process, the item that it does, and when it must have done it."""

    def __init__(self, task: Task):
        context = get_context("loky")
        self.pipe, inner = context.Pipe()
        self.item, self.end = -1, math.inf
        self._process = context.Process(target=_serve, args=(inner, task), daemon=True, env=ONE_THREAD)
        self._process.start()
        inner.close()

    def begin(self, item: int, arguments: dict[str, Any]) -> None:
        self.item, self.end = item, math.inf
        with suppress(OSError):  # it has died, as its pipe will say
            self.pipe.send(arguments)

    def stop(self) -> int | None:
        """End the process, if it has not ended itself, and return its exit code."""
        self._process.terminate()
        self._process.join(STOP_SECONDS)
        self.pipe.close()
        return self._process.exitcode


def _serve(pipe: Connection, task: Task) -> None:
    """Do one item after another, until the pipe closes; what libraries print goes to standard error."""
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    with suppress(EOFError, OSError):
        while True:
            arguments = pipe.recv()
            pipe.send(BEGUN)
            pipe.send(attempt(task, arguments))
