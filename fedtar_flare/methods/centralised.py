"""Centralised training, in a simulation only: hospitals cannot do it.

It is no upper bound of a federation: the model knows neither patient nor hospital, and averages their ways of writing.

Only the first site by name trains, on the union of all sites' training patients, each in the split that its own site
gave it, and makes as many local updates as a site does in all R * T exchanges. Every site scores its own test patients.
"""

from dataclasses import replace

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cohort import Cohort
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import FedAvgServer, PooledSite
from fedtar_flare.protocol.contract import close_round, handshake, train
from fedtar_flare.runtime.task import Task
from fedtar_flare.site.site_file import load_site_config
from fedtar_flare.site.state import SiteState


class CentralisedServer(FedAvgServer):
    """FedAvg of one site."""

    def trainers(self) -> list[str]:
        return self.run.membership.members[:1]


class CentralisedSite(PooledSite):
    """Trains on the patients of all sites of a simulation."""

    def at_handshake(self, task: Task) -> None:
        """Refuse a ``state_dir`` of its own: the centre finds the sites by their states."""
        if task.config.state_dir is not None:
            text = "a site of a centralised simulation has a state_dir of its own"
            raise ConfigError(f"{task.config.origin}: {text}; leave state_dir out of the site file", public=text)

    def training_cohort(self, task: Task) -> Cohort:
        """The union of all sites of this run but those in ``server.unseen``."""
        run = task.state.folder.parent
        names = sorted(folder.name for folder in run.iterdir() if folder.name != task.site.name)
        states = [SiteState(run.parent, run.name, name) for name in names]
        members = [state.folder.name for state in states if state.schema() and state.about_run()["score"] == "test"]
        configs = {name: load_site_config(name, workspace=None, simulator=True) for name in members}
        others = [self.patients(config, name, task.header.time_steps) for name, config in configs.items()]
        return task.cohort.with_samples([s for cohort in (task.cohort, *others) for s in cohort.samples(None)])


METHOD = FEDAVG.derive(
    "centralised",
    "Centralised training (simulation only)",
    contract={
        "tasks": (handshake, replace(train, about="train on the visits of all simulated sites"), close_round),
        "stays": "patients, images, reports: a real site refuses this method",
    },
    server=CentralisedServer,
    site=CentralisedSite,
    simulation_only=True,
    paper="",
)
