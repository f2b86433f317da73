"""Process many studies in parallel.

Workers are processes, since reading headers and decoding hold Python's lock, each an executor of loky, whose processes
do not run the parent's main module again. A process that dies (out of memory, a decoder that crashes) is replaced, and
its item tried once more; an item that kills two processes, takes too long or meets a fault of the code is refused, and
the others go on.
"""

import logging
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from loky import ProcessPoolExecutor

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.imaging.limits import machine_memory, too_slow

logger = logging.getLogger(__name__)

SERIAL_SECONDS = 5.0  # work done in this process before workers, which take seconds to start, are considered
WORTH_SECONDS = 20.0  # estimated remaining time from which workers are started
MEMORY_EACH = 4 << 30  # bytes for each worker, which holds one volume
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
Task = Callable[..., Any]  # a function at the top of its module
Outcome = Any  # the task's result, or a DataError: its own, or one about the worker


def worker_count(asked: int | None = None, sites: int = 1) -> int:
    """Decide the number of worker processes; ``sites`` share the machine."""
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"workers must be at least 1, not {asked}")
        return asked
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, machine_memory() // MEMORY_EACH) // sites)


def attempt(task: Task, arguments: dict[str, Any]) -> Outcome:
    """Run the task on one item; a fault of the code becomes an ``internal-error``."""
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
    """Run a task on each item, in worker processes when the work takes long."""
    worked = 0.0  # without the first item, which pays for the imports
    for index, arguments in enumerate(items):
        start = time.monotonic()
        outcome = attempt(task, arguments)
        worked += time.monotonic() - start if index else 0.0
        yield index, outcome
        begun = index + 1
        rest = (len(items) - begun) * worked / max(index, 1)
        if workers > 1 and worked > SERIAL_SECONDS and rest > WORTH_SECONDS:
            for later, outcome in _in_processes(task, items[begun:], min(workers, len(items) - begun), seconds):
                yield begun + later, outcome
            return


def _in_processes(
    task: Task, items: Sequence[dict[str, Any]], workers: int, seconds: float = math.inf
) -> Iterator[tuple[int, Outcome]]:
    waiting, tried = deque(range(len(items))), set()
    idle: list[ProcessPoolExecutor] = []
    going: dict[Future[Outcome], tuple[int, ProcessPoolExecutor, float]] = {}
    try:
        while waiting or going:
            while waiting and len(going) < workers:
                try:
                    process = idle.pop() if idle else _process(task)
                except (OSError, RuntimeError):  # none can be started: the running ones go on, or this process
                    workers = len(going)
                    break
                index = waiting.popleft()
                future = process.submit(attempt, task, items[index])
                going[future] = index, process, time.monotonic() + seconds
            if not going:
                yield (index := waiting.popleft()), attempt(task, items[index])
                continue
            nearest = min(end for _, _, end in going.values()) - time.monotonic()
            done, _ = wait(going, None if nearest == math.inf else max(0.0, nearest), FIRST_COMPLETED)
            for future, (index, process, end) in [*going.items()]:
                if future in done:
                    del going[future]
                    try:
                        outcome = future.result()
                        idle.append(process)
                    except Exception as error:
                        if index not in tried:
                            tried.add(index)
                            waiting.append(index)
                            continue
                        why = " ".join(str(error).split())
                        text = f"{_what(items[index])}: reading it ended two worker processes ({why})"
                        outcome = DataError(text, reason="worker-died")
                elif time.monotonic() > end:
                    del going[future]
                    process.shutdown(wait=False, kill_workers=True)
                    outcome = too_slow(_what(items[index]), seconds)
                else:
                    continue
                yield index, outcome
    finally:  # without waiting: a process that hangs in a file system may not end
        for process in [*idle, *(process for _, process, _ in going.values())]:
            process.shutdown(wait=False, kill_workers=True)


def _process(task: Task) -> ProcessPoolExecutor:
    """An executor of one process that has imported what the task needs."""
    process = ProcessPoolExecutor(1, initializer=_quiet, env=ONE_THREAD)
    process.submit(callable, task).result()  # to pass the task imports its module there
    return process


def _quiet() -> None:
    """What libraries print goes to standard error."""
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
