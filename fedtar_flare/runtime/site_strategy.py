"""``SiteStrategy``: what a method does at a site, and what a site holds every run to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.globs import matches
from fedtar_flare.core.settings import RunSettings, Settings, build
from fedtar_flare.core.tensor_file import coarse_checksums
from fedtar_flare.data.minimum_cell import shown_count
from fedtar_flare.imaging.transform_list import names_of
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.exchange import ExchangeSchema, Tensors
from fedtar_flare.protocol.messages import MAX_ROUNDS, MAX_STEPS, Reply, TaskHeader, ok, version
from fedtar_flare.protocol.tasks import ADAPTER, HANDSHAKE, PARAMETERS
from fedtar_flare.runtime.requirements import AdaptedModel
from fedtar_flare.site.admission import JobRequest
from fedtar_flare.site.context import Site
from fedtar_flare.site.state import SiteState
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort
    from fedtar_flare.runtime.site_executor import SiteExecutor

Handler = Callable[[TaskHeader, Tensors, Site, SiteState, "Cohort"], tuple[Reply, "Tensors | None"]]
"""Does one task: its header, what came down, the site, its state of the run and its patients."""

LAST = version(MAX_ROUNDS, MAX_STEPS)
"""Later than any version of a site's state."""


class SiteStrategy(ABC):
    """A method at a site: it does the tasks of an executor, which gives preset, settings and seed, and in a task the
    site's file and smallest cell. A setting that is unknown or not allowed is a :class:`ConfigError`.
    """

    shared_groups: ClassVar[tuple[str, ...]] = ("model", "lora", "training", "data")
    """Further groups of settings than the method's own."""
    reads_reports: ClassVar[bool] = True
    divides_visits: ClassVar[bool] = True
    """Whether visits are counted, trained on or scored by time step; if not, all count at the first one."""
    columns: ClassVar[tuple[str, ...]] = ("report or report_path", "age or birth_date", "sex")
    """What a table of studies needs besides patient, date and image."""
    own_rank: int | None = None
    """Greatest rank of an adapter here, as the site file says; None: the job's."""

    def __init__(self, executor: SiteExecutor):
        self.executor = executor
        given = dict(executor.settings or {})
        own = executor.definition.settings
        if unknown := sorted(set(given) - {*self.shared_groups, *own}):
            raise ConfigError(f"{unknown[0]}: method '{executor.method}' has no such group of settings")
        shared = self.build_shared(executor.preset, {group: given.get(group) for group in self.shared_groups})
        self.given = RunSettings(**shared, **{name: build(kind, given.get(name), name) for name, kind in own.items()})
        self.settings: RunSettings
        if (form := self.given.lora.mean) != "factors":
            self._require_mixing(f"lora.mean: {form}")
        self.at_source("synthetic")
        self.check()

    def at_source(self, source: str) -> None:
        """Take the settings as they are where a site's data comes from this source."""
        self.settings = self.resolve(self.given, source)

    @property
    def lora_here(self) -> LoRAConfig:
        """The adapter here: the job's, or of the site's own rank; ConfigError where the method has one rank alone."""
        here: LoRAConfig = self.settings.lora.at_most(self.own_rank)
        if here.rank < self.settings.lora.rank:
            self._require_mixing(f"lora_rank: the site file has {here.rank}, the job {self.settings.lora.rank}")
        return here

    def _require_mixing(self, what: str) -> None:
        if not self.executor.definition.mixes_ranks:
            text = f"{what}: method '{self.executor.method}' averages factors of one rank alone"
            raise ConfigError(text, public=text)

    def request(self, rounds: int, time_steps: int) -> JobRequest:
        """What the job asks of a site: what the method does, and the transforms that any job may add."""
        return replace(self.asks(rounds, time_steps), transforms=names_of(self.settings.data.transforms))

    # ------------------------------------------------------------------ what a method may change
    @abstractmethod
    def build_shared(self, preset: str, given: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Settings]:
        """The shared groups of settings from what the job gives for each."""

    def resolve(self, given: RunSettings, source: str) -> RunSettings:
        """The settings in full, given those of the job and the source of a site's data."""
        return given

    def check(self) -> None:
        """Raise :class:`ConfigError` where settings do not fit each other."""

    def shares_batches(self) -> bool:
        """Whether several processes can do the tasks together."""
        return False

    def extra_values(self) -> int:
        """Values of one exchange besides the adapter's and those of ``lora.exchange``."""
        return 0

    def model_values(self) -> int | None:
        """Parameters of the model where it is another than the report generator of :meth:`adapted_model`."""
        return None

    @abstractmethod
    def work(self) -> str:
        """What a training task does, in words, for the description of a job."""

    @abstractmethod
    def adapted_model(self, time_steps: int) -> AdaptedModel:
        """The job's model and its adapter, for its size and for what the job changes of it."""

    @abstractmethod
    def asks(self, rounds: int, time_steps: int) -> JobRequest:
        """What the method asks of a site, for its bounds."""

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """What does each task, by the task's name."""

    # ------------------------------------------------------------------ what the tasks share
    def agreement(self, header: TaskHeader, site: Site, state: SiteState, cohort: Cohort, shared: Tensors) -> Reply:
        """Fix what the run exchanges and its time steps; the reply that every handshake begins with."""
        schema = ExchangeSchema.of(shared, self.settings.lora.dtype_up)
        least, executor = self.executor.min_cell, self.executor
        executor.divide(header, site, cohort)
        about = {"data": self.settings.data.to_dict(), "seed": executor.seed, "canaries": executor.site_config.canaries}
        job = {"method": executor.method, "preset": executor.preset, "settings": executor.settings or {}}
        about["job"] = job | {"rounds": header.rounds, "rounds_per_period": header.rounds_per_period}
        state.fix_run(header, self.executor.timeline(header.time_steps), schema, about)
        counts = cohort.counts(least)
        if not self.divides_visits:
            all_steps = {split: [s.visit.patient_id for s in cohort.samples(split)] for split in counts}
            shown = {split: shown_count(len(patients), patients, least) for split, patients in all_steps.items()}
            counts = {split: [n, *[0] * (header.time_steps - 1)] for split, n in shown.items()}
        payload = {
            "schema": schema.to_dict(),
            "versions": {"fedtar_flare": __version__},
            "settings": self.executor.settings_digest(),
            "counts": counts,
            "skipped_studies": cohort.left_out(least),
            **({"start": coarse_checksums(shared)} if header.initial_site else {}),  # no weights came down
        }
        if (form := self.settings.lora.mean) != "factors":
            payload["lora_mean"] = form
        lower = self.lora_here.rank < self.settings.lora.rank
        return ok(header, {"min_cell": float(least)} | ({"rank": float(self.lora_here.rank)} if lower else {}), payload)


def require_start(header: TaskHeader, weights: Tensors, state: SiteState) -> None:
    """Refuse (:class:`ExchangeError`) to give initial weights anywhere but at the start of a run."""
    begun = state.latest(LAST) not in (None, version(0, 0)) or set(state.answered()) - {HANDSHAKE}
    if begun or header.member or header.after != version(0, 0):
        raise ExchangeError("initial weights are asked for in the middle of a run; only untrained ones leave")
    if weights:
        raise ExchangeError("weights came down with the wish for initial ones; only those of the seed leave")


def require_exchange(contract: Contract, task: str, state: SiteState, weights: Tensors) -> None:
    """Refuse (:class:`ExchangeError`) weights that are not the run's exchange, before any of them is kept.

    Tensors of a method's other groups are left to its learner, which loads them or refuses them.
    """
    down = contract.task(task).down
    others = [g for g in contract.groups if g.name in set(down) - {ADAPTER.name, PARAMETERS.name}]
    if down and (schema := state.schema()) is not None:
        agreed = dict(schema.shapes)
        names = [n for n in weights if n in agreed or not any(matches(n, group.names) for group in others)]
        schema.check({name: weights[name] for name in names})
