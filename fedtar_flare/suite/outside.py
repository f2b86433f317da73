"""Scores of a run's shared adapter at hospitals that never took part."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.runtime.checkpoint import BEST, load
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.site.cohort import labeler_of_site, prepare_site
from fedtar_flare.suite.variants import site_config

Scored = tuple[dict[str, Any], list[dict[str, Any]]]
"""A part of a run's result, and rows of single reports or images."""


def shared_alone(
    recipe: MethodRecipe, results: Path, hospitals: Sequence[str], round_: int, split: str = "test"
) -> Scored:
    """Score a finished run's shared adapter at hospitals outside; empty where the method shares nothing.

    By hospital: scores of the adapter before training (``start``) and of round ``round_`` (``end``), on the test
    patients or, with ``split="all"``, on all.
    """
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
    cohort, _ = prepare_site(
        config,
        hospital,
        model=executor.strategy.settings.model,
        data=executor.strategy.settings.data,
        time_steps=recipe.controller.config.time_steps,
        seed=executor.seed,
    )
    assert isinstance(executor.strategy, ReportSite)
    kind, more = executor.strategy.shared_learner(config.source)
    learner = kind(
        model=executor.strategy.settings.model,
        training=executor.strategy.settings.training,
        cohort=cohort,
        seed=executor.seed,
        device=config.device,
        precision=config.precision,
        **({"lora": executor.strategy.settings.lora} | more),
    )
    learner.report_labeler = labeler_of_site(config)
    return learner
