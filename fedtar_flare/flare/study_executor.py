"""Base of every executor that works on a site's studies: the site's file, bounds, approval, patients, minimum cell."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from fedtar_flare.errors import ConfigError, DataError, ExchangeError
from fedtar_flare.flare.executor import MethodExecutor, Tensors, ok
from fedtar_flare.flare.process_group import ProcessGroup
from fedtar_flare.flare.run_rules import timeline_of
from fedtar_flare.learning.config import DataConfig, LoRAConfig
from fedtar_flare.learning.ranks import ALONE, Ranks
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.protocol.tasks import HANDSHAKE
from fedtar_flare.settings import build, digest
from fedtar_flare.site.admission import Asked, admit
from fedtar_flare.site.approval import require_approval
from fedtar_flare.site.place import Site
from fedtar_flare.site.state import SiteState, StateOfAnother
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort
    from fedtar_flare.site.site_file import SiteConfig

Handler = Callable[[TaskHeader, Tensors, Site, SiteState, "Cohort"], tuple[Reply, "Tensors | None"]]
"""Does one task: its header, what came down, the site, its state of the run and its patients."""

PRODUCTION_MIN_CELL = 5
"""Fewest distinct patients of a split at a step, at a real site whose file sets no ``min_cell``."""


class StudyExecutor(MethodExecutor):
    """Opens a site for a task, in the order in which a site may refuse; what is learnt is the subclass's.

    A subclass sets ``model_config`` (which has at least ``image_size`` and ``slices``), ``lora_config`` and
    ``training_config``. What one task needs of another is on disk (:class:`SiteState`), because each may run in a new
    process.

    Args:
        data: settings of :class:`DataConfig`.
        seed: all randomness derives from it, the site's name, the round, the step and the task.
        torch_threads: threads of one task; equal threads give equal bits.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """

    model_config: Any
    lora_config: LoRAConfig
    training_config: Any
    reads_reports: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("report or report_path", "age or birth_date", "sex")
    """What a table of studies needs beside patient, date and image."""
    ranks: Ranks = ALONE
    """The processes that do the tasks together, this one among them."""
    _group: ProcessGroup | None = None

    def __init__(self, data: dict[str, Any] | None, seed: int, torch_threads: int):
        super().__init__()
        if isinstance(torch_threads, bool) or not isinstance(torch_threads, int) or torch_threads < 1:
            raise ConfigError(f"torch_threads must be a whole number of at least 1, not {torch_threads!r}")
        self.data, self.seed, self.torch_threads = data, seed, torch_threads
        self.data_config = build(DataConfig, data, "data")
        self._config: SiteConfig

    # ------------------------------------------------------------------ what a method may change
    def method_settings(self) -> tuple[Any, ...]:
        """Settings beside the shared ones that must be the same at every site."""
        return ()

    def values_beside(self) -> int:
        """Values of one exchange beside the adapter's and those of ``lora.exchange``."""
        return 0

    def model_values(self) -> int | None:
        """Parameters of the model where it is another than the report generator that ``asked`` tells of."""
        return None

    @abstractmethod
    def work(self) -> str:
        """What a training task does, in words, for the description of a job."""

    @abstractmethod
    def asked(self, rounds: int, time_steps: int) -> Asked:
        """What the job asks of a site, for its bounds."""

    def require_sharing(self) -> None:
        """Raise :class:`ConfigError` where several processes cannot do the tasks together."""
        method = self.contract.method
        raise ConfigError(
            f"processes in the site file: the tasks of method '{method}' are done by one process. Write processes: 1 "
            "for its runs; docs/site-file.md names the methods that can use more",
            public=f"the site file asks for several processes, which method '{method}' cannot use",
        )

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """What does each task, by the task's name."""

    def perform(self, task: str, header: TaskHeader, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        """Route a task (see :class:`MethodExecutor`)."""
        does = self.handlers()
        if task not in does:
            raise ConfigError(f"task '{task}' is unknown; this executor does {', '.join(does)}")
        if weights and not self.contract.task(task).down:
            raise ExchangeError(f"the server sent tensors in task '{task}', in which none come down")
        torch.set_num_threads(self.torch_threads)
        state, cohort = self._open(task, header, site)
        if task != HANDSHAKE:
            self.let_others_begin()
        answer = does[task](header, weights, site, state, cohort)
        state.add_answered(task, version(header.round, header.step))
        return answer

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """As :class:`MethodExecutor`; at the run's end the processes end that did the tasks together."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.END_RUN and self._group is not None:
            self._group.close()

    def let_others_begin(self) -> None:
        """Called by the first of several processes once what the others need is on disk."""
        if self.opened is not None:
            self.opened()

    def _performed(
        self, task: str, header: TaskHeader, weights: Tensors, site: Site, fl_ctx: FLContext, abort_signal: Signal
    ) -> tuple[Reply, Tensors | None]:
        """By as many processes as the site file says."""
        group = self._group_of(site)
        if group is None:
            return super()._performed(task, header, weights, site, fl_ctx, abort_signal)
        return group.perform(task, header, weights, site, partial(self.send_scalar, site))

    def _group_of(self, site: Site) -> ProcessGroup | None:
        """The processes that do the site's tasks together, started where there are none; None for this one alone."""
        from fedtar_flare.learning.device import device_of_each
        from fedtar_flare.site.site_file import load_site_config

        config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        device = device_of_each(config.device, config.processes) if config.processes > 1 else "cpu"
        group, self._group = self._group, None
        if group is not None and not (group.alive and (group.size, group.device) == (config.processes, device)):
            group.close()
            group = None
        if config.processes > 1:
            site.limit(config.policy.max_seconds)
            self._group = group or ProcessGroup(config.processes, device)
        return self._group

    # ------------------------------------------------------------------ opening a site
    def _open(self, task: str, header: TaskHeader, site: Site) -> tuple[SiteState, Cohort]:
        """The site's state of this run and its patients; no data is read for a job or a task that may not come."""
        from fedtar_flare.site.site_file import load_site_config

        self._config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        self._admit(header, site)
        kind = StateOfAnother if self.ranks.rank else SiteState
        state = kind(site.state_root(self._config.state_dir), header.run_id, site.name)
        if not site.simulated:
            state.require_place()
        if task != HANDSHAKE and not state.versions():
            raise no_state(state, header.after)
        self.contract.check_place(task, header.round, state.answered())
        state.check_run(header.time_steps, timeline_of(self.data_config, header))
        return state, self._patients(self._config, site.name, header, site.workspace)

    def _admit(self, header: TaskHeader, site: Site) -> None:
        """Raise Declined for a job that is beyond the site's bounds, or not approved where it must be."""
        bounds = self._config.policy
        site.limit(bounds.max_seconds)
        admit(self.asked(header.rounds, header.time_steps), bounds)
        if bounds.approval == "required":
            require_approval(site.records, site.app, type(self), self._is_made_by)

    def _is_made_by(self, arguments: Mapping[str, Any]) -> bool:
        """Whether an executor of these arguments does what this one does."""
        return type(self)(**arguments).settings_digest() == self.settings_digest()

    def _patients(self, config: SiteConfig, name: str, header: TaskHeader, workspace: Path | None = None) -> Cohort:
        """A site's patients, prepared for the model."""
        from fedtar_flare.site.cohort import prepare_site

        cohort, _ = prepare_site(
            config,
            name,
            model=self.model_config,
            data=self.data_config,
            time_steps=header.time_steps,
            seed=self.seed,
            workspace=workspace,
            reports=self.reads_reports,
        )
        return cohort

    def _agreement(self, header: TaskHeader, site: Site, state: SiteState, cohort: Cohort, shared: Tensors) -> Reply:
        """Fix what the run exchanges and its time steps; the reply that every handshake begins with."""
        schema = ExchangeSchema.of(shared, self.lora_config.dtype_up)
        state.fix_run(header.time_steps, timeline_of(self.data_config, header), schema)
        least = self._min_cell(site)
        payload = {
            "schema": schema.to_dict(),
            "versions": {"fedtar_flare": __version__},
            "settings": self.settings_digest(),
            "counts": cohort.counts(least),
            "skipped_studies": cohort.left_out(least),
        }
        return ok(header, {"min_cell": float(least)}, payload)

    def settings_digest(self) -> str:
        """Digest of the settings that must be the same at every site."""
        shared = (self.model_config, self.lora_config, self.training_config, self.data_config)
        return f"{digest(*shared, *self.method_settings())}-{self.seed}"

    def _min_cell(self, site: Site) -> int:
        """The largest of the job's, the site's and its policy's; a real site without one of its own has 5."""
        configured = self._config.min_cell
        if configured is None:
            configured = 1 if site.simulated or self._config.source == "synthetic" else PRODUCTION_MIN_CELL
        return max(configured, self.data_config.min_cell, self._config.policy.min_patients)


def seed_of(seed: int, site: str, round_: int, step: int, task: str) -> int:
    """Seed of one task: the same in every process, independent of what ran before.

    >>> seed_of(0, "site-1", 1, 2, "train") == seed_of(0, "site-1", 1, 2, "train")
    True
    """
    text = f"{seed}/{site}/{round_}/{step}/{task}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def no_state(state: SiteState, after: str) -> DataError:
    """The error of a site whose state of the run is missing."""
    return DataError(
        f"{state.folder} has no state of this run at or before version {after}; it was deleted, or the run began on "
        "another machine. Restore the folder from a backup, or submit the job anew",
        reason="no-site-state",
    )
