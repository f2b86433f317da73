"""Work on parts of an array side by side in threads: NumPy and SciPy let go of Python's lock while they compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST = 4


def processors() -> int:
    """Processors that this process may use, at most four are counted."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, usable)


def thread_count() -> int:
    """As :func:`processors`, and at most ``OMP_NUM_THREADS`` where that is set."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(processors(), int(asked) if asked.isdigit() else MOST))


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The function's results in the order of the items; the first error is raised, and what has not begun is left."""
    if (count := thread_count()) == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
