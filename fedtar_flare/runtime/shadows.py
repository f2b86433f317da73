"""Shadow runs: a site's part of a run, trained again without federation, on chosen patients."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from fedtar_flare import registry
from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.data.cohort import Cohort
from fedtar_flare.learning.site_model import SiteModel
from fedtar_flare.models.sources import hub_access
from fedtar_flare.protocol.contract import ADAPTER, HANDSHAKE, PARAMETERS, TRAIN
from fedtar_flare.protocol.messages import OK, TaskHeader, version
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.runtime.task import Task
from fedtar_flare.site.context import Site
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import SiteState


def train_shadow(
    cohort: Cohort, run: Mapping[str, Any], rounds: int, *, site: Site, config: SiteConfig, model: Mapping[str, Any]
) -> SiteModel:
    """Train a run's training tasks again, from its start, at this site alone; it costs no budget and leaves no file."""
    if (job := run.get("job")) is None or job["rounds_per_period"]:
        raise ConfigError("--shadows: a run whose visits arrived by periods is not repeated")
    settings = job["settings"] | {"model": {**(job["settings"].get("model") or {}), **model}}
    method, config = registry.method(job["method"]), config.replace(canaries=0)
    strategy = method.site(method, job["preset"], settings, run["seed"]).at(config.source, config.lora_rank)
    down = method.contract.task(TRAIN).down
    if not isinstance(strategy, ReportSite) or not {*down} <= {ADAPTER.name, PARAMETERS.name}:
        raise ConfigError(f"--shadows: method '{job['method']}' needs more of a server than an adapter")
    handlers, trained = strategy.handlers(), False
    about = {"method": job["method"], "run_id": "shadow", "rounds": max(rounds, job["rounds"])}
    about["time_steps"] = run["time_steps"]
    with TemporaryDirectory() as folder, hub_access(allowed=False):
        state, here = SiteState(folder, "shadow", site.name), {"records": Path(folder), "stop_if_aborted": lambda: None}
        about_site = {"name": site.name, "simulated": site.simulated, "workspace": site.workspace, "of_job": []}
        shadow: Any = SimpleNamespace(**about_site, **here)
        begin = TaskHeader(**about, round=0, step=0, after=version(0, 0), initial_site=site.name)
        task = Task(
            name=HANDSHAKE,
            header=begin,
            weights={},
            site=shadow,
            config=config,
            state=state,
            cohort=cohort,
            settings=strategy.settings,
            contract=method.contract,
            min_cell=strategy.min_cell(config),
            job_seed=run["seed"],
        )
        weights = handlers[HANDSHAKE](task)[1] or {}
        for round_, step in ((r, t) for r in range(1, rounds + 1) for t in range(1, run["time_steps"] + 1)):
            header = TaskHeader(**about, round=round_, step=step, after=version(round_, step - 1))
            reply, update = handlers[TRAIN](replace(task, name=TRAIN, header=header, weights=weights if down else {}))
            weights = {name: value + update[name] for name, value in weights.items()} if update else weights
            trained = trained or reply.status == OK
    if not trained or strategy.learner is None:
        raise DataError(f"--shadows: half of the patients of site {site.name} are too few for the run's updates")
    return strategy.learner
