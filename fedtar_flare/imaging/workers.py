"""Process many studies in parallel. Workers are processes, since reading headers and decoding hold Python's lock
(measured: eight studies of 150 slices took 2.7 s in one thread and 2.9 s in two).

A worker is this module as a program of its own (``ready``, then one JSON request per line in and one JSON answer per
line out, until its input ends), not a fork: it is safe beside running threads and never runs its parent's main module
again.

A process that dies (out of memory, a decoder that crashes) is replaced and its item tried once more; an item that
kills two is refused by name and the others go on. So is an item that takes longer than it may, and one that meets a
fault of the code (its traceback is in the log).
"""

from __future__ import annotations

import json
import logging
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

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.imaging.limits import too_slow

logger = logging.getLogger(__name__)

ALONE_SECONDS = 5.0
"""Work begins in this process; workers take seconds to start and are not started for less than this."""
WORTH_SECONDS = 20.0
"""Estimated remaining time from which workers are started."""
MOST = 4
"""Default limit of workers: each holds one volume in memory."""
READY = "ready\n"
"""What a worker says first."""
PACKAGE = "fedtar_flare."
PACKAGES = Path(__file__).resolve().parents[2]
COMMAND = ["-P", "-W", "ignore", "-m", "fedtar_flare.imaging.workers"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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


def task(name: str) -> Callable[..., Any]:
    """The function named ``module:function``; raises :class:`ConfigError` for anything outside this package."""
    module, _, function = name.partition(":")
    if not module.startswith(PACKAGE) or not function.isidentifier():
        raise ConfigError(f"task '{name}' is not 'module:function' of the package {PACKAGE[:-1]}")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def attempt(name: str, arguments: dict[str, Any]) -> Outcome:
    """The outcome of one item, whatever happens to it.

    Too little memory is ``out-of-memory``; any other error that the task does not name is a fault of the code:
    ``internal-error``, with its traceback in the log.
    """
    work = task(name)
    try:
        return work(**arguments)
    except DataError as error:
        return error
    except Exception as error:
        if _of_memory(error):
            return DataError(f"not enough memory for {_what(arguments)}", reason="out-of-memory")
        logger.exception("a fault of the code in '%s'", name)
        text = f"{_what(arguments)}: a fault of the code ({type(error).__name__}: {error}); its traceback is in the log"
        return DataError(text, reason="internal-error")


def _of_memory(error: BaseException | None) -> bool:
    """Whether an error comes from a :class:`MemoryError`, however it was wrapped."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__
    return error is not None


def _what(arguments: dict[str, Any]) -> str:
    return str(arguments.get("image", "this item"))


def each(
    name: str, items: Sequence[dict[str, Any]], workers: int, seconds: float | None = None
) -> Iterator[tuple[int, Outcome]]:
    """Do a task for every item and yield (index, outcome) pairs in order of completion.

    Args:
        name: ``module:function`` (see :func:`task`).
        items: the task's keyword arguments for each item, as JSON can hold them.
        workers: processes, started when the work takes long; with one, this process does everything.
        seconds: after which a process is ended and its item refused (``too-slow``); None: never.
    """
    worked = 0.0  # without the first item, which pays for the imports
    for index, arguments in enumerate(items):
        start = time.monotonic()
        outcome = attempt(name, arguments)
        worked += time.monotonic() - start if index else 0.0
        yield index, outcome
        begun = index + 1
        rest = (len(items) - begun) * worked / max(index, 1)
        if workers > 1 and worked > ALONE_SECONDS and rest > WORTH_SECONDS:
            for later, outcome in _in_processes(name, items[begun:], min(workers, len(items) - begun), seconds):
                yield begun + later, outcome
            return


def _in_processes(
    name: str, items: Sequence[dict[str, Any]], workers: int, seconds: float | None = None
) -> Iterator[tuple[int, Outcome]]:
    team = [_Worker() for _ in range(workers)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in team:
        idle.put(worker)

    def ask(index: int) -> Outcome:
        worker = idle.get()
        try:
            return worker.ask({"task": name, "arguments": items[index]}, seconds)
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
                elif not last:
                    waiting.append(index)
                else:
                    what = f"exit code {outcome.code}: {outcome.error}"
                    text = f"{_what(items[index])}: reading it ended two worker processes ({what}); out of memory?"
                    yield index, DataError(text, reason="worker-died")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in team:
            worker.stop()
        pool.shutdown()


def _end_late(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    process.kill()


class _Died(NamedTuple):
    """A process ended before it answered."""

    code: int | None
    error: Exception


class _Worker:
    """One process at a time, started when it is first asked and again when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._ready = False
        self._lock = threading.Lock()
        self._stopped = False

    def ask(self, request: dict[str, Any], seconds: float | None = None) -> Outcome:
        """The outcome of a request, or :class:`_Died`; a process that takes longer than ``seconds`` is ended."""
        late = threading.Event()
        watchdog = None
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            if not self._ready and process.stdout.readline() != READY:
                raise OSError("it did not start")
            self._ready = True
            if seconds is not None:
                watchdog = threading.Timer(seconds, _end_late, (process, late))
                watchdog.daemon = True
                watchdog.start()
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line.endswith("\n"):
                raise OSError("no answer")
            got = json.loads(line)
        except (OSError, ValueError) as error:
            code = self._end()
            if seconds is not None and late.is_set():
                return too_slow(_what(request["arguments"]), seconds)
            return _Died(code, error)
        finally:
            if watchdog is not None:
                watchdog.cancel()
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
            process, self._process, self._ready = self._process, None, False
        if process is None:
            return None
        with suppress(OSError), process:  # leaving it closes its pipes and waits
            pass
        return process.returncode


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do one request; an item that cannot be done is an answer as well."""
    outcome = attempt(request["task"], request["arguments"])
    if isinstance(outcome, DataError):
        return {"refused": str(outcome), "reason": outcome.reason}
    return {"result": outcome}


def main() -> None:
    """Answer until the input ends; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(READY, end="", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
