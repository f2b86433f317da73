"""``SiteExecutor``: a site for the tasks of any method, in the order in which it may refuse; state is on disk."""

import hashlib
import hmac
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare import registry
from fedtar_flare.core.errors import DISK_FULL, DISK_FULL_ERRNOS, ConfigError, DataError, ExchangeError, FedTARError
from fedtar_flare.core.settings import RunSettings, digest
from fedtar_flare.data.cohort import Cohort
from fedtar_flare.learning.ranks import ALONE, Ranks
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.exchange import Tensors, check_inbound, register_tensors
from fedtar_flare.protocol.messages import ABSTAIN, LEFT, Reply, TaskHeader, abstain, failure, version
from fedtar_flare.protocol.tasks import HANDSHAKE
from fedtar_flare.runtime.process_group import ProcessGroup
from fedtar_flare.runtime.scalars import send_scalar
from fedtar_flare.runtime.server_config import ServerConfig
from fedtar_flare.site import audit
from fedtar_flare.site.admission import admit
from fedtar_flare.site.approval import SERVER_CONFIG, Participation, only, participation, require_approval
from fedtar_flare.site.context import Site, TaskAborted, hush_simulator, sites_at_once
from fedtar_flare.site.guard import NOT_ALLOWED_PROP
from fedtar_flare.site.job_records import bind_run, fix_cells
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import ReadOnlyState, SiteState

register_tensors()

PRODUCTION_MIN_CELL = 5
"""Fewest distinct patients of a split at a step, at a real site whose policy sets no ``min_patients``."""


class SiteExecutor(Executor):
    """Runs the tasks of one method at a site; what is learnt is the business of the method's :class:`SiteStrategy`.

    The method is looked up when it is first needed: at a site, once its guard has let a task of it pass, so that no job
    imports a package that the site has not allowed. What one task needs of another is on disk (:class:`SiteState`),
    because each may run in a new process.

    Parameters
    ----------
    method : str
        Name of an installed method (:mod:`fedtar_flare.registry`).
    preset : str
        Of the model; the method's own presets have been resolved by the recipe.
    settings : dict, optional
        Groups of settings by name, each a dictionary.
    seed : int
        All randomness derives from it, the site's name, the round, the step and the task; see :meth:`chance`.
    torch_threads : int
        Threads of one task; equal threads give equal bits.

    Raises
    ------
    ConfigError
        ``torch_threads`` is not allowed; from :attr:`strategy` on: the method is not installed, or a setting is unknown
        or not allowed.
    """

    ranks: Ranks = ALONE
    """The processes that do the tasks together, this one among them."""
    site_config: SiteConfig
    """What the site's own file says; known from the first task on."""
    scalars_to: Callable[[str, float, int], None] | None = None
    """Where :meth:`send_scalar` gives its points; None: to the server."""
    side_by_side = 1
    """Simulated sites that prepare their images at the same time on this machine."""
    _group: ProcessGroup | None = None

    def __init__(
        self,
        method: str,
        preset: str = "small",
        settings: dict[str, Any] | None = None,
        seed: int = 0,
        torch_threads: int = 1,
    ):
        super().__init__()
        if isinstance(torch_threads, bool) or not isinstance(torch_threads, int) or not 1 <= torch_threads <= 256:
            raise ConfigError(f"torch_threads must be a whole number from 1 to 256, not {torch_threads!r}")
        self.method, self.preset, self.settings = method, preset, settings
        self.seed, self.torch_threads = seed, torch_threads
        self.let_others_begin: Callable[[], None] = lambda: None
        """Called by the first of several processes once what the others need for a task is on disk."""

    # ------------------------------------------------------------------ the method and its settings
    @cached_property
    def definition(self) -> registry.Method:
        """The method, as installed here."""
        return registry.method(self.method)

    @cached_property
    def strategy(self) -> Any:
        """What the method does at a site: its :class:`SiteStrategy`, with all settings checked."""
        return self.definition.site(self)

    @property
    def contract(self) -> Contract:
        return self.definition.contract

    @property
    def resolved(self) -> RunSettings:
        """All settings by group, defaults filled in, as they are at this site."""
        return self.strategy.settings

    def settings_digest(self) -> str:
        """Digest of the settings that must be the same at every site."""
        return f"{digest(*self.resolved.values())}-{self.seed}"

    @property
    def min_cell(self) -> int:
        """The larger of the job's and the site's; a real site without one of its own has 5."""
        return max(self.resolved.data.min_cell, self.site_config.policy.min_patients)

    def chance(self, cohort: Cohort) -> int | str:
        """What :func:`seed_of` is given for all that is random in what leaves, such as the order of visits.

        The job's seed, which everybody knows; at a site with patients, its secret key, all that a job chooses, and the
        visits. Who knew which visits each mean is of could solve many means for single visits, and who chose the seed
        alone, or waited for a report to be corrected, could ask for two means that differ in one.
        """
        if self.site_config.without_patients:
            return self.seed
        given = f"chance:{self.method}/{self.settings_digest()}/{cohort.digest()}"
        return hmac.digest(cohort.key, given.encode(), "sha256").hex()

    def timeline(self, time_steps: int) -> str:
        """How visits become time steps, as one text."""
        timeline = self.resolved.data.timeline(time_steps)
        return " ".join([timeline.alignment, *(date.isoformat() for date in timeline.periods)])

    def division(self, time_steps: int) -> dict[str, str]:
        """How the site's data is divided into cells; empty where no cell is of patients."""
        if self.site_config.without_patients:
            return {}
        by_time = {"time_steps": str(time_steps), "timeline": self.timeline(time_steps)}
        return (by_time if self.strategy.divides_visits else {}) | {"min_cell": str(self.min_cell)}

    def divide(self, header: TaskHeader, site: Site, cohort: Cohort) -> None:
        """Hold a task to the site's one division of its data, and note which visit is the newest that counts."""
        if asked := self.division(header.time_steps):
            newest = max((visit.acquired.isoformat() for visit in cohort.visits), default="")
            asked |= {"score": header.score}
            fix_cells(site.records, str(self.site_config.path), asked, newest, begins=header.round == 0)

    # ------------------------------------------------------------------ a task, from FLARE to its answer
    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run one task. A site's failure is an answer with a public reason, never an exception that ends the job."""
        start = time.monotonic()
        header: TaskHeader | None = None
        try:
            model = FLModelUtils.from_shareable(shareable)
            header = TaskHeader.from_meta(model.meta)
            fl_ctx.set_prop(audit.HEADER_PROP, header, private=True, sticky=False)
            if reason := fl_ctx.get_prop(NOT_ALLOWED_PROP):
                raise ExchangeError(reason)
            if header.method != self.method:
                raise ExchangeError(f"the task is of method '{header.method}', this job's is '{self.method}'")
            site = Site(fl_ctx, abort_signal)
            if site.simulated:
                hush_simulator()
            elif header.rounds_per_period:
                raise ExchangeError("rounds_per_period is for simulations: at a hospital, visits arrive by themselves")
            audit.require_writable(site, fl_ctx)
            check_inbound(model.params)
            reply, tensors = _veto(header, site), None
            if reply is None:
                reply, tensors = self.carry_out(task_name, header, model.params or {}, site, fl_ctx)
                if late := _veto(header, site):  # the site changed its mind while the task ran
                    reply, tensors = late, None
        except TaskAborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception as error:
            text, public = reasons(error)
            self.logger.error(f"task '{task_name}': {text}")  # the logger alone: FLARE's log_error fires events
            reply, tensors = failure(header, public), None
        if reply.status == ABSTAIN:
            self.logger.info(f"task '{task_name}': no update from here: {reply.reason}")
        reply.numbers["seconds"] = round(time.monotonic() - start, 3)
        if not tensors:
            return FLModelUtils.to_shareable(FLModel(metrics={}, meta=reply.to_meta()))
        kind = ParamsType.DIFF if self.contract.task(task_name).sends == "difference" else ParamsType.FULL
        return FLModelUtils.to_shareable(FLModel(params=dict(tensors), params_type=kind, meta=reply.to_meta()))

    def carry_out(
        self, task: str, header: TaskHeader, weights: Tensors, site: Site, fl_ctx: FLContext
    ) -> tuple[Reply, Tensors | None]:
        """:meth:`perform` here, or in as many processes as the site file says."""
        if group := self._group_of(site):
            return group.perform(task, header, weights, site, partial(self.send_scalar, site))
        self.side_by_side = sites_at_once(fl_ctx) if site.simulated else 1
        return self.perform(task, header, weights, site)

    def perform(self, task: str, header: TaskHeader, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        """Do a task in this process, given what came down; return the reply and what goes up with it, or None.

        Of a FedTARError the ``public`` text goes to the server, its full text to the site's own log.
        """
        if self.definition.simulation_only and not site.simulated:
            text = f"method '{self.method}' runs in a simulation only: it is no method for hospitals"
            raise ConfigError(text, public=text)
        handlers = self.strategy.handlers()
        if task not in handlers:
            raise ConfigError(f"task '{task}' is unknown; this executor does {', '.join(handlers)}")
        if weights and not self.contract.task(task).down:
            raise ExchangeError(f"the server sent tensors in task '{task}', in which none come down")
        torch.set_num_threads(self.torch_threads)
        state, cohort = self._open(task, header, site)
        if task != HANDSHAKE:
            self.let_others_begin()
        answer = handlers[task](header, weights, site, state, cohort)
        state.add_answered(task, version(header.round, header.step))
        return answer

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keep the site's audit of what leaves; at the run's end the processes end that did the tasks together."""
        audit.record_event(event_type, fl_ctx)
        if event_type == EventType.END_RUN and self._group is not None:
            self._group.close()

    def send_scalar(self, site: Site, tag: str, value: float, step: int) -> None:
        """Send one point of the curve ``tag`` at ``step`` to the server, where the site's audit can be written."""
        if self.scalars_to is not None:
            self.scalars_to(tag, value, step)
            return
        with site.engine.new_context() as context:
            audit.require_writable(site, context)  # the listener that sends it may come before the audit's
            send_scalar(self, context, tag, value, step)

    # ------------------------------------------------------------------ several processes
    def require_sharing(self) -> None:
        """Raise :class:`ConfigError` where several processes cannot do the tasks together."""
        if not self.strategy.shares_batches():
            raise ConfigError(
                f"processes in the site file: the tasks of method '{self.method}' are done by one process. Write "
                "processes: 1 for its runs; docs/reference/site-file.md names the methods that can use more",
                public=f"the site file asks for several processes, which method '{self.method}' cannot use",
            )

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

        self.site_config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        self.strategy.at_source(self.site_config.source)
        self.strategy.own_rank = self.site_config.lora_rank
        self._admit(header, site)
        kind = ReadOnlyState if self.ranks.rank else SiteState
        state = kind(site.state_root(self.site_config.state_dir), header.run_id, site.name)
        if not site.simulated:
            state.require_capacity()
        if task != HANDSHAKE and not state.versions():
            raise no_state(state, header.after)
        self.contract.check_order(task, header.round, state.answered())
        state.check_quota(task, header)
        state.check_run(header, self.timeline(header.time_steps))
        cohort = self.patients(self.site_config, site.name, header, site.workspace)
        if task != HANDSHAKE:  # whose own time is when the run is agreed on; visits may have come since
            self.divide(header, site, cohort)
        return state, cohort

    def _admit(self, header: TaskHeader, site: Site) -> None:
        """Raise Declined for a job that is not approved where it must be, then for one beyond the site's bounds, for
        which the job's model is made.
        """
        bounds = self.site_config.policy
        site.limit(bounds.max_seconds)
        if not site.simulated:
            self._require_own_run(header, site)
        if bounds.approval == "required":
            require_approval(site.records, site.app, type(self), self._is_made_by, header.run_id)
        admit(self.strategy.request(header.rounds, header.time_steps), bounds)

    def _require_own_run(self, header: TaskHeader, site: Site) -> None:
        """Refuse (:class:`ExchangeError`) a second run of the job, or other rounds than its files say."""
        try:
            said = only(site.app / SERVER_CONFIG, "workflows").get("args") or {}
        except ConfigError as error:
            raise ConfigError(str(error), public=f"the job has no {SERVER_CONFIG.name} at the site") from error
        for name, asked in (("num_rounds", header.rounds), ("time_steps", header.time_steps)):
            if asked != (own := said.get(name, ServerConfig.model_fields[name].default)):
                raise ExchangeError(f"the server asks for {name} {asked}; the job's own files say {own!r:.40}")
        bind_run(site.records, site.job, header.run_id, resumes=str(said.get("resume_from") or ""))

    def _is_made_by(self, arguments: Mapping[str, Any]) -> bool:
        """Whether an executor of these arguments does what this one does."""
        other = type(self)(**arguments)
        other.strategy.at_source(self.site_config.source)
        return other.method == self.method and other.settings_digest() == self.settings_digest()

    def patients(self, config: SiteConfig, name: str, header: TaskHeader, workspace: Path | None = None) -> Cohort:
        """A site's patients, prepared for the model."""
        from fedtar_flare.imaging.workers import worker_count
        from fedtar_flare.learning.clinical_start import refuse_known_tests
        from fedtar_flare.models.config import ModelConfig
        from fedtar_flare.site.cohort import prepare_site

        cohort, _ = prepare_site(
            config,
            name,
            model=self.resolved.model,
            data=self.resolved.data,
            time_steps=header.time_steps,
            seed=self.seed,
            workspace=workspace,
            reports=self.strategy.reads_reports,
            workers=max(1, worker_count() // self.side_by_side),
        )
        if isinstance(self.resolved.model, ModelConfig):
            refuse_known_tests(cohort, self.resolved.model.with_local_paths(config.policy.models).weights)
        return cohort


def reasons(error: Exception) -> tuple[str, str]:
    """What a site's own log says of an error, and what the server may know of it."""
    if isinstance(error, FedTARError):
        return str(error), error.public
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return f"{error}. Free the disk; nothing was trained", DISK_FULL
    public = f"unexpected {type(error).__name__} (see the site's own log)"
    return "".join(traceback.format_exception(error)), public


def _veto(header: TaskHeader, site: Site) -> Reply | None:
    """The answer of a site that does not take part now; None when it does."""
    state = participation(site.records)
    if state is Participation.PAUSED:
        return abstain(header, "paused by the site")
    return failure(header, LEFT) if state is Participation.LEFT else None


def seed_of(seed: int | str, site: str, round_: int, step: int, task: str) -> int:
    """Seed of one task: the same in every process, independent of what ran before."""
    text = f"{seed}/{site}/{round_}/{step}/{task}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def no_state(state: SiteState, after: str) -> DataError:
    """The error of a site whose state of the run is missing."""
    return DataError(
        f"{state.folder} has no state of this run at or before version {after}; it was deleted, or the run began on "
        "another machine. Restore the folder from a backup, or submit the job anew",
        reason="no-site-state",
    )
