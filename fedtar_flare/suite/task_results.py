"""What is kept of a finished run of a method that learns tasks of classification: curves, seconds, scores of images."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtar_flare.fedkei.events import EVENTS, Learnt, Mixed, Stream
from fedtar_flare.fedkei.site_page import scores_name
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.record.events import SHARED, Joined, Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.site.state import SiteState
from fedtar_flare.suite.collect import about_run, state_of
from fedtar_flare.suite.plan import Cell


def collect_tasks(cell: Cell, recipe: MethodRecipe, results: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of a run, and the scores of single test images; removes the state of its sites.

    A row is an image in a task: ``site``, ``step``, ``task``, ``patient_id``, ``label`` and ``scores`` at e = 0..E.
    ``tasks`` of the result has, for each site and task, the seconds until each epoch, the start's own among them
    (clustering at the server, PROBE and alpha at the site).
    """
    events = read_events(results, (*SHARED, *EVENTS))
    start, stream = of_kind(events, Start)[0], of_kind(events, Stream)[0]
    mixed = {event.round: event for event in of_kind(events, Mixed)}
    tasks = []
    for event in of_kind(events, Learnt):
        for site, one in sorted(event.sites.items()):
            before = mixed[event.round].clustering_seconds + mixed[event.round].probe_took.get(site, 0.0)
            tasks.append(
                {
                    "step": event.round,
                    "site": site,
                    "task": one.task,
                    "n": one.n,
                    "seconds": [round(before + spent, 3) for spent in one.at_epoch],
                    "start_seconds": round(before + (one.at_epoch or [0.0])[0], 3),
                    "fell_back": one.fell_back,
                    "mixture_loss": one.mixture_loss,
                    "start_loss": one.start_loss,
                    "membership": one.membership,
                }
            )
    states = {site: state_of(site, start.run_id) for site in cell.sites}
    rows = [row for site, state in states.items() for row in _rows(site, state, start.rounds)]
    counts = start.counts | {s: n for event in of_kind(events, Joined) for s, n in event.counts.items()}
    result = about_run(cell, recipe) | {
        "plan": stream.plan,
        "order": stream.order,
        "bytes": sum((step.bytes_up or 0) + (step.bytes_down or 0) for step in of_kind(events, Step)),
        "counts": counts,
        "rounds": start.rounds,
        "tasks": tasks,
    }
    for state in states.values():
        shutil.rmtree(state.folder, ignore_errors=True)
    return result, rows


def _rows(site: str, state: SiteState, steps: int) -> Iterator[dict[str, Any]]:
    """The scores of single images that a site kept, of each task in which it took part."""
    for step in range(1, steps + 1):
        if not state.has(scores_name(step)):
            continue
        tensors, about = state.read(scores_name(step))
        columns = tensors["scores"].T.tolist()
        for patient, label, scores in zip(about["patients"], about["labels"], columns, strict=True):
            yield {
                "site": site,
                "step": step,
                "task": about["task"],
                "patient_id": patient,
                "label": label,
                "scores": scores,
            }
