"""``MethodRecipe``: a method's job as code, shared by all methods."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.spec import Recipe

from fedtar_flare.errors import ConfigError
from fedtar_flare.flare.controller import MethodController
from fedtar_flare.flare.scalars import add_tensorboard
from fedtar_flare.models.config import DECODER_TARGETS
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.site.guard import OutboundGuard

SIMULATOR_REQUEST_INTERVAL = 0.05
"""Seconds between a site's requests for a task; FLARE's own 2 s would be most of a short simulated step."""

PRODUCTION_REQUEST_INTERVAL = 2.0
"""The same between hospitals, where a step takes minutes and each request is traffic."""

PAPER: dict[str, Any] = {
    "time_steps": 5,
    "lora": {"rank": 4, "alpha": 128.0},
    "training": {"lr": 1e-5},
}
"""What the preset ``paper`` sets for every method beside the model: T, the shared adapter and its learning rate."""

SMALL: dict[str, Any] = {
    "model": {"lora_targets": DECODER_TARGETS},
    "training": {"local_steps": 48, "schedule": "cosine", "focus": 2.0},
    "data": {"synthetic_patients": 96},
}
"""What the shipped preset ``small`` sets for every method: found by experiment (docs/experiments.md).

The encoder stays as it is, so that each image is seen by it once. The paper's form adapts both.
"""

CUSTOM_NOTE = """\
This folder is here on purpose. A job that has a `custom` folder may use classes of an installed package without an
entry in each site's class allow-list, which is what `nvflare simulator` on a researcher's own machine needs.

A hospital should not run it: there, the classes of `fedtar_flare` are put on the site's allow-list once, and the job
is exported without this folder.
"""


class MethodRecipe(Recipe):
    """The job of a method, which sets the three classes and the names of its own groups of settings.

    Args:
        name: of the job; the method's name by default.
        preset: a whole setting (see :attr:`presets`), over which the other arguments win.
        num_rounds, time_steps: R and T; None: the preset's, else 3.
        min_sites: fewer sites taking part stop the job.
        torch_threads: threads of one task at a site.
        server: further arguments of the controller, by name.
        model: settings that override the model preset's.
        lora, training, data: settings of the classes in :mod:`fedtar_flare.learning.config`.
        groups: groups of settings of the method's own executor (see :attr:`own_groups`).

    Raises:
        ConfigError: a setting is unknown or not allowed; raised before anything is exported or run.

    Example::

        from nvflare.recipe import SimEnv
        run = FedTARRecipe(num_rounds=3, time_steps=3).run(SimEnv(num_clients=3))
    """

    contract: ClassVar[Contract]
    controller_class: ClassVar[type[MethodController]]
    executor_class: ClassVar[type[Any]]
    """A ``StudyExecutor`` with the arguments that are handed on here."""
    shared_groups: ClassVar[tuple[str, ...]] = ("model", "lora", "training", "data")
    own_groups: ClassVar[tuple[str, ...]] = ()
    server_groups: ClassVar[tuple[str, ...]] = ()
    """Groups of the method's own that the controller takes too."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"small": SMALL, "paper": PAPER}
    """Arguments of the recipe that go with a preset, beside the model's own."""

    def __init__(
        self,
        *,
        name: str = "",
        preset: str = "small",
        num_rounds: int | None = None,
        time_steps: int | None = None,
        min_sites: int = 1,
        seed: int = 0,
        torch_threads: int = 1,
        server: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        **groups: dict[str, Any] | None,
    ):
        if unknown := sorted(set(groups) - set(self.own_groups)):
            raise ConfigError(f"{unknown[0]}: method '{self.contract.method}' has no such group of settings")
        shared = {"model": model, "lora": lora, "training": training, "data": data}
        if alien := [group for group, values in shared.items() if values and group not in self.shared_groups]:
            raise ConfigError(f"{alien[0]}: method '{self.contract.method}' has no such group of settings")
        given = {"server": server} | {group: shared[group] for group in self.shared_groups}
        given |= {group: groups.get(group) for group in self.own_groups}
        settings = self._with_preset(preset, given)
        defaults = self.presets.get(preset, {})
        rounds = num_rounds if num_rounds is not None else defaults.get("num_rounds", 3)
        steps = time_steps if time_steps is not None else defaults.get("time_steps", 3)
        tasks = list(self.contract.task_names)
        job = FedJob(name=name or self.contract.method, min_clients=min_sites)
        job.set_app_packages(["fedtar_flare"])  # the sites have the package installed; its code is not put in the job
        common: dict[str, Any] = {"num_rounds": rounds, "time_steps": steps, "min_sites": min_sites, "seed": seed}
        server = settings.pop("server") or {}
        server |= {group: settings[group] for group in self.server_groups if settings[group]}
        try:
            self.controller = self.controller_class(**common, **server)
        except TypeError as error:
            raise ConfigError(f"server: {error}") from error
        self.controller_settings = common | server
        job.to_server(self.controller)
        self.executor = self.executor_class(preset=preset, seed=seed, torch_threads=torch_threads, **settings)
        self.executor.data_config.timeline(steps)  # periods and T must fit: said here, not at a hospital
        job.to_clients(self.executor, tasks=tasks)
        extra_names = list(self.executor.lora_config.exchange)
        for filter_type in (FilterType.TASK_DATA, FilterType.TASK_RESULT):  # FLARE knows no "*": each task by its name
            guard = OutboundGuard(methods=[self.contract.method], extra_names=extra_names)
            job.to_clients(guard, filter_type=filter_type, tasks=tasks)
        add_tensorboard(job)
        super().__init__(job)
        self._interval(SIMULATOR_REQUEST_INTERVAL)

    def _with_preset(self, preset: str, given: Mapping[str, dict[str, Any] | None]) -> dict[str, dict[str, Any] | None]:
        """The preset's groups of settings with the given ones over them; an empty group becomes None."""
        defaults = self.presets.get(preset, {})
        merged = {group: {**defaults.get(group, {}), **(values or {})} for group, values in given.items()}
        return {group: values or None for group, values in merged.items()}

    def resolved(self) -> dict[str, Any]:
        """What decides about a run's numbers, defaults filled in: a digest of the sites' settings, and the server's.

        Two recipes whose results may be compared as the same arm have equal ones; a default that changes in a later
        release changes it too, which the arguments that were given do not.
        """
        server = {
            name: parameter.default
            for kind in reversed(self.controller_class.__mro__)
            if "__init__" in vars(kind)
            for name, parameter in inspect.signature(vars(kind)["__init__"]).parameters.items()
            if parameter.default is not parameter.empty
        }
        return {"sites": self.executor.settings_digest(), "server": server | self.controller_settings}

    def _interval(self, seconds: float) -> None:
        self.add_server_config({"server": {"task_request_interval": seconds}})

    def export(self, job_dir: str, *args: Any, byoc: bool = True, **kwargs: Any) -> None:
        """Write the job to ``<job_dir>/<name>``.

        With ``byoc`` it is for the simulator: it has the ``custom`` note that the plain simulator needs, and sites ask
        for tasks many times a second. Without it, the job is for production: the class allow-list stays in force and
        sites ask every two seconds.
        """
        self._interval(SIMULATOR_REQUEST_INTERVAL if byoc else PRODUCTION_REQUEST_INTERVAL)
        super().export(job_dir, *args, **kwargs)
        _order_filter_tasks(Path(job_dir) / self.name / "app" / "config" / "config_fed_client.json", self.contract)
        if byoc:
            note = Path(job_dir) / self.name / "app" / "custom" / "README.md"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(CUSTOM_NOTE, encoding="utf-8")


def _order_filter_tasks(file: Path, contract: Contract) -> None:
    """Sort each filter's tasks, which FLARE keeps as a set, so that equal recipes give equal files."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for key in ("task_data_filters", "task_result_filters"):
        for entry in config.get(key, []):
            entry["tasks"].sort(key=contract.task_names.index)
    file.write_text(json.dumps(config, indent=4), encoding="utf-8")
