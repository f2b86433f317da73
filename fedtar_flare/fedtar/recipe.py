"""``FedTARRecipe``: the FedTAR job as code. ``jobs/fedtar`` is its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.spec import Recipe

from fedtar_flare.errors import ConfigError
from fedtar_flare.fedtar.contract import CONTRACT
from fedtar_flare.fedtar.controller import TemporalResidualController
from fedtar_flare.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.flare.scalars import add_tensorboard
from fedtar_flare.site.guard import OutboundGuard

TASK_REQUEST_INTERVAL = 0.05
"""Seconds between a site's requests for a task; FLARE's own default of 2 s would be most of a short step."""

CUSTOM_NOTE = """\
This folder is here on purpose. A job that has a `custom` folder may use classes of an installed package without an
entry in each site's class allow-list, which is what `nvflare simulator` on a researcher's own machine needs.

A hospital should not run it: there, the classes of `fedtar_flare` are put on the site's allow-list once, and the job
is exported without this folder.
"""


class FedTARRecipe(Recipe):
    """Federated temporal adaptation (FedTAR) with patient-adaptive LoRA.

    Args:
        name: of the job.
        preset: model preset, ``small`` by default.
        num_rounds: R.
        time_steps: T.
        min_sites: fewer sites taking part stop the job.
        seed: of everything random.
        torch_threads: threads of one task at a site.
        server: further arguments of :class:`TemporalResidualController`, by name.
        model: settings that override the preset's.
        lora: settings of :class:`fedtar_flare.fedtar.config.LoRAConfig`.
        patient: settings of :class:`fedtar_flare.fedtar.config.PatientConfig`.
        training: settings of :class:`fedtar_flare.fedtar.config.TrainingConfig`.
        data: settings of :class:`fedtar_flare.fedtar.config.DataConfig`.

    Raises:
        ConfigError: for a setting that is unknown or not allowed, before anything is exported or run.

    Example::

        from nvflare.recipe import SimEnv
        run = FedTARRecipe(num_rounds=3, time_steps=3).run(SimEnv(num_clients=3))
    """

    def __init__(
        self,
        *,
        name: str = "fedtar",
        preset: str = "small",
        num_rounds: int = 3,
        time_steps: int = 3,
        min_sites: int = 1,
        seed: int = 0,
        torch_threads: int = 1,
        server: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        patient: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
    ):
        job = FedJob(name=name, min_clients=min_sites)
        job.set_app_packages(["fedtar_flare"])  # the sites have the package installed; its code is not put in the job
        try:
            controller = TemporalResidualController(
                num_rounds=num_rounds, time_steps=time_steps, min_sites=min_sites, seed=seed, **(server or {})
            )
        except TypeError as error:
            raise ConfigError(f"server: {error}") from error
        job.to_server(controller)
        executor = PatientAdaptiveExecutor(
            preset=preset,
            model=model,
            lora=lora,
            patient=patient,
            training=training,
            data=data,
            seed=seed,
            torch_threads=torch_threads,
        )
        self.contract, self.controller, self.executor = CONTRACT, controller, executor
        job.to_clients(executor, tasks=list(CONTRACT.task_names))
        extra = list((lora or {}).get("exchange", ()))
        for filter_type in (FilterType.TASK_DATA, FilterType.TASK_RESULT):  # FLARE knows no "*": each task by its name
            guard = OutboundGuard(methods=[CONTRACT.method], extra_names=extra)
            job.to_clients(guard, filter_type=filter_type, tasks=list(CONTRACT.task_names))
        add_tensorboard(job)
        super().__init__(job)
        self.add_server_config({"server": {"task_request_interval": TASK_REQUEST_INTERVAL}})

    def export(self, job_dir: str, *args: Any, byoc: bool = True, **kwargs: Any) -> None:
        """Write the job below ``job_dir``, as ``<job_dir>/<name>``.

        Args:
            job_dir: the folder of jobs.
            byoc: whether the ``custom`` note is added that the plain simulator needs; False for production, where the
                class allow-list stays in force.
        """
        super().export(job_dir, *args, **kwargs)
        _order_filter_tasks(Path(job_dir) / self.name / "app" / "config" / "config_fed_client.json")
        if byoc:
            note = Path(job_dir) / self.name / "app" / "custom" / "README.md"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(CUSTOM_NOTE, encoding="utf-8")


def _order_filter_tasks(file: Path) -> None:
    """FLARE keeps a filter's tasks as a set, so their order changes from one export to the next: put them in order."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for direction in ("task_data_filters", "task_result_filters"):
        for entry in config.get(direction, []):
            entry["tasks"].sort(key=CONTRACT.task_names.index)
    file.write_text(json.dumps(config, indent=4), encoding="utf-8")


if __name__ == "__main__":  # python -m fedtar_flare.fedtar.recipe, from the repository's root: makes jobs/fedtar again
    FedTARRecipe().export("jobs")
