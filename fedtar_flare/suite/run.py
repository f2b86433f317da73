"""Run a suite: each experiment in this process or in one of several; its result is a small JSON file."""

import json
import logging
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import write_text
from fedtar_flare.suite.hospitals import described
from fedtar_flare.suite.plan import Experiment

logger = logging.getLogger(__name__)
RESULTS = "results"


def result_file(folder: Path, experiment: Experiment) -> Path:
    """``<folder>/results/<arm>[-<variant>]-<seed>-<digest>.json``."""
    return folder / RESULTS / f"{experiment.file_name}.json"


def rows_file(folder: Path, experiment: Experiment) -> Path:
    """The scores of single reports that belong to a result."""
    return result_file(folder, experiment).with_suffix(".rows.jsonl")


def pending(folder: Path, experiments: Iterable[Experiment]) -> list[Experiment]:
    """Experiments without a result."""
    return [experiment for experiment in experiments if not result_file(folder, experiment).is_file()]


def run_suite(
    folder: Path, experiments: Sequence[Experiment], *, processes: int = 1, say: Callable[[str], None] = print
) -> list[str]:
    """Run what has no result in the folder yet; one that fails is left out, the others go on.

    ``processes`` of them run at the same time, each with its share of the cores; ``say`` gets a line after each, with
    the time left. Returns a line for each that failed.
    """
    todo = pending(folder, experiments)
    before, started = len(experiments) - len(todo), time.monotonic()
    say(f"{len(experiments)} runs, {before} of them done before")
    failed: list[str] = []
    done, lock = before, threading.Lock()

    def finished(one: Experiment, problem: str) -> None:
        nonlocal done
        with lock:
            done += 1
            if problem:
                failed.append(f"{one.title}: {problem}")
            left = (time.monotonic() - started) / (done - before) * (len(experiments) - done) / 60
            say(f"{done}/{len(experiments)}  {one.title}: {'failed' if problem else 'done'}; {left:.0f} min left")

    threads = max(1, cores() // processes)
    if processes == 1:
        for one in todo:
            finished(one, attempt(folder, one, threads))
        return failed
    waiting = iter(todo)  # the lanes take from one iterator, whose steps are atomic

    def lane(_: int) -> None:
        """Run what waits, one after the other, in one process; where it dies, the next experiment gets a new one."""
        with ExitStack() as pools:
            pool = None
            for one in waiting:
                pool = pool or pools.enter_context(one_worker())
                try:
                    problem = pool.submit(attempt, folder, one, threads).result()
                except BrokenProcessPool:
                    problem, pool = "its process died (killed, or out of memory)", None
                finished(one, problem)

    with ThreadPoolExecutor(processes) as lanes:
        list(lanes.map(lane, range(processes)))
    return failed


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


def attempt(folder: Path, experiment: Experiment, threads: int) -> str:
    """Run one experiment; why it failed, or nothing: a text, since not every exception can be sent to a process."""
    try:
        run_experiment(folder, experiment, threads)
    except FedTARError as error:
        return str(error)
    except Exception as error:
        logger.exception("%s", experiment.title)
        return f"unexpected {type(error).__name__}: {error}"
    return ""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_experiment(folder: Path, experiment: Experiment, threads: int = 1) -> None:
    """Run one experiment; write its result, and the scores of single reports or images as ``.rows.jsonl``.

    The reports themselves stay in ``<folder>/runs/<experiment>``, readable by the owner alone, for ``fedtar score``.
    ``threads`` are torch's, unless the suite sets ``torch_threads``; a run that failed raises :class:`FedTARError`.
    """
    import torch

    from fedtar_flare.learning.evaluation import TEXTS
    from fedtar_flare.suite.collect import collect, keep_reports
    from fedtar_flare.suite.engine import run_in_process

    recipe = experiment.build(threads)
    torch.set_num_threads(recipe.executor.torch_threads)
    work = folder / "runs" / experiment.file_name
    shutil.rmtree(work, ignore_errors=True)
    began = time.monotonic()
    with described(experiment.variant, work / "hospitals"):
        results = run_in_process(recipe, list(experiment.sites), work, experiment.variant.joins)
        result, rows = collect(experiment, recipe, results)
    result["seconds"] = round(time.monotonic() - began, 1)
    file = result_file(folder, experiment)
    scores = [{key: value for key, value in row.items() if key not in TEXTS} for row in rows]
    shutil.rmtree(work)
    keep_reports(work, experiment, rows, result.get("scored_round", 0))
    write_text(rows_file(folder, experiment), "".join(f"{json.dumps(row)}\n" for row in scores))
    write_text(file, json.dumps(result, indent=1))
