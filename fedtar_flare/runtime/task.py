"""``Task``: all that a site needs to do one task; ``SiteStrategy``: what a method does, and what holds for all runs."""

from __future__ import annotations

import copy
import hmac
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedtar_flare.core.draws import SECRET, derived_seed
from fedtar_flare.core.errors import ConfigError, DataError, ExchangeError
from fedtar_flare.core.files import coarse_checksums
from fedtar_flare.core.settings import RunSettings, Settings, build, check_names, matches
from fedtar_flare.data.cohort import Cohort
from fedtar_flare.data.minimum_cell import shown_count
from fedtar_flare.imaging.transform_list import names_of
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.learning.ranks import ALONE, Ranks
from fedtar_flare.protocol.contract import ADAPTER, HANDSHAKE, PARAMETERS, Contract
from fedtar_flare.protocol.exchange import ExchangeSchema, Tensors
from fedtar_flare.protocol.messages import MAX_ROUNDS, MAX_STEPS, Reply, TaskHeader, ok, version
from fedtar_flare.registry import Method
from fedtar_flare.site.admission import JobRequest
from fedtar_flare.site.context import Site
from fedtar_flare.site.job_records import fix_cells
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import SiteState
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.learning.learner import ReportLearner

__all__ = ["Task"]

PRODUCTION_MIN_CELL = 5
"""Fewest distinct patients of a split at a step, at a real site whose policy sets no ``min_patients``."""

_LOGGER = logging.getLogger(__name__)

Answer = tuple[Reply, Tensors | None]
"""A reply, and the tensors that go up with it."""


@dataclass(frozen=True)
class Task:
    """One task at a site. :class:`SiteExecutor` makes it once; nothing of it changes while the task runs."""

    name: str
    """``handshake``, ``train``, ``close_round`` or a task of the method's own."""
    header: TaskHeader
    """What the server says of the task: run, round, step."""
    weights: Tensors
    """The weights that came down, by name; empty where the contract sends none."""
    site: Site
    """Where the task runs: the site's name and folders, and the abort signal."""
    config: SiteConfig
    """The site file, read once for this task."""
    state: SiteState
    """What the site keeps of this run between tasks."""
    cohort: Cohort
    """The site's patients with their prepared images."""
    settings: RunSettings
    """All settings by group, as they are for this site's source of data."""
    contract: Contract
    """What the method exchanges."""
    min_cell: int
    """Fewest distinct patients behind anything that leaves: the larger of the job's number and the site's."""
    job_seed: int
    """The job's seed, which everybody knows."""
    ranks: Ranks = ALONE
    """The processes that do the task together, this one among them."""
    on_opened: Callable[[], None] | None = None
    """Called by the first of several processes once what the others need is on disk."""
    logger: logging.Logger = _LOGGER
    """The executor's log."""

    def seed(self, purpose: str, cohort: Cohort | None = None, *, of_run: bool = False) -> int:
        """Give the seed of what is random in this task, or in the whole run.

        At a site with patients it is secret: it follows from the site's key, all settings and the visits. Who knew
        which visits each mean is of could solve many means for single visits, and who chose the seed alone, or waited
        for a report to be corrected, could ask for two means that differ in one.

        Parameters
        ----------
        purpose : str
            What is drawn: different purposes get independent seeds.
        cohort : Cohort, optional
            The patients that are learnt from, where these are not :attr:`cohort`.
        of_run : bool
            Whether the seed is the same in all tasks of the run.

        Returns
        -------
        int
            The same in every process, whatever ran before: of 256 bits where it is secret, else below 2 ** 56
            (:mod:`fedtar_flare.core.draws`).
        """
        round_, step = (0, 0) if of_run else (self.header.round, self.header.step)
        return derived_seed(self._base_seed(cohort or self.cohort), self.site.name, round_, step, purpose)

    def _base_seed(self, cohort: Cohort) -> int:
        """What seeds follow from: an HMAC by the site's key, or the job's seed where nobody is a patient."""
        if self.config.without_patients:
            return self.job_seed
        given = f"chance:{self.contract.method}/{self.settings.digest()}-{self.job_seed}/{cohort.digest()}"
        return int.from_bytes(hmac.digest(cohort.key, given.encode(), "sha256"), "big") | SECRET

    def load_private(self, learner: ReportLearner) -> None:
        """Load the newest private state of the site that is not later than the header's ``after``.

        Parameters
        ----------
        learner : ReportLearner
        """
        newest = self.state.latest(self.header.after)
        if newest is None:
            raise missing_state(self.state, self.header.after)
        learner.load_private(self.state.read(newest)[0])

    def save_private(self, learner: ReportLearner, name: str | None = None) -> None:
        """Save the private state; a non-finite one is never saved, so that the version before stays good.

        Parameters
        ----------
        learner : ReportLearner
        name : str, optional
            Of the version; by default that of the task's round and step.
        """
        from fedtar_flare.learning.training import require_finite

        header, private = self.header, learner.private()
        require_finite(private)
        name = name or version(header.round, header.step)
        self.state.save(name, private, {"round": header.round, "step": header.step}, keep=header.keep)


def missing_state(state: SiteState, after: str) -> DataError:
    """Make the error of a site whose state of the run, at or before a version, is missing."""
    text = f"{state.folder} has no state of this run at or before version {after}"
    return DataError(f"{text}: restore the folder from a backup, or submit the job anew", reason="no-site-state")


# ---------------------------------------------------------------------- a method at a site
Handler = Callable[[Task], Answer]
"""Does one task."""


class SiteStrategy(ABC):
    """A method at a site: it does the tasks that an executor opens, and asks nothing back."""

    shared_groups: ClassVar[tuple[str, ...]] = ("model", "lora", "training", "data")
    """Groups of settings besides the method's own."""
    reads_reports: ClassVar[bool] = True
    """Whether visits without a report are left out."""
    divides_visits: ClassVar[bool] = True
    """Whether visits are counted, trained on or scored by time step; if not, all count at the first one."""
    columns: ClassVar[tuple[str, ...]] = ("report or report_path", "age or birth_date", "sex")
    """Columns that a table of studies needs besides patient, date and image."""
    state_of_run: ClassVar[tuple[str, ...]] = ()
    """Names of the files beside the versions of a site's state with which a run that is made again goes on."""
    source: str = "synthetic"
    """Where the site's data comes from, as its site file says."""
    lora_rank: int | None = None
    """Greatest rank of an adapter at this site, as its site file says; None: the job's."""

    def __init__(self, method: Method, preset: str, groups: Mapping[str, Any] | None = None, seed: int = 0):
        self.method, self.preset, self.groups, self.seed = method, preset, dict(groups or {}), seed
        check_names(self.groups, [*self.shared_groups, *method.settings], f"method '{method.contract.method}'", "group")
        settings = self.build_shared(preset, {group: self.groups.get(group) for group in self.shared_groups})
        settings |= {name: build(kind, self.groups.get(name), name) for name, kind in method.settings.items()}
        self.settings = RunSettings(self.resolve, **settings).at(self.source)
        if (form := self.settings.lora.mean) != "factors":
            self._require_mixing(f"lora.mean: {form}")
        self.lora: LoRAConfig = self.settings.lora
        """The adapter here: the job's, or of the site's own rank."""
        self.check()

    def at(self, source: str, lora_rank: int | None) -> Self:
        """Give this strategy, or a copy, for a site with this source of data and this greatest rank of an adapter."""
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
        """Digest the settings and the seed, which must be the same at every site."""
        return f"{self.settings.digest()}-{self.seed}"

    def request(self, rounds: int, time_steps: int) -> JobRequest:
        """Describe what the job asks of a site, for its bounds."""
        return replace(self.job_request(rounds, time_steps), transforms=names_of(self.settings.data.transforms))

    def patients(
        self, config: SiteConfig, site: str, time_steps: int, workspace: Path | None = None, share: int = 1
    ) -> Cohort:
        """Read a site's patients and prepare their images, while ``share`` sites do so on this machine."""
        from fedtar_flare.site.cohort import prepare_site

        cohort, prepared = prepare_site(
            config,
            site,
            model=self.settings.model,
            data=self.settings.data,
            time_steps=time_steps,
            seed=self.seed,
            workspace=workspace,
            reports=self.reads_reports,
            sites=share,
        )
        if 0 < len(prepared.refused_by_job) < (least := self.min_cell(config)):
            public = f"data.transforms leaves out images of fewer than {least} patients, which subtraction would tell"
            raise ConfigError(f"{public}; see above which", public=public)
        return cohort

    # ------------------------------------------------------------------ the site's one layout of its data
    def min_cell(self, config: SiteConfig) -> int:
        """Choose the fewest distinct patients behind anything that leaves: the larger number of job and site."""
        return max(self.settings.data.min_cell, config.policy.min_patients)

    def timeline_text(self, time_steps: int) -> str:
        """Write as one text how visits become time steps."""
        timeline = self.settings.data.timeline(time_steps)
        return " ".join([timeline.alignment, *map(datetime.isoformat, timeline.periods)])

    def cell_layout(self, config: SiteConfig, time_steps: int) -> dict[str, str]:
        """List what decides how the site's data is divided into cells."""
        by_time = {"time_steps": str(time_steps), "timeline": self.timeline_text(time_steps)}
        return (by_time if self.divides_visits else {}) | {"min_cell": str(self.min_cell(config))}

    def hold_to_cell_layout(self, task: Task) -> None:
        """Decline a task that divides the site's data in another way than an earlier job, and note the newest visit.

        Two jobs that divided the same visits differently could tell a single visit by subtraction.
        """
        if task.config.without_patients:
            return
        newest = max((visit.acquired.isoformat() for visit in task.cohort.visits), default="")
        layout = self.cell_layout(task.config, task.header.time_steps) | {"score": task.header.score}
        fix_cells(task.site.records, str(task.config.path), layout, newest, begins=task.header.round == 0)

    # ------------------------------------------------------------------ what a method may change
    @abstractmethod
    def build_shared(self, preset: str, groups: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Settings]:
        """Build the groups of settings in :attr:`shared_groups` from what the job gives for each."""

    @staticmethod
    def resolve(settings: RunSettings, source: str) -> RunSettings:
        """Fill in settings that depend on where a site's data comes from."""
        return settings

    def check(self) -> None:
        """Raise :class:`ConfigError` where settings do not fit each other."""

    def shares_batches(self) -> bool:
        """Say whether several processes can do the tasks together."""
        return False

    @abstractmethod
    def work(self) -> str:
        """Say in a few words what a training task does, for the description of a job."""

    @abstractmethod
    def adapted_model(self, time_steps: int) -> Any:
        """Describe the job's model and its adapter, without weights, in the form of an :class:`.AdaptedModel`."""

    @abstractmethod
    def job_request(self, rounds: int, time_steps: int) -> JobRequest:
        """Describe what the method asks of a site; :meth:`request` adds what any job may."""

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """Give what does each task, by the task's name."""

    # ------------------------------------------------------------------ what the tasks share
    def agreement(self, task: Task, start: Tensors) -> Reply:
        """Fix the run's exchange (``start`` is the shared part) and time steps, and make the reply of a handshake."""
        header, cohort, least = task.header, task.cohort, task.min_cell
        schema = ExchangeSchema.of(start)
        self.hold_to_cell_layout(task)
        about = {"data": self.settings.data.to_dict(), "seed": self.seed, "canaries": task.config.canaries}
        job = {"method": self.method.name, "preset": self.preset, "settings": self.groups}
        about["job"] = job | {"rounds": header.rounds, "rounds_per_period": header.rounds_per_period}
        about["sites"] = task.site.of_job
        task.state.fix_run(header, self.timeline_text(header.time_steps), schema, about)
        counts = cohort.counts(least)
        if not self.divides_visits:
            for split in counts:
                patients = [sample.visit.patient_id for sample in cohort.samples(split)]
                counts[split] = [shown_count(len(patients), patients, least), *[0] * (header.time_steps - 1)]
        payload = {
            "schema": schema.to_dict(),
            "versions": {"fedtar_flare": __version__},
            "settings": self.settings_digest(),
            "counts": counts,
            "modality": cohort.modality,
            "skipped_studies": cohort.left_out(least),
            **({"start": coarse_checksums(start)} if header.initial_site else {}),  # no weights came down
        }
        if (form := self.settings.lora.mean) != "factors":
            payload["lora_mean"] = form
        lower = {"rank": float(self.lora.rank)} if self.lora.rank < self.settings.lora.rank else {}
        return ok(header, {"min_cell": float(least)} | lower, payload)


def gives_start(task: Task) -> bool:
    """Tell whether a handshake asks this site for its initial weights, which leave at the start of a run alone.

    A member must have its state of the run.
    """
    header, state = task.header, task.state
    if header.member and state.latest(header.after) is None:
        raise missing_state(state, header.after)
    if header.initial_site != task.site.name:
        return False
    newest = state.latest(version(MAX_ROUNDS, MAX_STEPS))
    begun = newest not in (None, version(0, 0)) or set(state.answered()) - {HANDSHAKE}
    if begun or header.member or header.after != version(0, 0):
        raise ExchangeError("initial weights are asked for in the middle of a run; only untrained ones leave")
    if task.weights:
        raise ExchangeError("weights came down with the wish for initial ones; only those of the seed leave")
    return True


def require_exchange(task: Task) -> None:
    """Refuse weights not of the run's names and shapes; further groups are the learner's to check."""
    down = task.contract.task(task.name).down
    if not down or (schema := task.state.schema()) is None:
        return
    agreed, weights = schema.shapes, dict(task.weights)
    for group in task.contract.groups:
        if group.name in set(down) - {ADAPTER.name, PARAMETERS.name}:
            for name in [*weights]:
                if name not in agreed and matches(name, group.names):
                    del weights[name]
    schema.check(weights)
