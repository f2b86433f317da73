"""Centralised training: one process trains on the visits of all sites. In a simulation only.

It bounds what a federation could reach, and is what hospitals cannot do. The first site by name stands for the centre:
it alone trains, on the union of all sites' training patients, each in the split that its own site gave it. R * T times
it makes the local updates of one exchange. Every site scores its own test patients, so that the scores stand beside
those of the other methods.

A real site refuses every task before anything is read, and the job is not exported for production.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.errors import ConfigError
from fedtar_flare.flare.executor import Tensors
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.protocol.messages import Reply, TaskHeader
from fedtar_flare.protocol.tasks import TRAIN
from fedtar_flare.site.place import Site
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort

CONTRACT = replace(
    FEDAVG,
    method="centralised",
    title="Centralised training (simulation only)",
    tasks=tuple(
        replace(t, about="train on the visits of all simulated sites") if t.name == TRAIN else t for t in FEDAVG.tasks
    ),
    server_classes=("fedtar_flare.baselines.centralised.CentralisedController",),
    site_classes=("fedtar_flare.baselines.centralised.CentralisedExecutor",),
    stays="patients, images, reports: a real site refuses this method",
)


class CentralisedController(FedAvgController):
    """Centralised training at the server: FedAvg of one site."""

    contract = CONTRACT

    def trainers(self) -> list[str]:
        """The first site by name."""
        return self.sites[:1]


class CentralisedExecutor(PooledExecutor):
    """Trains on the patients of all sites of a simulation; arguments as :class:`ReportExecutor`."""

    contract = CONTRACT

    def perform(self, task: str, header: TaskHeader, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        """Raises :class:`ConfigError` at a site that is not simulated."""
        if not site.simulated:
            raise ConfigError(
                "centralised training reads the patients of all sites: it runs in a simulation only. Between "
                "hospitals, take a federated method such as fedavg",
                public="centralised training runs in a simulation only",
            )
        return super().perform(task, header, weights, site)

    def at_handshake(self, header: TaskHeader, site: Site, state: SiteState, cohort: Cohort) -> None:
        """Raises :class:`ConfigError` where the site's state, by which the centre finds the site, lies elsewhere."""
        if self._config.state_dir is not None:
            raise ConfigError(
                f"{self._config.origin}: sites of a centralised simulation keep their state in one place; leave "
                "state_dir out of the site file",
                public="a site of a centralised simulation has a state_dir of its own",
            )

    def training_cohort(self, header: TaskHeader, site: Site, state: SiteState, cohort: Cohort) -> Cohort:
        """The union of all sites that have a state of this run."""
        from fedtar_flare.site.site_file import load_site_config

        root = state.folder.parent.parent
        names = sorted(folder.name for folder in state.folder.parent.iterdir() if folder.name != site.name)
        members = [name for name in names if SiteState(root, header.run_id, name).versions()]
        configs = {name: load_site_config(name, workspace=None, simulator=True) for name in members}
        return cohort.joined_with([self._patients(config, name, header) for name, config in configs.items()])


class CentralisedRecipe(MethodRecipe):
    """The job of centralised training, for simulations only; arguments as :class:`MethodRecipe`."""

    contract = CONTRACT
    controller_class = CentralisedController
    executor_class = CentralisedExecutor

    def export(self, job_dir: str, *args: Any, byoc: bool = True, **kwargs: Any) -> None:
        """As :meth:`MethodRecipe.export`; :class:`ConfigError` for production (``byoc=False``)."""
        if not byoc:
            raise ConfigError("method 'centralised' runs in a simulation only: it has no job for hospitals")
        super().export(job_dir, *args, byoc=byoc, **kwargs)
