"""``MethodRecipe``: the job of any method as code."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
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
from fedtar_flare.runtime.lora_mean import check_form
from fedtar_flare.runtime.scalars import add_tracking
from fedtar_flare.runtime.server_config import ServerConfig
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.guard import OutboundGuard

SIMULATOR_REQUEST_INTERVAL, PRODUCTION_REQUEST_INTERVAL = 0.05, 2.0
"""Seconds between a site's requests for a task, which are traffic between hospitals, where a step takes minutes."""

SMALL: dict[str, Any] = {
    "model": {"lora_targets": DECODER_TARGETS},  # the encoder stays as it is, so that each image is seen by it once
    "training": {"local_steps": 48, "schedule": "cosine"},
    "data": {"synthetic_patients": 96},
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
        Of the job; the method's name by default.
    preset : str
        A whole setting, over which the other arguments win.
    num_rounds, time_steps : int, optional
        R and T; None: the preset's, else the method's, else 3.
    min_sites : int
        Fewer sites taking part stop the job.
    seed : int
        Random seed.
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
        min_sites: int = 1,
        seed: int = 0,
        torch_threads: int = 1,
        mlflow: str = "",
        server: Mapping[str, Any] | None = None,
        **groups: Mapping[str, Any] | None,
    ):
        self.definition = registry.method(method)
        self.contract = self.definition.contract
        known = {*self.definition.site.shared_groups, *self.definition.settings}
        if unknown := sorted(set(groups) - known):
            raise ConfigError(f"{unknown[0]}: method '{method}' has no such group of settings")
        own_fields = getattr(self.definition.server_settings, "model_fields", {})
        preset_of, paper = self.definition.presets.get(preset, {}), self._of_paper(preset, own_fields)
        merged = {
            group: {**paper.get(group, {}), **preset_of.get(group, {}), **(given or {})}
            for group, given in {"server": server, **dict.fromkeys(sorted(known)), **groups}.items()
        }
        preset_of = {**paper, **preset_of}
        at_server = merged.pop("server")
        settings = {group: values for group, values in merged.items() if values}
        default = self.definition.rounds(settings) if self.definition.rounds else (3, 3)
        rounds = num_rounds if num_rounds is not None else preset_of.get("num_rounds", default[0])
        steps = time_steps if time_steps is not None else preset_of.get("time_steps", default[1])
        said = {"name": name, "preset": preset, "num_rounds": rounds, "time_steps": steps, "min_sites": min_sites}
        self._said = said | {"seed": seed, "torch_threads": torch_threads, "mlflow": mlflow, "server": server, **groups}
        job = _Job(self.contract, name=name or method, min_clients=min_sites)
        job.set_app_packages(["fedtar_flare"])  # the sites have the package installed; its code is not put in the job
        common: dict[str, Any] = {"num_rounds": rounds, "time_steps": steps, "min_sites": min_sites, "seed": seed}
        if twice := sorted(common.keys() & at_server.keys()):
            raise ConfigError(f"server: {twice[0]} is an argument of the recipe itself")
        known_here = (*ServerConfig.model_fields, *own_fields)
        check_names(at_server, [name for name in known_here if name not in common], "server")
        own = {name: at_server.pop(name) for name in [*at_server] if name not in ServerConfig.model_fields}
        groups_there = {name: settings[name] for name in self.definition.server_groups if name in settings}
        groups_there |= {"server": own} if own else {}
        self.controller_arguments = {"method": method} | common | at_server | {"settings": groups_there or None}
        controller_class: type[FederatedController] = self.definition.controller or FederatedController
        self.controller = controller_class(**self.controller_arguments)
        job.to_server(self.controller)
        executor_class: type[SiteExecutor] = self.definition.executor or SiteExecutor
        self.executor = executor_class(method, preset, settings or None, seed, torch_threads)
        self.executor.strategy.settings.data.timeline(steps)  # periods and T must fit: said here, not at a hospital
        check_form(self.executor.strategy.settings.lora.mean, self.controller.config.aggregation)
        tasks = list(self.contract.task_names)
        job.to_clients(self.executor, tasks=tasks)
        extra_names = list(self.executor.strategy.settings.lora.exchange)
        for filter_type in (FilterType.TASK_DATA, FilterType.TASK_RESULT):  # FLARE knows no "*": each task by its name
            guard = OutboundGuard(methods=[method], extra_names=extra_names)
            job.to_clients(guard, filter_type=filter_type, tasks=tasks)
        add_tracking(job, mlflow)
        super().__init__(job)
        self._run_in(simulator=True)

    def _of_paper(self, preset: str, own_fields: Collection[str]) -> dict[str, Any]:
        """What the method has of a paper's preset, by group; its model is made at a site from the preset's name."""
        paper = papers().get(preset, PaperPreset())
        if paper.classifies is self.definition.reports:
            return {}
        here = {*ServerConfig.model_fields, *own_fields}
        groups = {name.partition(".")[0] for name in paper.settings if "." in name} - {"model"}
        found: dict[str, Any] = {name: value for name, value in paper.settings.items() if "." not in name}
        found |= {group: paper.group(group) for group in groups}
        return found | {"server": {name: value for name, value in paper.group("server").items() if name in here}}

    def resolved(self) -> dict[str, Any]:
        """What decides about a run's numbers, defaults filled in: a digest of the sites' settings, and the server's."""
        server = self.controller.config.to_dict()
        return {
            "sites": self.executor.strategy.settings_digest(),
            "server": server | {"strategy": self.controller.strategy.settings.to_dict()},
        }

    def _run_in(self, simulator: bool) -> None:
        """Settle what differs between the simulator and a federation; ConfigError for a job that has no such form."""
        if self.definition.simulation_only and not simulator:
            raise ConfigError(f"method '{self.contract.method}' runs in a simulation only: it has no job for hospitals")
        seconds = SIMULATOR_REQUEST_INTERVAL if simulator else PRODUCTION_REQUEST_INTERVAL
        self.add_server_config({"server": {"task_request_interval": seconds}})

    def process_env(self, env: ExecEnv) -> None:
        """A job that is submitted is, byte for byte, the one that an export with ``byoc=False`` writes."""
        self._run_in(isinstance(env, SimEnv))

    def export(
        self, job_dir: str, *args: Any, byoc: bool | None = None, env: ExecEnv | None = None, **kwargs: Any
    ) -> None:
        """Write the job to ``<job_dir>/<name>``.

        With ``byoc`` it is for the simulator: it has the ``custom`` note that the plain simulator needs and the recipe
        as ``job.py``, and sites ask for tasks many times a second. Without it, the class allow-list stays in force and
        sites ask every two seconds. By default it follows ``env``: for the simulator where there is none.
        """
        byoc = isinstance(env, SimEnv | None) if byoc is None else byoc
        self._run_in(simulator=byoc)
        super().export(job_dir, *args, **kwargs)
        if byoc:
            folder = Path(job_dir) / self.name
            write_text(folder / "app" / "custom" / "README.md", CUSTOM_NOTE)
            write_text(folder / "job.py", self._script())

    def _script(self) -> str:
        """The recipe as a program, with the settings that were given."""
        said = {name: value for name, value in self._said.items() if value not in ("", None, {})}
        plain = json.loads(json.dumps(said, default=str))
        texts = (f"{name}={json.dumps(v) if isinstance(v, str) else repr(v)}" for name, v in plain.items())
        return JOB_SCRIPT.format(name=self.name, arguments=",\n    ".join([f'"{self.contract.method}"', *texts]))


class _Job(FedJob):
    """A job whose folder is the same for equal recipes, however it is submitted, so that an approval holds for it.

    FLARE keeps filters' tasks as sets; ``nvflare job submit`` writes configurations anew, indented by two.
    """

    def __init__(self, contract: Contract, **arguments: Any):
        super().__init__(**arguments)
        self._tasks = contract.task_names

    def export_job(self, job_root: str) -> None:
        super().export_job(job_root)
        for file in (Path(job_root) / self.name / "app" / "config").glob("config_fed_*.json"):
            config = json.loads(file.read_text(encoding="utf-8"))
            for key in ("task_data_filters", "task_result_filters"):
                for entry in config.get(key, []):
                    entry["tasks"].sort(key=self._tasks.index)
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
