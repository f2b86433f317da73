"""What a suite will cost, said before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from fedtar_flare.core.files import read_json
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.suite.hospitals import site_config
from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.run import pending, result_file


def cost(folder: Path, planned: Sequence[Experiment], processes: int = 1) -> str:
    """Runs to be made, reports that they write, and hours by what the suite's runs in ``folder`` took on average.

    Reports are counted where hospitals have data of their own: test patients' at the start, at each evaluation, and of
    each hospital outside, twice where a method writes with and without a part of its own.
    """
    todo = pending(folder, planned)
    reports = sum(map(reports_of, todo))
    took = [read_json(result_file(folder, one))["seconds"] for one in planned if one not in todo]
    written = f"at most {reports:,} reports to be written" if reports else ""
    hours = f"about {fmean(took) * len(todo) / processes / 3600:.1f} hours" if took else "the first run tells the hours"
    return ", ".join(filter(None, (f"{len(todo)} runs to be made", written, hours)))


def reports_of(one: Experiment) -> int:
    """Reports that a run writes, at most; 0 where it writes none or its hospitals are invented."""
    if not one.writes_reports:
        return 0
    recipe = one.build()
    server, seed = recipe.controller, recipe.executor.seed
    evaluations = 1 + -(-server.num_rounds // server.evaluate_every)
    twice = 2 if recipe.definition.kept is not None else 1
    members = sum(_scored(site, server.time_steps, seed, "test") for site in one.sites)
    outside = sum(_scored(site, server.time_steps, seed, one.variant.outside_split) for site in one.variant.outside)
    return evaluations * twice * members + (2 * outside if recipe.contract.shares else 0)


@cache
def _scored(site: str, time_steps: int, seed: int, split: str) -> int:
    from fedtar_flare.data.timeline import Timeline

    config = site_config(site)
    if config.source == "synthetic":
        return 0
    cohort = load_cohort(config, site, timeline=Timeline(time_steps), seed=seed)
    return len(cohort.samples("test" if split == "test" else None))
