"""Run a suite: each cell in this process or in one of several, its result as a small JSON file; nothing done twice."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from fedtar_flare.errors import FedTARError
from fedtar_flare.files import write_text
from fedtar_flare.suite.hospitals import described
from fedtar_flare.suite.plan import Cell

logger = logging.getLogger(__name__)
RESULTS = "results"


def result_file(folder: Path, cell: Cell) -> Path:
    """``<folder>/results/<arm>[-<variant>]-<seed>-<digest>.json``."""
    return folder / RESULTS / f"{cell.file_name}.json"


def rows_file(folder: Path, cell: Cell) -> Path:
    """The scores of single reports that belong to a result."""
    return result_file(folder, cell).with_suffix(".rows.jsonl")


def pending(folder: Path, cells: Iterable[Cell]) -> list[Cell]:
    """Cells without a result."""
    return [cell for cell in cells if not result_file(folder, cell).is_file()]


def run_suite(
    folder: Path, cells: Sequence[Cell], *, processes: int = 1, say: Callable[[str], None] = print
) -> list[str]:
    """Run what has no result yet; a failed cell is said and left out, the others go on.

    Args:
        folder: of the results; a second call there goes on where the first one stopped.
        processes: cells that run at the same time, each in a process with its share of the cores.
        say: gets a line after each cell, with the time left.

    Returns:
        one line per cell that failed.
    """
    todo = pending(folder, cells)
    done, started = len(cells) - len(todo), time.monotonic()
    say(f"{len(cells)} runs, {done} of them done before")
    failed: list[str] = []
    lock = threading.Lock()

    def finished(cell: Cell, problem: str) -> None:
        nonlocal done
        with lock:
            done += 1
            if problem:
                failed.append(f"{cell.title}: {problem}")
            rate = (time.monotonic() - started) / (done - (len(cells) - len(todo)))
            left = rate * (len(cells) - done) / 60
            say(f"{done}/{len(cells)}  {cell.title}: {'failed' if problem else 'done'}; {left:.0f} min left")

    threads = max(1, cores() // processes)
    if processes == 1:
        for cell in todo:
            finished(cell, attempt(folder, cell, threads))
        return failed
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in todo:
        waiting.put(cell)
    with ThreadPoolExecutor(processes) as lanes:
        for lane in [lanes.submit(_work, folder, waiting, threads, finished) for _ in range(processes)]:
            lane.result()
    return failed


def _work(folder: Path, waiting: queue.SimpleQueue[Cell], threads: int, finished: Callable[[Cell, str], None]) -> None:
    """Run the cells that wait, one after the other, in one process; where it dies, the next cell gets a new one."""
    pool = None
    try:
        while True:
            cell = waiting.get_nowait()
            pool = pool or one_worker()
            try:
                problem = pool.submit(attempt, folder, cell, threads).result()
            except BrokenProcessPool:
                problem = "its process died (killed, or out of memory)"
                pool.shutdown()
                pool = None
            finished(cell, problem)
    except queue.Empty:
        pass
    finally:
        if pool is not None:
            pool.shutdown()


def one_worker() -> ProcessPoolExecutor:
    """A process that does one thing after the other, and ends when this one does, even when it is killed."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    return ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def attempt(folder: Path, cell: Cell, threads: int) -> str:
    """Run one cell with so many torch threads; returns why it failed, empty when it did not.

    The reason is a text, because not every exception can be handed to another process.
    """
    try:
        run_cell(folder, cell, threads)
    except FedTARError as error:
        return str(error)
    except Exception as error:
        logger.exception("%s", cell.title)
        return f"unexpected {type(error).__name__}: {error}"
    return ""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_cell(folder: Path, cell: Cell, threads: int = 1) -> dict[str, Any]:
    """Run one cell and write its result; the scores of single reports or images go beside it, as ``.rows.jsonl``.

    ``threads`` are torch's, unless the suite sets ``torch_threads``.

    Raises:
        FedTARError: the run failed.
    """
    import torch

    from fedtar_flare.suite.collect import collect
    from fedtar_flare.suite.engine import run_in_process
    from fedtar_flare.suite.task_results import collect_tasks

    recipe = cell.build(threads)
    torch.set_num_threads(recipe.executor.torch_threads)
    work = folder / "runs" / cell.file_name
    shutil.rmtree(work, ignore_errors=True)
    began = time.monotonic()
    with described(cell.variant, work / "hospitals"):
        results = run_in_process(recipe, list(cell.sites), work, cell.variant.joins)
        if cell.writes_reports:
            result, rows = collect(cell, recipe, results, folder / RESULTS)
        else:
            result, rows = collect_tasks(cell, recipe, results)
    result["seconds"] = round(time.monotonic() - began, 1)
    file = result_file(folder, cell)
    write_text(rows_file(folder, cell), "".join(f"{json.dumps(row)}\n" for row in rows))
    write_text(file, json.dumps(result, indent=1))
    shutil.rmtree(work)
    return result
