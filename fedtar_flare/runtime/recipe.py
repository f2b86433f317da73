"""``MethodRecipe``: the job of any method as code."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.sim_env import SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from fedtar_flare import registry
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.core.settings import check_names
from fedtar_flare.models.config import DECODER_TARGETS
from fedtar_flare.presets import PaperPreset, papers
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.server_config import ServerConfig
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.runtime.training import check_form
from fedtar_flare.site.guard import OutboundGuard

__all__ = ["MethodRecipe"]

FEWEST_HOSPITALS = 2
"""``min_sites`` of a job for hospitals that names none: an aggregate of one hospital is its update."""
SIMULATOR_REQUEST_INTERVAL, PRODUCTION_REQUEST_INTERVAL = 0.05, 2.0
"""Seconds between a site's requests for a task, which are traffic between hospitals, where a step takes minutes."""

SMALL: dict[str, Any] = {
    "num_rounds": 2,  # with -t 1 FLARE's simulator starts a process for each task: three rounds take 7 minutes
    "model": {"lora_targets": DECODER_TARGETS},  # the encoder stays as it is, so that each image is seen by it once
    "training": {"local_steps": 48, "schedule": "cosine"},
    "data": {"synthetic_patients": 64},
    "server": {"evaluate_every": 3},  # to score a round takes a site as long as to train it
}
"""What the shipped preset ``small`` sets for every method: found by experiment (docs/research/experiments.md)."""

PRESETS: Mapping[str, Mapping[str, Any]] = {"small": SMALL}
"""Presets of every method that trains a report generator and has none of its own, besides the papers'."""

CUSTOM_NOTE = """\
This folder is here on purpose. A job that has a `custom` folder may use classes of an installed package without an
entry in each site's class allow-list, which is what `nvflare simulator` on a researcher's own machine needs.

A hospital should not run it: there, the classes of `fedtar_flare` are put on the site's allow-list once, and the job
is exported without this folder.
"""

JOB_SCRIPT = '''\
"""The job {name}, as code: `python job.py` simulates it; see `python job.py --help`."""

from fedtar_flare import MethodRecipe, run_job

recipe = MethodRecipe(
    {arguments},
)

if __name__ == "__main__":
    run_job(recipe)
'''


class MethodRecipe(Recipe):
    """The job of a method.

    Parameters
    ----------
    method : str
        Name of an installed method (:mod:`fedtar_flare.registry`).
    name : str
        Of the job; by default the method's.
    preset : str
        Set of settings, which the other arguments replace one by one.
    num_rounds, time_steps : int, optional
        R and T; None: the preset's, else the method's, else 3.
    min_sites : int, optional
        The job waits to start, and stops, with fewer sites; None: 1 in a simulation, 2 at hospitals.
    seed : int
    torch_threads : int
        Threads of one task at a site.
    mlflow : str
        Tracking URI of an MLflow server, to which the run's curves go as well; empty: to TensorBoard alone.
    server : dict, optional
        Fields of :class:`~fedtar_flare.runtime.server_config.ServerConfig`, and settings of the method's algorithm at
        the server.
    **groups
        Settings at a site, a dictionary for each group: ``model``, ``lora``, ``training``, ``data`` and the method's
        own.

    Raises
    ------
    ConfigError
        A setting is unknown or not allowed; raised before anything is exported or run.

    Examples
    --------
    ::

        from nvflare.recipe import SimEnv
        run = MethodRecipe("fedavg", num_rounds=3, time_steps=3).run(SimEnv(num_clients=3))
    """

    def __init__(
        self,
        method: str,
        *,
        name: str = "",
        preset: str = "small",
        num_rounds: int | None = None,
        time_steps: int | None = None,
        min_sites: int | None = None,
        seed: int = 0,
        torch_threads: int = 1,
        mlflow: str = "",
        server: Mapping[str, Any] | None = None,
        **groups: Mapping[str, Any] | None,
    ):
        # 1. Settings: the preset's, which those of the arguments replace, by group.
        self.definition = registry.method(method)
        self.contract = self.definition.contract
        known = sorted({*self.definition.site.shared_groups, *self.definition.settings})
        check_names(groups, known, f"method '{method}'", "group")
        method_fields = getattr(self.definition.server_settings, "model_fields", {})
        server_fields = (*ServerConfig.model_fields, *method_fields)
        paper, own_preset = self._paper_settings(preset, server_fields), self.definition.presets.get(preset, {})
        merged: dict[str, dict[str, Any]] = {}
        for group in ("server", *known):
            given = server if group == "server" else groups.get(group)
            merged[group] = {**paper.get(group, {}), **own_preset.get(group, {}), **(given or {})}
        at_server = merged.pop("server")
        settings = {group: values for group, values in merged.items() if values}
        defaults = self.definition.rounds(settings) if self.definition.rounds else (3, 3)
        preset_values = {"num_rounds": defaults[0], "time_steps": defaults[1], **paper, **own_preset}
        common: dict[str, Any] = {
            "num_rounds": preset_values["num_rounds"] if num_rounds is None else num_rounds,
            "time_steps": preset_values["time_steps"] if time_steps is None else time_steps,
            "min_sites": 1 if min_sites is None else min_sites,
            "seed": seed,
        }
        self._arguments = {"name": name, "preset": preset, **common, "min_sites": min_sites}
        self._arguments |= {"torch_threads": torch_threads, "mlflow": mlflow, "server": server, **groups}

        # 2. The controller takes the server's settings, and the groups of the method's own.
        if repeated := sorted(common.keys() & at_server.keys()):
            raise ConfigError(f"server: {repeated[0]} is an argument of the recipe itself")
        check_names(at_server, [field for field in server_fields if field not in common], "server")
        method_groups = {group: settings[group] for group in self.definition.server_groups if group in settings}
        if method_server := {field: at_server.pop(field) for field in [*at_server] if field in method_fields}:
            method_groups["server"] = method_server
        self.controller_arguments = {"method": method} | common | at_server | {"settings": method_groups or None}
        controller_class: type[FederatedController] = self.definition.controller or FederatedController
        self.controller = controller_class(**self.controller_arguments)

        # 3. The executor takes the sites' settings; what contradicts the server's is refused here, not at a hospital.
        executor_class: type[SiteExecutor] = self.definition.executor or SiteExecutor
        self.executor = executor_class(method, preset, settings or None, seed, torch_threads)
        site_settings = self.executor.strategy.settings
        site_settings.data.timeline(common["time_steps"])
        check_form(site_settings.lora.mean, self.controller.config.aggregation)

        # 4. The job, with the guard at every site.
        job = _Job(self.contract, name=name or method, min_clients=common["min_sites"])
        tasks = list(self.contract.task_names)
        job.set_app_packages(["fedtar_flare"])  # the sites have the package installed; its code is not put in the job
        job.to_server(self.controller)
        job.to_clients(self.executor, tasks=tasks)
        for filter_type in (FilterType.TASK_DATA, FilterType.TASK_RESULT):  # FLARE knows no "*": each task by its name
            guard = OutboundGuard(methods=[method], extra_names=list(site_settings.lora.exchange))
            job.to_clients(guard, filter_type=filter_type, tasks=tasks)
        add_tracking(job, mlflow)
        super().__init__(job)
        self._run_in(simulator=True)

    def _paper_settings(self, preset: str, server_fields: Collection[str]) -> dict[str, Any]:
        """Settings of a paper's preset that the method has, by group; a site makes the model from the preset's name."""
        paper = papers().get(preset, PaperPreset())
        if paper.classifies is self.definition.reports:
            return {}
        settings: dict[str, Any] = {}
        for name, value in paper.settings.items():
            group, dot, _ = name.partition(".")
            if not dot:
                settings[name] = value
            elif group != "model":
                settings[group] = paper.group(group)
        settings["server"] = {name: value for name, value in paper.group("server").items() if name in server_fields}
        return settings

    def resolved(self) -> dict[str, Any]:
        """Give what decides about the numbers of a run.

        Returns
        -------
        dict
            ``sites``: digest of the settings that sites share; ``server``: all settings, with defaults filled in.
        """
        strategy = self.controller.strategy.settings.to_dict()
        return {
            "sites": self.executor.strategy.settings_digest(),
            "server": self.controller.config.to_dict() | {"strategy": strategy},
        }

    def _run_in(self, simulator: bool) -> None:
        """Set how often sites ask for tasks; ConfigError for a method that no federation may run."""
        if self.definition.simulation_only and not simulator:
            raise ConfigError(f"method '{self.contract.method}' runs in a simulation only: it has no job for hospitals")
        if self._arguments["min_sites"] is None:
            fewest = 1 if simulator else FEWEST_HOSPITALS
            self._job.job.min_clients = self.controller.min_sites = fewest
        seconds = SIMULATOR_REQUEST_INTERVAL if simulator else PRODUCTION_REQUEST_INTERVAL
        self.add_server_config({"server": {"task_request_interval": seconds}})

    def process_env(self, env: ExecEnv) -> None:  # for a federation, byte for byte what export(byoc=False) writes
        self._run_in(isinstance(env, SimEnv))

    def export(
        self, job_dir: str, *args: Any, byoc: bool | None = None, env: ExecEnv | None = None, **kwargs: Any
    ) -> None:
        """Write the job to ``<job_dir>/<name>``.

        Parameters
        ----------
        job_dir : str
        *args, **kwargs
            FLARE's.
        byoc : bool, optional
            True, for the simulator: the job has the ``custom`` folder that the plain simulator needs and the recipe as
            ``job.py``, and sites ask for tasks many times a second. False, for a federation: the class allow-list stays
            in force, and sites ask every two seconds. By default it follows ``env``.
        env : ExecEnv, optional
            FLARE's environment; by default the simulator.
        """
        byoc = isinstance(env, SimEnv | None) if byoc is None else byoc
        self._run_in(simulator=byoc)
        super().export(job_dir, *args, **kwargs)
        if byoc:
            folder = Path(job_dir) / self.name
            write_text(folder / "app" / "custom" / "README.md", CUSTOM_NOTE)
            given = {name: value for name, value in self._arguments.items() if value not in ("", None, {})}
            arguments = [f'"{self.contract.method}"']
            for name, value in json.loads(json.dumps(given, default=str)).items():
                arguments.append(f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}")
            write_text(folder / "job.py", JOB_SCRIPT.format(name=self.name, arguments=",\n    ".join(arguments)))


class _Job(FedJob):
    """A job whose folder is the same for equal recipes, as approvals need; FLARE keeps filters' tasks as sets."""

    def __init__(self, contract: Contract, **arguments: Any):
        super().__init__(**arguments)
        self._tasks = contract.task_names

    def export_job(self, job_root: str) -> None:
        place = Path(job_root) / self.name  # which FLARE deletes first
        if place.is_dir() and any(place.iterdir()) and not (place / "meta.json").is_file():
            raise ConfigError(f"{place} is no job, and would be deleted: choose another name or folder for the job")
        super().export_job(job_root)
        for file in (place / "app" / "config").glob("config_fed_*.json"):
            config = json.loads(file.read_text(encoding="utf-8"))
            for key in ("task_data_filters", "task_result_filters"):
                for entry in config.get(key, []):
                    entry["tasks"].sort(key=self._tasks.index)
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def add_tracking(job: FedJob, mlflow: str) -> None:
    """Add the server's receivers of curves: TensorBoard's, and MLflow's with its tracking URI."""
    from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver  # loads tensorboard: nothing for a site

    job.to_server(TBAnalyticsReceiver(), id="tensorboard")
    if not mlflow:
        return
    if find_spec("mlflow") is None:
        raise ConfigError("mlflow: its client is missing: pip install 'fedtar_flare[mlflow]', here and at the server")
    from fedtar_flare.runtime.mlflow_runs import MLflowRuns

    job.to_server(MLflowRuns(mlflow, job.name), id="mlflow")
