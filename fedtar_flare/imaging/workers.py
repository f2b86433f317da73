"""Process many studies in parallel. Workers are processes, since reading headers and decoding hold Python's lock
(measured: eight studies of 150 slices took 2.7 s in one thread and 2.9 s in two).

A worker is this module as a program of its own (one JSON request per line in, one JSON answer per line out, until its
input ends), not a fork: it is safe beside running threads and never runs its parent's main module again.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from fedtar_flare.errors import ConfigError, DataError, FedTARError

ALONE_SECONDS = 5.0
"""Work begins in this process; workers take seconds to start and are not started for less than this."""
WORTH_SECONDS = 20.0
"""Estimated remaining time from which workers are started."""
MOST = 4
"""Default limit of workers: each holds one volume in memory."""
PACKAGE = "fedtar_flare."
PACKAGES = Path(__file__).resolve().parents[2]
COMMAND = ["-P", "-W", "ignore", "-m", "fedtar_flare.imaging.workers"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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


def task(name: str) -> Callable[..., Any]:
    """The function named ``module:function``; raises :class:`ConfigError` for anything outside this package."""
    module, _, function = name.partition(":")
    if not module.startswith(PACKAGE) or not function.isidentifier():
        raise ConfigError(f"task '{name}' is not 'module:function' of the package {PACKAGE[:-1]}")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def each(name: str, items: Sequence[dict[str, Any]], workers: int) -> Iterator[tuple[int, Outcome]]:
    """Do a task for every item and yield (index, outcome) pairs in order of completion.

    Args:
        name: ``module:function`` (see :func:`task`).
        items: the task's keyword arguments for each item, as JSON can hold them.
        workers: processes, started when the work takes long; with one, this process does everything.

    Raises :class:`FedTARError` when a worker failed through a fault of the code; its traceback is in the log.
    """
    worked = 0.0  # without the first item, which pays for the imports
    for index, arguments in enumerate(items):
        start = time.monotonic()
        outcome: Outcome
        try:
            outcome = task(name)(**arguments)
        except DataError as error:
            outcome = error
        worked += time.monotonic() - start if index else 0.0
        yield index, outcome
        begun = index + 1
        rest = (len(items) - begun) * worked / max(index, 1)
        if workers > 1 and worked > ALONE_SECONDS and rest > WORTH_SECONDS:
            for later, outcome in _in_processes(name, items[begun:], min(workers, len(items) - begun)):
                yield begun + later, outcome
            return


def _in_processes(name: str, items: Sequence[dict[str, Any]], workers: int) -> Iterator[tuple[int, Outcome]]:
    team = [_Worker() for _ in range(workers)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in team:
        idle.put(worker)

    def ask(index: int) -> Outcome:
        worker = idle.get()
        try:
            return worker.ask({"task": name, "arguments": items[index]})
        finally:
            idle.put(worker)

    waiting = list(range(len(items)))
    pool = ThreadPoolExecutor(workers)
    try:
        for last in (False, True):
            asked, waiting = {pool.submit(ask, index): index for index in waiting}, []
            for future in as_completed(asked):
                index, outcome = asked[future], future.result()
                if not isinstance(outcome, _Died):
                    yield index, outcome
                elif outcome.code == 1:  # Python itself ended it, with a traceback: a fault of the code
                    text = f"a worker process failed at item {index} of '{name}'; its traceback is in the log"
                    raise FedTARError(text)
                elif not last:
                    waiting.append(index)
                else:
                    what = f"exit code {outcome.code}: {outcome.error}"
                    text = f"reading it ended two worker processes ({what}); out of memory?"
                    yield index, DataError(text, reason="worker-died")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in team:
            worker.stop()
        pool.shutdown()


class _Died(NamedTuple):
    """A process ended before it answered."""

    code: int | None
    error: Exception


class _Worker:
    """One process at a time, started when it is first asked and again when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def ask(self, request: dict[str, Any]) -> Outcome:
        """The outcome of a request, or :class:`_Died`."""
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line.endswith("\n"):
                raise OSError("no answer")
            got = json.loads(line)
        except (OSError, ValueError) as error:
            return _Died(self._end(), error)
        return DataError(got["refused"], reason=got["reason"]) if "refused" in got else got["result"]

    def stop(self) -> None:
        """Stop for good; a request in progress is abandoned."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
        self._end()

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._stopped:
                raise OSError("stopped")
            if self._process is None:
                path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
                self._process = subprocess.Popen(
                    [sys.executable, *COMMAND],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                )
            return self._process

    def _end(self) -> int | None:
        """End the process by closing its input, and return its exit code."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        with suppress(OSError), process:  # leaving it closes its pipes and waits
            pass
        return process.returncode


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do one request; unusable data is an answer, any other error ends the process."""
    try:
        return {"result": task(request["task"])(**request["arguments"])}
    except DataError as error:
        return {"refused": str(error), "reason": error.reason}
    except MemoryError:
        return {"refused": f"not enough memory for {request['arguments']}", "reason": "out-of-memory"}


def main() -> None:
    """Answer until the input ends; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
