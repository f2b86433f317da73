"""``SiteStrategy``: what a method does at a site, and what a site holds every run to."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.globs import matches
from fedtar_flare.core.settings import RunSettings, Settings, build
from fedtar_flare.core.tensor_file import coarse_checksums
from fedtar_flare.data.minimum_cell import shown_count
from fedtar_flare.imaging.transform_list import names_of
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.protocol.exchange import ExchangeSchema, Tensors
from fedtar_flare.protocol.messages import MAX_ROUNDS, MAX_STEPS, Reply, ok, version
from fedtar_flare.protocol.tasks import ADAPTER, HANDSHAKE, PARAMETERS
from fedtar_flare.runtime.requirements import JobModel
from fedtar_flare.runtime.task import Answer, Task
from fedtar_flare.site.admission import JobRequest
from fedtar_flare.site.job_records import fix_cells
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort
    from fedtar_flare.registry import Method
    from fedtar_flare.site.site_file import SiteConfig

__all__ = ["Handler", "SiteStrategy", "require_exchange", "require_start"]

Handler = Callable[[Task], Answer]
"""Does one task."""

_LAST = version(MAX_ROUNDS, MAX_STEPS)
"""Later than any version of a site's state."""


class SiteStrategy(ABC):
    """A method at a site: it does the tasks that an executor opens, and asks nothing back.

    Parameters
    ----------
    method : Method
        What the strategy belongs to.
    preset : str
        Of the model.
    groups : dict, optional
        Groups of settings by name, each a dictionary, as the job gives them.
    seed : int
        The job's seed.

    Raises
    ------
    ConfigError
        A setting is unknown or not allowed.
    """

    shared_groups: ClassVar[tuple[str, ...]] = ("model", "lora", "training", "data")
    """Further groups of settings than the method's own."""
    reads_reports: ClassVar[bool] = True
    """Whether visits without a report are left out."""
    divides_visits: ClassVar[bool] = True
    """Whether visits are counted, trained on or scored by time step; if not, all count at the first one."""
    columns: ClassVar[tuple[str, ...]] = ("report or report_path", "age or birth_date", "sex")
    """Columns that a table of studies needs besides patient, date and image."""
    source: str = "synthetic"
    """Where the site's data comes from, as its site file says."""
    lora_rank: int | None = None
    """Greatest rank of an adapter at this site, as its site file says; None: the job's."""

    def __init__(self, method: Method, preset: str, groups: Mapping[str, Any] | None = None, seed: int = 0):
        self.method, self.preset, self.groups, self.seed = method, preset, dict(groups or {}), seed
        if unknown := sorted(set(self.groups) - {*self.shared_groups, *method.settings}):
            raise ConfigError(f"{unknown[0]}: method '{method.name}' has no such group of settings")
        shared = self.build_shared(preset, {group: self.groups.get(group) for group in self.shared_groups})
        own = {name: build(kind, self.groups.get(name), name) for name, kind in method.settings.items()}
        self.settings = RunSettings(self.resolve, **shared, **own).at(self.source)
        if (form := self.settings.lora.mean) != "factors":
            self._require_mixing(f"lora.mean: {form}")
        self.lora: LoRAConfig = self.settings.lora
        """The adapter here: the job's, or of the site's own rank."""
        self.check()

    def at(self, source: str, lora_rank: int | None) -> Self:
        """Adapt the method to a site.

        Parameters
        ----------
        source : str
            Where the site's data comes from.
        lora_rank : int, optional
            Greatest rank of an adapter there.

        Returns
        -------
        SiteStrategy
            This one, or a copy for that site.

        Raises
        ------
        ConfigError
            The method averages adapters of one rank alone, and the site's is below the job's.
        """
        if (source, lora_rank) == (self.source, self.lora_rank):
            return self
        here = copy.copy(self)
        here.source, here.lora_rank, here.settings = source, lora_rank, self.settings.at(source)
        here.lora = here.settings.lora.at_most(lora_rank)
        if here.lora.rank < here.settings.lora.rank:
            self._require_mixing(f"lora_rank: the site file has {here.lora.rank}, the job {here.settings.lora.rank}")
        return here

    def _require_mixing(self, subject: str) -> None:
        if not self.method.mixes_ranks:
            text = f"{subject}: method '{self.method.name}' averages factors of one rank alone"
            raise ConfigError(text, public=text)

    def settings_digest(self) -> str:
        """Digest the settings that must be the same at every site.

        Returns
        -------
        str
            Of all groups, and the seed.
        """
        return f"{self.settings.digest()}-{self.seed}"

    def request(self, rounds: int, time_steps: int) -> JobRequest:
        """What the job asks of a site, for its bounds.

        Parameters
        ----------
        rounds, time_steps : int
            R and T.

        Returns
        -------
        JobRequest
            What the method asks, with the transforms that any job may add.
        """
        return replace(self.job_request(rounds, time_steps), transforms=names_of(self.settings.data.transforms))

    def patients(
        self, config: SiteConfig, site: str, time_steps: int, workspace: Path | None = None, share: int = 1
    ) -> Cohort:
        """Read a site's patients and prepare their images for the model.

        Parameters
        ----------
        config : SiteConfig
            The site file.
        site : str
            The site's name.
        time_steps : int
            T.
        workspace : Path, optional
            The kit of a real site, which has its key.
        share : int
            How many sites prepare their images on this machine at the same time.

        Returns
        -------
        Cohort
            Without the patients that the site excludes.
        """
        from fedtar_flare.imaging.workers import worker_count
        from fedtar_flare.site.cohort import prepare_site

        cohort, _ = prepare_site(
            config,
            site,
            model=self.settings.model,
            data=self.settings.data,
            time_steps=time_steps,
            seed=self.seed,
            workspace=workspace,
            reports=self.reads_reports,
            workers=max(1, worker_count() // share),
        )
        return cohort

    # ------------------------------------------------------------------ the site's one layout of its data
    def min_cell(self, config: SiteConfig) -> int:
        """Choose the fewest distinct patients behind anything that leaves.

        Parameters
        ----------
        config : SiteConfig
            The site file.

        Returns
        -------
        int
            The larger of the job's number and the site's.
        """
        return max(self.settings.data.min_cell, config.policy.min_patients)

    def timeline_text(self, time_steps: int) -> str:
        """Write how visits become time steps as one text.

        Parameters
        ----------
        time_steps : int
            T.

        Returns
        -------
        str
            Two jobs with the same text divide visits in the same way.
        """
        timeline = self.settings.data.timeline(time_steps)
        return " ".join([timeline.alignment, *map(datetime.isoformat, timeline.periods)])

    def cell_layout(self, config: SiteConfig, time_steps: int) -> dict[str, str]:
        """How the site's data is divided into cells.

        Parameters
        ----------
        config : SiteConfig
            The site file.
        time_steps : int
            T.

        Returns
        -------
        dict of str to str
            What decides about cells, by name.
        """
        by_time = {"time_steps": str(time_steps), "timeline": self.timeline_text(time_steps)}
        return (by_time if self.divides_visits else {}) | {"min_cell": str(self.min_cell(config))}

    def hold_to_cell_layout(self, task: Task) -> None:
        """Hold a task to the site's one layout of its data, and note which visit is the newest that counts.

        Two jobs that divided the same visits differently could tell a single visit by subtraction.

        Parameters
        ----------
        task : Task
            The task.

        Raises
        ------
        Declined
            An earlier job divided the site's data in another way.
        """
        if task.config.without_patients:
            return
        newest = max((visit.acquired.isoformat() for visit in task.cohort.visits), default="")
        layout = self.cell_layout(task.config, task.header.time_steps) | {"score": task.header.score}
        fix_cells(task.site.records, str(task.config.path), layout, newest, begins=task.header.round == 0)

    # ------------------------------------------------------------------ what a method may change
    @abstractmethod
    def build_shared(self, preset: str, groups: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Settings]:
        """Build the shared groups of settings.

        Parameters
        ----------
        preset : str
            Of the model.
        groups : dict
            What the job gives for each group; None: nothing.

        Returns
        -------
        dict of str to Settings
            One for each of :attr:`shared_groups`.
        """

    @staticmethod
    def resolve(settings: RunSettings, source: str) -> RunSettings:
        """Fill in settings that depend on where a site's data comes from.

        Parameters
        ----------
        settings : RunSettings
            As the job gives them.
        source : str
            Of the site's data.

        Returns
        -------
        RunSettings
            The settings in full.
        """
        return settings

    def check(self) -> None:
        """Raise :class:`ConfigError` where settings do not fit each other."""

    def shares_batches(self) -> bool:
        """Tell whether several processes can do the tasks together.

        Returns
        -------
        bool
            By default False.
        """
        return False

    @abstractmethod
    def work(self) -> str:
        """Say what a training task does, for the description of a job.

        Returns
        -------
        str
            A few words.
        """

    @abstractmethod
    def adapted_model(self, time_steps: int) -> JobModel:
        """The job's model and its adapter, for its size and for what the job changes of it.

        Parameters
        ----------
        time_steps : int
            T.

        Returns
        -------
        AdaptedModel
            Made without any data.
        """

    @abstractmethod
    def job_request(self, rounds: int, time_steps: int) -> JobRequest:
        """What the method asks of a site; :meth:`request` adds what any job may.

        Parameters
        ----------
        rounds, time_steps : int
            R and T.

        Returns
        -------
        JobRequest
            To be held against the site's bounds.
        """

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """Choose what does each task.

        Returns
        -------
        dict of str to callable
            By the task's name.
        """

    # ------------------------------------------------------------------ what the tasks share
    def agreement(self, task: Task, start: Tensors) -> Reply:
        """Fix what the run exchanges and its time steps.

        Parameters
        ----------
        task : Task
            The handshake.
        start : dict of str to Tensor
            The shared part as the run begins with it.

        Returns
        -------
        Reply
            With which every handshake begins.
        """
        header, cohort, least = task.header, task.cohort, task.min_cell
        schema = ExchangeSchema.of(start, self.settings.lora.dtype_up)
        self.hold_to_cell_layout(task)
        about = {"data": self.settings.data.to_dict(), "seed": self.seed, "canaries": task.config.canaries}
        job = {"method": self.method.name, "preset": self.preset, "settings": self.groups}
        about["job"] = job | {"rounds": header.rounds, "rounds_per_period": header.rounds_per_period}
        task.state.fix_run(header, self.timeline_text(header.time_steps), schema, about)
        counts = cohort.counts(least)
        if not self.divides_visits:
            all_steps = {split: [s.visit.patient_id for s in cohort.samples(split)] for split in counts}
            shown = {split: shown_count(len(patients), patients, least) for split, patients in all_steps.items()}
            counts = {split: [n, *[0] * (header.time_steps - 1)] for split, n in shown.items()}
        payload = {
            "schema": schema.to_dict(),
            "versions": {"fedtar_flare": __version__},
            "settings": self.settings_digest(),
            "counts": counts,
            "skipped_studies": cohort.left_out(least),
            **({"start": coarse_checksums(start)} if header.initial_site else {}),  # no weights came down
        }
        if (form := self.settings.lora.mean) != "factors":
            payload["lora_mean"] = form
        lower = {"rank": float(self.lora.rank)} if self.lora.rank < self.settings.lora.rank else {}
        return ok(header, {"min_cell": float(least)} | lower, payload)


def require_start(task: Task) -> None:
    """Refuse to give initial weights anywhere but at the start of a run.

    Parameters
    ----------
    task : Task
        The handshake that asks for them.

    Raises
    ------
    ExchangeError
        The run has begun at this site, or weights came down too.
    """
    header, state = task.header, task.state
    begun = state.latest(_LAST) not in (None, version(0, 0)) or set(state.answered()) - {HANDSHAKE}
    if begun or header.member or header.after != version(0, 0):
        raise ExchangeError("initial weights are asked for in the middle of a run; only untrained ones leave")
    if task.weights:
        raise ExchangeError("weights came down with the wish for initial ones; only those of the seed leave")


def require_exchange(task: Task) -> None:
    """Refuse weights that are not the run's exchange, before any of them is kept.

    Tensors of a method's other groups are left to its learner, which loads them or refuses them.

    Parameters
    ----------
    task : Task
        With the weights that came down.

    Raises
    ------
    ExchangeError
        A tensor is missing, unknown or of another shape.
    """
    down = task.contract.task(task.name).down
    if not down or (schema := task.state.schema()) is None:
        return
    agreed, weights = dict(schema.shapes), dict(task.weights)
    for group in task.contract.groups:
        if group.name in set(down) - {ADAPTER.name, PARAMETERS.name}:
            for name in [*weights]:
                if name not in agreed and matches(name, group.names):
                    del weights[name]
    schema.check(weights)
