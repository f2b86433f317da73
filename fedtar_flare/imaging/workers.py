"""Process many studies in parallel. Workers are processes, since reading headers and decoding hold Python's lock
(measured: eight studies of 150 slices took 2.7 s in one thread and 2.9 s in two).

A process that dies (out of memory, a decoder that crashes) is replaced and its item tried once more; an item that
kills two is refused by name and the others go on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

from fedtar_flare.errors import ConfigError, DataError, FedTARError
from fedtar_flare.imaging.worker import task

ALONE_SECONDS = 5.0
"""Work begins in this process; workers take seconds to start and are not started for less than this."""
WORTH_SECONDS = 20.0
"""Estimated remaining time from which workers are started."""
MOST = 4
"""Default limit of workers: each holds one volume in memory."""
PACKAGES = Path(__file__).resolve().parents[2]
COMMAND = ["-P", "-W", "ignore", "-m", "fedtar_flare.imaging.worker"]
Outcome = Any
"""The task's result, or the :class:`DataError` it raised."""


def worker_count(asked: int | None = None) -> int:
    """As many as asked for (:class:`ConfigError` below one), else one per usable processor, at most four."""
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"workers must be at least 1, not {asked}")
        return asked
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, usable)


def each(name: str, items: Sequence[dict[str, Any]], workers: int) -> Iterator[tuple[int, Outcome]]:
    """Do a task for every item and yield (index, outcome) pairs in order of completion.

    Args:
        name: ``module:function`` (see :func:`fedtar_flare.imaging.worker.task`).
        items: the task's keyword arguments for each item, as JSON can hold them.
        workers: processes, started when the work takes long; with one, this process does everything.

    Raises :class:`FedTARError` when a worker failed through a fault of the code; its traceback is in the log.
    """
    begun = 0
    worked = 0.0  # without the first item, which pays for the imports
    for index, outcome, seconds in _here(name, items):
        yield index, outcome
        begun, worked = index + 1, worked + (seconds if index else 0.0)
        rest = (len(items) - begun) * worked / max(index, 1)
        if workers > 1 and worked > ALONE_SECONDS and rest > WORTH_SECONDS:
            break
    for index, outcome in _in_processes(name, items[begun:], min(workers, len(items) - begun)):
        yield begun + index, outcome


def _here(name: str, items: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Outcome, float]]:
    """In this process, one by one; yields the seconds each took."""
    function = task(name) if items else None
    for index, arguments in enumerate(items):
        assert function is not None
        start = time.monotonic()
        outcome: Outcome
        try:
            outcome = function(**arguments)
        except DataError as error:
            outcome = error
        yield index, outcome, time.monotonic() - start


def _in_processes(name: str, items: Sequence[dict[str, Any]], workers: int) -> Iterator[tuple[int, Outcome]]:
    waiting: Queue[tuple[int, int]] = Queue()
    for index in range(len(items)):
        waiting.put((index, 0))
    done: Queue[tuple[int, Outcome]] = Queue()
    pool = [_Worker(name, items, waiting, done) for _ in range(workers)]
    try:
        for worker in pool:
            worker.thread.start()
        for _ in range(len(items)):
            index, outcome = done.get()
            if isinstance(outcome, BaseException) and not isinstance(outcome, DataError):
                raise outcome
            yield index, outcome
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """One process at a time, and the thread that feeds it."""

    def __init__(
        self,
        name: str,
        items: Sequence[dict[str, Any]],
        waiting: Queue[tuple[int, int]],
        done: Queue[tuple[int, Outcome]],
    ):
        self._name, self._items, self._waiting, self._done = name, items, waiting, done
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stopped:
            try:
                index, tried = self._waiting.get_nowait()
            except Empty:
                break
            try:
                self._done.put((index, self._ask(self._items[index])))
            except (OSError, ValueError) as error:  # the process ended before it answered
                code = self._end()
                if self._stopped:
                    break
                if code == 1:  # Python itself ended it, with a traceback: a fault of the code, not of the study
                    text = f"a worker process failed at item {index} of '{self._name}'; its traceback is in the log"
                    self._done.put((index, FedTARError(text)))
                elif tried == 0:
                    self._waiting.put((index, 1))
                else:
                    text = f"reading it ended two worker processes (exit code {code}: {error}); out of memory?"
                    self._done.put((index, DataError(text, reason="worker-died")))
            except BaseException as error:
                self._done.put((index, error))
        self._end()

    def _ask(self, arguments: dict[str, Any]) -> Outcome:
        process = self._running()
        into, out = _pipes(process)
        into.write(json.dumps({"task": self._name, "arguments": arguments}) + "\n")
        into.flush()
        line = out.readline()
        if not line.endswith("\n"):
            raise OSError("no answer")
        got = json.loads(line)
        return DataError(got["refused"], reason=got["reason"]) if "refused" in got else got["result"]

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._stopped:
                raise OSError("stopped")
            if self._process is None:
                one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
                self._process = subprocess.Popen(
                    [sys.executable, *COMMAND],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    env={**os.environ, **one_thread, "PYTHONPATH": path},
                )
            return self._process

    def _end(self) -> int | None:
        """End the process by closing its input, and return its exit code."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        for pipe in _pipes(process):
            with suppress(OSError):
                pipe.close()
        return process.wait()

    def stop(self) -> None:
        """Stop for good; a request in progress is abandoned."""
        self._stopped = True
        with self._lock:
            process = self._process
        if process is not None:
            process.kill()
        if self.thread.ident is not None:
            self.thread.join()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout
