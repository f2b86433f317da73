"""What is kept of a finished run: its result, and the scores of single reports."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Sequence
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from fedtar_flare.fedtar.events import EVENTS, Alphas, Outer
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.protocol.messages import version
from fedtar_flare.record.best import best_round
from fedtar_flare.record.events import SHARED, Evaluation, Joined, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.site.place import home
from fedtar_flare.site.state import SiteState
from fedtar_flare.suite.embedding import embedding
from fedtar_flare.suite.hospitals import site_config
from fedtar_flare.suite.outside import shared_alone
from fedtar_flare.suite.plan import Cell
from fedtar_flare.suite.texts import keep_texts
from fedtar_flare.version import __version__

PACKAGES = ("torch", "transformers", "peft", "nvflare", "numpy")


def collect(cell: Cell, recipe: MethodRecipe, results: Path, kept: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of a run, and the scores of single reports; removes the state of its sites.

    Scores are those of one round everywhere, at the hospitals that took part and outside (see :func:`scored_round`).
    ``kept`` is the folder of the suite's results, where the texts of the hospitals are described once.
    """
    events = read_events(results, (*SHARED, *EVENTS))
    start, evaluations, validations = (
        of_kind(events, Start)[0],
        of_kind(events, Evaluation),
        of_kind(events, Validation),
    )
    chosen = scored_round(evaluations, best_round(validations))
    outside = shared_alone(recipe, results, cell.variant.outside, chosen)
    states = {site: state_of(site, start.run_id) for site in cell.sites}
    rows = [row for site, state in states.items() for row in _rows(site, state, chosen)] + outside.rows
    own = not cell.variant.values  # figures of patients and texts are of the suite's own hospitals
    after = version(chosen, recipe.controller.time_steps)
    result = about_run(cell, recipe) | {
        "shares": recipe.contract.shares,
        "bytes": sum((step.bytes_up or 0) + (step.bytes_down or 0) for step in of_kind(events, Step)),
        "counts": start.counts | {s: n for event in of_kind(events, Joined) for s, n in event.counts.items()},
        "scored_round": chosen,
        "rounds": start.rounds,
        "validation": [event.model_dump(mode="json", include={"round", "loss", "sites"}) for event in validations],
        "alphas": [[one.first_round - 1, *one.alpha] for one in of_kind(events, Alphas)]
        + [[one.round, *one.alpha_after] for one in of_kind(events, Outer)],
        "evaluations": [event.model_dump(mode="json") for event in evaluations],
        "outside": outside.scores,
        "embedding": [p for site, state in states.items() if own for p in embedding(recipe, site, state, after)],
    }
    if own:
        keep_texts(cell, recipe, kept)
    for state in states.values():
        shutil.rmtree(state.folder, ignore_errors=True)
    return result, rows


def about_run(cell: Cell, recipe: MethodRecipe) -> dict[str, Any]:
    """What a result says of how it was made."""
    return {
        "arm": cell.name,
        "label": cell.arm.label or cell.name,
        "method": cell.arm.method,
        "seed": cell.seed,
        "settings": cell.recipe,
        "sites": list(cell.sites),
        "variant": cell.variant.values,
        "joins": cell.variant.joins,
        "cohort": cell.variant.cohort,
        "versions": {"fedtar_flare": __version__, "python": platform.python_version()}
        | {name: installed(name) for name in PACKAGES},
        "torch_threads": recipe.executor.torch_threads,
    }


def scored_round(evaluations: Sequence[Evaluation], best: int | None) -> int:
    """The round whose scores are compared: the best by validation loss, else the last.

    It is the last where the best was not scored, or not as the last was: before a late hospital came, or before a
    method that fine-tunes at the end did so.
    """
    last = evaluations[-1]
    for event in evaluations:
        alike = event.sites.keys() == last.sites.keys() and event.generic.keys() == last.generic.keys()
        if event.round == best and alike:
            return event.round
    return last.round


def state_of(site: str, run_id: str) -> SiteState:
    """A simulated site's state in a run."""
    return SiteState(site_config(site).state_dir or home() / "state", run_id, site)


def _rows(site: str, state: SiteState, round_: int) -> list[dict[str, Any]]:
    """The scores of single reports that a site kept: before training, where it was there, and of a round."""
    rows = []
    for when, number in (("start", 0), ("end", round_)):
        file = state.folder / f"report-scores-{number:04d}.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        rows += [{"site": site, "when": when, **json.loads(line)} for line in lines]
    return rows
