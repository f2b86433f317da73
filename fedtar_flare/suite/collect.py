"""Collects the result of a finished run: its settings and scores, and the scores of single reports or test images."""

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.learning.evaluation import REPORT_SCORES
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.record.events import SHARED, Evaluation, Event, Joined, Start, Step, TaskBegun, TaskLearnt, Validation
from fedtar_flare.record.log import best_round, of_kind, read_events, scored_round
from fedtar_flare.registry import method
from fedtar_flare.runtime.checkpoint import BEST, load
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.site.cohort import labeler_of_site, prepare_site
from fedtar_flare.site.context import home
from fedtar_flare.site.state import SiteState, task_scores
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.plan import Experiment, cohorts, site_config
from fedtar_flare.version import __version__

PACKAGES = ("torch", "transformers", "peft", "nvflare", "numpy")
Scored = tuple[dict[str, Any], list[dict[str, Any]]]  # part of a run's result, and rows of single reports or images


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
