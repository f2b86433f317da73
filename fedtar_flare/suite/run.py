"""Run a suite: each cell in this process or in one of several, its result as a small JSON file; nothing done twice."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from fedtar_flare.errors import FedTARError
from fedtar_flare.files import write_text
from fedtar_flare.record.events import Evaluation, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.site.place import home
from fedtar_flare.site.site_file import load_site_config
from fedtar_flare.site.state import SiteState
from fedtar_flare.suite.plan import Cell
from fedtar_flare.version import __version__

logger = logging.getLogger(__name__)
RESULTS = "results"
PACKAGES = ("torch", "transformers", "peft", "nvflare", "numpy")


def result_file(folder: Path, cell: Cell) -> Path:
    """``<folder>/results/<arm>-<seed>-<digest>.json``."""
    return folder / RESULTS / f"{cell.name}-{cell.seed}-{cell.digest}.json"


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
                failed.append(f"{cell.name}, seed {cell.seed}: {problem}")
            rate = (time.monotonic() - started) / (done - (len(cells) - len(todo)))
            left = rate * (len(cells) - done) / 60
            say(f"{done}/{len(cells)}  {cell.name}, seed {cell.seed}: {'failed' if problem else 'done'}; {left:.0f} min left")

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


def _work(
    folder: Path, waiting: queue.SimpleQueue[Cell], threads: int, finished: Callable[[Cell, str], None]
) -> None:
    """Run the cells that wait, one after the other, in one process; where it dies, the next cell gets a new one."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = None
    try:
        while True:
            cell = waiting.get_nowait()
            pool = pool or ProcessPoolExecutor(1, mp_context=context)
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


def attempt(folder: Path, cell: Cell, threads: int) -> str:
    """Run one cell with so many torch threads; returns why it failed, empty when it did not.

    The reason is a text, because not every exception can be handed to another process.
    """
    try:
        run_cell(folder, cell, threads)
    except FedTARError as error:
        return str(error)
    except Exception as error:
        logger.exception("%s, seed %s", cell.name, cell.seed)
        return f"unexpected {type(error).__name__}: {error}"
    return ""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_cell(folder: Path, cell: Cell, threads: int = 1) -> dict[str, Any]:
    """Run one cell and write its result; the scores of single reports go beside it, as ``.rows.jsonl``.

    ``threads`` are torch's, unless the suite sets ``torch_threads``.

    Raises:
        FedTARError: the run failed.
    """
    import torch

    from fedtar_flare.suite.engine import run_in_process
    from fedtar_flare.suite.outside import shared_alone

    recipe = cell.build(threads)
    torch.set_num_threads(recipe.executor.torch_threads)
    work = folder / "runs" / f"{cell.name}-{cell.seed}-{cell.digest}"
    shutil.rmtree(work, ignore_errors=True)
    began = time.monotonic()
    results = run_in_process(recipe, list(cell.sites), work)
    seconds = time.monotonic() - began
    events = read_events(results)
    start, evaluations = of_kind(events, Start)[0], of_kind(events, Evaluation)
    outside = shared_alone(recipe, results, cell.outside)
    states = {site: _state(site, start.run_id) for site in cell.sites}
    rows = [row for site, state in states.items() for row in _last_scores(site, state)] + outside.rows
    result = {
        "arm": cell.name,
        "label": cell.arm.label or cell.name,
        "method": cell.arm.method,
        "seed": cell.seed,
        "settings": cell.recipe,
        "sites": list(cell.sites),
        "versions": {"fedtar_flare": __version__, "python": platform.python_version()}
        | {name: installed(name) for name in PACKAGES},
        "torch_threads": recipe.executor.torch_threads,
        "seconds": round(seconds, 1),
        "bytes": sum((step.bytes_up or 0) + (step.bytes_down or 0) for step in of_kind(events, Step)),
        "counts": start.counts,
        "validation_loss": {event.round: event.loss for event in of_kind(events, Validation)},
        "evaluations": [event.model_dump(mode="json") for event in evaluations],
        "outside": outside.scores,
    }
    file = result_file(folder, cell)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(rows_file(folder, cell), "".join(f"{json.dumps(row)}\n" for row in rows))
    write_text(file, json.dumps(result, indent=1))
    for state in states.values():
        shutil.rmtree(state)
    shutil.rmtree(work)
    return result


def _state(site: str, run_id: str) -> Path:
    """Folder of a simulated site's state in a run."""
    configured = load_site_config(site, workspace=None, simulator=True).state_dir
    return SiteState(configured or home() / "state", run_id, site).folder


def _last_scores(site: str, state: Path) -> list[dict[str, Any]]:
    """The scores of single reports that a site kept of the last evaluation."""
    files = sorted(state.glob("report-scores-*.jsonl"))
    lines = files[-1].read_text(encoding="utf-8").splitlines() if files else []
    return [{"site": site, **json.loads(line)} for line in lines]
