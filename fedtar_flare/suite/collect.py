"""What is kept of a finished run: its result, and the scores of single reports or test images."""

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
from fedtar_flare.suite.hospitals import site_config
from fedtar_flare.suite.outside import Found, shared_alone
from fedtar_flare.suite.plan import Experiment
from fedtar_flare.version import __version__

PACKAGES = ("torch", "transformers", "peft", "nvflare", "numpy")


def collect(experiment: Experiment, recipe: MethodRecipe, results: Path) -> Found:
    """What is kept of the run whose record and checkpoints are in ``results``; removes the state of its sites.

    Scores of reports are of one round everywhere, at the hospitals that took part and outside (``scored_round``).
    """
    events = read_events(results, (*SHARED, *method(experiment.arm.method).events))
    start = of_kind(events, Start)[0]
    states = {
        site: SiteState(site_config(site).state_dir or home() / "state", start.run_id, site)
        for site in experiment.sites
    }
    if experiment.writes_reports:
        found, rows = _of_reports(experiment, recipe, results, events, states)
    else:
        found, rows = _of_tasks(events, states, start.rounds)
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
    return result | found, rows


def _curves(events: Sequence[Event]) -> dict[str, list[list[float]]]:
    """What the method's events name as curves: ``[round, value, ...]`` by title."""
    found: dict[str, list[list[float]]] = {}
    for event in events:
        for title, name in event.curves.items():
            value = getattr(event, name)
            values = value if isinstance(value, list) else [value]
            found.setdefault(title, []).append([getattr(event, "round", 0), *values])
    return found


def _of_reports(
    experiment: Experiment,
    recipe: MethodRecipe,
    results: Path,
    events: Sequence[Event],
    states: Mapping[str, SiteState],
) -> Found:
    variant = experiment.variant
    evaluations, validations = of_kind(events, Evaluation), of_kind(events, Validation)
    arrives = recipe.controller.config.rounds_per_period
    chosen = scored_round(evaluations, None if arrives else best_round(validations))
    outside, rows = shared_alone(recipe, results, variant.outside, chosen, variant.outside_split)
    for site, state in states.items():
        for number in sorted({event.round for event in evaluations}) if arrives else (0, chosen):
            file = state.folder / f"{REPORT_SCORES}{number:04d}.jsonl"
            lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
            of_site = [{"site": site, "when": "end" if number else "start", **json.loads(line)} for line in lines]
            learnt = -(-(number or variant.joins.get(site, 1) - 1) // arrives) if arrives else 0
            rows += over_time(of_site, learnt) if arrives else of_site
    return {
        "scored_round": chosen,
        "validation": [event.model_dump(mode="json", include={"round", "loss", "sites"}) for event in validations],
        "evaluations": [event.model_dump(mode="json") for event in evaluations],
        "outside": outside,
    }, rows


def keep_reports(folder: Path, experiment: Experiment, rows: Sequence[Mapping[str, Any]], round_: int) -> None:
    """Keep a run's reports where :func:`.report_texts` finds them: ``<folder>/<site>``, ``<folder>/outside/<site>``.

    Those before training are of round 0. There are none of a method that writes none.
    """
    kept: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("when") in ("start", "end"):
            place = row["site"] if row["site"] in experiment.sites else f"outside/{row['site']}"
            kept.setdefault((place, round_ if row["when"] == "end" else 0), []).append(row)
    for (place, number), of_place in kept.items():
        write_report_scores(folder / place, number, of_place)


def over_time(rows: Sequence[dict[str, Any]], learnt: int) -> list[dict[str, Any]]:
    """Rows that a site kept when it had ``learnt`` from so many periods, as they are compared where visits arrive.

    ``when`` is ``end`` for reports of the next period, which were scored ahead of time, ``start`` before anything was
    learnt, and ``past`` for reports of periods that were learnt from.
    """
    ahead = "end" if learnt else "start"
    return [{**row, "learnt": learnt, "when": ahead if row["time_step"] > learnt else "past"} for row in rows]


def _of_tasks(events: Sequence[Event], states: Mapping[str, SiteState], steps: int) -> Found:
    """Of a method that learns tasks of classification.

    A row is an image in a task: ``site``, ``step``, ``task``, ``patient_id``, ``label`` and ``scores`` at e = 0..E.
    ``tasks`` has, for each site and task, the seconds until each epoch, those of the start among them.
    """
    begun = {event.round: event for event in of_kind(events, TaskBegun)}
    tasks = []
    for event in of_kind(events, TaskLearnt):
        for site, one in sorted(event.sites.items()):
            waited = begun[event.round].waited(site) if event.round in begun else 0.0
            seconds = [round(waited + spent, 3) for spent in one.at_epoch or [0.0]]
            about = one.model_dump(mode="json", exclude={"at_epoch", "seconds"})
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
