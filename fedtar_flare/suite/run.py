"""Runs a suite: each experiment in this process or in one of several; its result is a small JSON file.

A result has the run's settings and scores; beside it are the scores of single reports or test images.
"""

import json
import logging
import multiprocessing
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import torch
from loky import cpu_count

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import locked, write_text
from fedtar_flare.learning.evaluation import REPORT_SCORES, TEXTS, write_report_scores
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.record.events import SHARED, Evaluation, Event, Joined, Start, Step, TaskBegun, TaskLearnt, Validation
from fedtar_flare.record.log import best_round, of_kind, read_events, scored_round
from fedtar_flare.registry import method
from fedtar_flare.runtime.checkpoint import BEST, load
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.runtime.simulation import run_in_process
from fedtar_flare.site.cohort import labeler_of_site, prepare_site
from fedtar_flare.site.context import home
from fedtar_flare.site.state import SiteState, task_scores
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.plan import Experiment, cohorts, site_config, site_files
from fedtar_flare.suite.results import grouped, result_file, rows_file
from fedtar_flare.version import __version__

logger = logging.getLogger(__name__)
PACKAGES = ("torch", "transformers", "peft", "nvflare", "numpy")
Scored = tuple[dict[str, Any], list[dict[str, Any]]]  # part of a run's result, and rows of single reports or images


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
        with locked(folder / experiment.file_name):  # another command with this folder may be making the run
            if not result_file(folder, experiment).is_file():
                run_experiment(folder, experiment, threads)
    except FedTARError as error:
        return str(error)
    except Exception as error:
        logger.exception("%s", experiment.title)
        return f"unexpected {type(error).__name__}: {error}"
    return ""


def run_experiment(folder: Path, experiment: Experiment, threads: int = 1) -> None:
    """Run one experiment; write its result and scores of single reports; its reports stay for ``fedtar score``."""
    recipe = experiment.build(threads)
    torch.set_num_threads(recipe.executor.torch_threads)
    work = folder / "runs" / experiment.file_name
    shutil.rmtree(work, ignore_errors=True)
    began = time.monotonic()
    with site_files(experiment.suite, work / "hospitals"):
        results = run_in_process(recipe, experiment.suite.sites, work)
        result, rows = collect(experiment, recipe, results)
    result["seconds"] = round(time.monotonic() - began, 1)
    scores = [{key: value for key, value in row.items() if key not in TEXTS} for row in rows]
    shutil.rmtree(work)
    by_hospital = grouped(rows, lambda row: (row["site"], row["when"])) if experiment.writes_reports else {}
    for (site, when), reports in by_hospital.items():
        name = site if site in experiment.suite.sites else f"outside/{site}"
        write_report_scores(work / name, result["scored_round"] if when == "end" else 0, reports)
    write_text(rows_file(folder, experiment), "".join(f"{json.dumps(row)}\n" for row in scores))
    write_text(result_file(folder, experiment), json.dumps(result, indent=1))


def collect(experiment: Experiment, recipe: MethodRecipe, results: Path) -> Scored:
    """Read the result and rows of the run in ``results``, of one round everywhere; remove the state of its sites."""
    events = read_events(results, (*SHARED, *method(experiment.arm.method).events))
    start = of_kind(events, Start)[0]
    folders = {site: site_config(site).state_dir or home() / "state" for site in experiment.suite.sites}
    states = {site: SiteState(folder, start.run_id, site) for site, folder in folders.items()}
    if experiment.writes_reports:
        scores, rows = _report_scores(experiment.suite, recipe, results, events, states)
    else:
        scores, rows = _task_scores(events, states, start.rounds)
    for state in states.values():
        shutil.rmtree(state.folder, ignore_errors=True)
    packages = {name: installed(name) for name in PACKAGES}
    result = {
        "arm": experiment.name,
        "label": experiment.arm.label or experiment.name,
        "method": experiment.arm.method,
        "seed": experiment.seed,
        "settings": experiment.recipe,
        "sites": list(experiment.suite.sites),
        "cohort": cohorts(experiment.suite),
        "versions": {"fedtar_flare": __version__, "python": platform.python_version(), **packages},
        "torch_threads": recipe.executor.torch_threads,
        "shares": recipe.contract.shares,
        "bytes": sum((step.bytes_up or 0) + (step.bytes_down or 0) for step in of_kind(events, Step)),
        "counts": start.counts | {s: n for event in of_kind(events, Joined) for s, n in event.counts.items()},
        "rounds": start.rounds,
        "curves": _curves(events),
    }
    return result | scores, rows


def _curves(events: Sequence[Event]) -> dict[str, list[list[float]]]:
    """What the method's events name as curves: ``[round, value, ...]`` by title."""
    curves: dict[str, list[list[float]]] = {}
    for event in events:
        for title, name in event.curves.items():
            value = getattr(event, name)
            values = value if isinstance(value, list) else [value]
            curves.setdefault(title, []).append([getattr(event, "round", 0), *values])
    return curves


def _report_scores(
    suite: Suite, recipe: MethodRecipe, results: Path, events: Sequence[Event], states: Mapping[str, SiteState]
) -> Scored:
    evaluations, validations = of_kind(events, Evaluation), of_kind(events, Validation)
    chosen = scored_round(evaluations, best_round(validations))
    outside, rows = score_outside(recipe, results, suite.outside, chosen, suite.outside_split)
    for site, state in states.items():
        for number, when in ((0, "start"), (chosen, "end")):
            file = state.folder / f"{REPORT_SCORES}{number:04d}.jsonl"
            lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
            rows += [{"site": site, "when": when, **json.loads(line)} for line in lines]
    return {
        "scored_round": chosen,
        "validation": [event.model_dump(mode="json", include={"round", "loss", "sites"}) for event in validations],
        "evaluations": [event.model_dump(mode="json") for event in evaluations],
        "outside": outside,
    }, rows


def score_outside(
    recipe: MethodRecipe, results: Path, hospitals: Sequence[str], round_: int, split: str = "test"
) -> Scored:
    """Score a shared adapter at hospitals outside before training (``start``) and of round ``round_`` (``end``)."""
    scores: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    if not recipe.contract.shares or not hospitals:
        return scores, rows
    checkpoint = load(results / "checkpoint" / BEST)
    if checkpoint.round != round_:
        checkpoint = load(results / "checkpoint" / f"round-{round_:04d}.safetensors")
    for hospital in hospitals:
        learner = _learner(recipe, hospital)
        states: Mapping[str, Mapping[str, torch.Tensor]] = {"start": learner.shared(), "end": checkpoint.weights}
        for when, weights in states.items():
            learner.load_shared(weights)
            evaluated = learner.evaluate(min_cell=1, split="test" if split == "test" else None)
            scores.setdefault(hospital, {})[when] = evaluated.scores
            rows += [{"site": hospital, "when": when, **row} for row in evaluated.rows]
    return scores, rows


def _learner(recipe: MethodRecipe, hospital: str) -> ReportLearner:
    """The method's model with the shared adapter and nothing else, on a hospital's patients."""
    executor, config = recipe.executor, site_config(hospital)
    assert isinstance(executor.strategy, ReportSite)
    settings, seed, steps = executor.strategy.settings, executor.seed, recipe.controller.config.time_steps
    cohort, _ = prepare_site(config, hospital, model=settings.model, data=settings.data, time_steps=steps, seed=seed)
    kind, more = executor.strategy.shared_learner(config.source)
    learner = kind(
        model=settings.model,
        training=settings.training,
        cohort=cohort,
        seed=seed,
        device=config.device,
        precision=config.precision,
        **({"lora": settings.lora} | more),
    )
    learner.report_labeler, learner.scores = labeler_of_site(config), config.scores
    return learner


def _task_scores(events: Sequence[Event], states: Mapping[str, SiteState], steps: int) -> Scored:
    """Scores of tasks with the seconds until each epoch, the start's among them, and rows of images at e = 0..E."""
    begun = {event.round: event for event in of_kind(events, TaskBegun)}
    tasks = []
    for event in of_kind(events, TaskLearnt):
        for site, learnt in sorted(event.sites.items()):
            waited = begun[event.round].waited(site) if event.round in begun else 0.0
            seconds = [round(waited + spent, 3) for spent in learnt.at_epoch or [0.0]]
            about = learnt.model_dump(mode="json", exclude={"at_epoch", "seconds"})
            about |= {"step": event.round, "site": site, "seconds": seconds, "start_seconds": seconds[0]}
            tasks.append(about)
    rows = []
    for site, state in states.items():
        for step in (step for step in range(1, steps + 1) if state.has(task_scores(step))):
            tensors, about = state.read(task_scores(step))
            of_images = zip(about["patients"], about["labels"], tensors["scores"].T.tolist(), strict=True)
            where = {"site": site, "step": step, "task": about["task"]}
            rows += [where | {"patient_id": p, "label": label, "scores": s} for p, label, s in of_images]
    return {"tasks": tasks}, rows
