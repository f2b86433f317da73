"""Collects the result of a finished run: its settings and scores, and the scores of single reports or test images."""

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from fedtar_flare.learning.evaluation import REPORT_SCORES, write_report_scores
from fedtar_flare.record.events import SHARED, Evaluation, Event, Joined, Start, Step, TaskBegun, TaskLearnt, Validation
from fedtar_flare.record.log import best_round, of_kind, read_events, scored_round
from fedtar_flare.registry import method
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.site.context import home
from fedtar_flare.site.state import SiteState, task_scores
from fedtar_flare.suite.outside import Scored, shared_alone
from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.results import grouped
from fedtar_flare.suite.variants import site_config
from fedtar_flare.version import __version__

PACKAGES = ("torch", "transformers", "peft", "nvflare", "numpy")


def collect(experiment: Experiment, recipe: MethodRecipe, results: Path) -> Scored:
    """The result and rows of the run whose record and checkpoints are in ``results``; removes the state of its sites.

    Scores of reports are of one round everywhere, at the hospitals that took part and outside (``scored_round``).
    """
    events = read_events(results, (*SHARED, *method(experiment.arm.method).events))
    start = of_kind(events, Start)[0]
    states = {
        site: SiteState(site_config(site).state_dir or home() / "state", start.run_id, site)
        for site in experiment.sites
    }
    if experiment.writes_reports:
        scores, rows = _report_scores(experiment, recipe, results, events, states)
    else:
        scores, rows = _task_scores(events, states, start.rounds)
    for state in states.values():
        shutil.rmtree(state.folder, ignore_errors=True)
    variant = experiment.variant
    result = {
        "arm": experiment.name,
        "label": experiment.arm.label or experiment.name,
        "method": experiment.arm.method,
        "seed": experiment.seed,
        "settings": experiment.recipe,
        "sites": list(experiment.sites),
        "variant": {"scenario": variant.scenario} | variant.point,
        "joins": variant.joins,
        "cohort": variant.cohort,
        "versions": {"fedtar_flare": __version__, "python": platform.python_version()}
        | {name: installed(name) for name in PACKAGES},
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
    experiment: Experiment,
    recipe: MethodRecipe,
    results: Path,
    events: Sequence[Event],
    states: Mapping[str, SiteState],
) -> Scored:
    variant = experiment.variant
    evaluations, validations = of_kind(events, Evaluation), of_kind(events, Validation)
    chosen = scored_round(evaluations, best_round(validations))
    outside, rows = shared_alone(recipe, results, variant.outside, chosen, variant.outside_split)
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


def keep_reports(folder: Path, experiment: Experiment, rows: Sequence[Mapping[str, Any]], round_: int) -> None:
    """Keep a run's reports where :func:`.report_texts` finds them: ``<folder>/<site>``, ``<folder>/outside/<site>``.

    Reports before training are of round 0. A method that writes no reports keeps none.
    """
    if not experiment.writes_reports:
        return
    for (site, when), reports in grouped(rows, lambda row: (row["site"], row["when"])).items():
        name = site if site in experiment.sites else f"outside/{site}"
        write_report_scores(folder / name, round_ if when == "end" else 0, reports)


def _task_scores(events: Sequence[Event], states: Mapping[str, SiteState], steps: int) -> Scored:
    """Of a method that learns tasks of classification.

    A row is an image in a task: ``site``, ``step``, ``task``, ``patient_id``, ``label`` and ``scores`` at e = 0..E.
    ``tasks`` has, for each site and task, the seconds until each epoch, those of the start among them.
    """
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
