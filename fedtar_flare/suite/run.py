"""Runs a suite: each experiment in this process or in one of several; its result is a small JSON file."""

import json
import logging
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from loky import cpu_count

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import write_text
from fedtar_flare.suite.plan import Experiment, site_files
from fedtar_flare.suite.results import grouped, result_file, rows_file

logger = logging.getLogger(__name__)


def run_suite(
    folder: Path, experiments: Sequence[Experiment], *, processes: int = 1, say: Callable[[str], None] = print
) -> list[str]:
    """Run the experiments that have no result in the folder yet. One that fails does not stop the others."""
    todo = [experiment for experiment in experiments if not result_file(folder, experiment).is_file()]
    before, started = len(experiments) - len(todo), time.monotonic()
    say(f"{len(experiments)} runs, {before} of them done before")
    failed: list[str] = []
    for done, (run, problem) in enumerate(_attempts(folder, todo, processes), start=1):
        if problem:
            failed.append(f"{run.title}: {problem}")
        left = (time.monotonic() - started) / done * (len(todo) - done) / 60
        state = "failed" if problem else "done"
        say(f"{before + done}/{len(experiments)}  {run.title}: {state}; {left:.0f} min left")
    return failed


def _attempts(folder: Path, todo: Sequence[Experiment], processes: int) -> Iterator[tuple[Experiment, str]]:
    """Each experiment once it has ended, with the reason if it failed."""
    threads = max(1, cpu_count() // processes)
    if processes == 1:
        for run in todo:
            yield run, attempt(folder, run, threads)
        return
    lanes = ThreadPoolExecutor(processes)
    try:
        runs = {lanes.submit(attempt_in_process, folder, run, threads): run for run in todo}
        for future in as_completed(runs):
            yield runs[future], future.result()
    finally:
        lanes.shutdown(cancel_futures=True)  # when the user interrupts, nothing new begins


def attempt_in_process(folder: Path, experiment: Experiment, threads: int) -> str:
    """:func:`attempt` in another process, whose death is a reason too."""
    try:
        with single_worker() as worker:
            return worker.submit(attempt, folder, experiment, threads).result()
    except BrokenProcessPool:
        return "its process died (killed, or out of memory)"


def single_worker() -> ProcessPoolExecutor:
    """A pool of one process, which ends when this process does, even when this one is killed."""
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
    """Run one experiment; returns why it failed, or "": a text, since not every exception can be pickled."""
    try:
        run_experiment(folder, experiment, threads)
    except FedTARError as error:
        return str(error)
    except Exception as error:
        logger.exception("%s", experiment.title)
        return f"unexpected {type(error).__name__}: {error}"
    return ""


def run_experiment(folder: Path, experiment: Experiment, threads: int = 1) -> None:
    """Run one experiment; write its result and scores of single reports; its reports stay for ``fedtar score``."""
    import torch

    from fedtar_flare.learning.evaluation import TEXTS, write_report_scores
    from fedtar_flare.runtime.in_process import run_in_process
    from fedtar_flare.suite.collect import collect

    recipe = experiment.build(threads)
    torch.set_num_threads(recipe.executor.torch_threads)
    work = folder / "runs" / experiment.file_name
    shutil.rmtree(work, ignore_errors=True)
    began = time.monotonic()
    with site_files(experiment.suite, work / "hospitals"):
        results = run_in_process(recipe, experiment.suite.sites, work)
        result, rows = collect(experiment, recipe, results)
    result["seconds"] = round(time.monotonic() - began, 1)
    file = result_file(folder, experiment)
    scores = [{key: value for key, value in row.items() if key not in TEXTS} for row in rows]
    shutil.rmtree(work)
    by_hospital = grouped(rows, lambda row: (row["site"], row["when"])) if experiment.writes_reports else {}
    for (site, when), reports in by_hospital.items():
        name = site if site in experiment.suite.sites else f"outside/{site}"
        write_report_scores(work / name, result["scored_round"] if when == "end" else 0, reports)
    write_text(rows_file(folder, experiment), "".join(f"{json.dumps(row)}\n" for row in scores))
    write_text(file, json.dumps(result, indent=1))
