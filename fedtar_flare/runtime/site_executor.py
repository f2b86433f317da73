"""``SiteExecutor``: a site for the tasks of any method, in the order in which it may refuse; state is on disk."""

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property
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
from fedtar_flare.core.errors import DISK_FULL, DISK_FULL_ERRNOS, ConfigError, ExchangeError, FedTARError
from fedtar_flare.core.log_fields import POSITION
from fedtar_flare.learning.ranks import ALONE, Ranks
from fedtar_flare.protocol.contract import HANDSHAKE, TRAIN, Contract
from fedtar_flare.protocol.exchange import Tensors, check_inbound, register_tensors
from fedtar_flare.protocol.messages import ABSTAIN, LEFT, Reply, TaskHeader, abstain, check_order, failure, version
from fedtar_flare.runtime.process_group import ProcessGroup
from fedtar_flare.runtime.server_config import ServerConfig
from fedtar_flare.runtime.task import Answer, Task, missing_state
from fedtar_flare.site import audit
from fedtar_flare.site.admission import admit
from fedtar_flare.site.approval import SERVER_CONFIG, only, require_approval
from fedtar_flare.site.context import Participation, Site, TaskAborted, hush_simulator, participation
from fedtar_flare.site.guard import NOT_ALLOWED_PROP
from fedtar_flare.site.job_records import RUNS, bind_run, count_answer, read_record
from fedtar_flare.site.site_file import SiteConfig, load_site_config
from fedtar_flare.site.state import ReadOnlyState, SiteState

register_tensors()


class SiteExecutor(Executor):
    """Runs the tasks of one method at a site.

    The way of a task goes down once and back once: the executor decides whether the task may come, opens a
    :class:`Task`, and hands it to the method's :class:`SiteStrategy`, which trains with a learner. What one task needs
    of another is on disk, so that each may run in a new process. Equal ``torch_threads`` give equal bits.
    """

    ranks: Ranks = ALONE
    """The processes that do the tasks together, this one among them."""
    _group: ProcessGroup | None = None
    _admitted: Any = None
    """The last request that was within the site's bounds, with these."""

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
        self.on_opened: Callable[[], None] | None = None
        """Called by the first of several processes once what the others need for a task is on disk."""

    @cached_property
    def definition(self) -> registry.Method:
        """The method, as installed here."""
        return registry.method(self.method)

    @cached_property
    def contract(self) -> Contract:
        """What the method exchanges."""
        return self.definition.contract

    @cached_property
    def strategy(self) -> Any:
        """What the method does at a site: its :class:`SiteStrategy`, with all settings checked."""
        return self.definition.site(self.definition, self.preset, self.settings, self.seed)

    # ------------------------------------------------------------------ a task, from FLARE to its answer
    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run one task. A site's failure is an answer with a public reason, never an exception that ends the job."""
        start = time.monotonic()
        header: TaskHeader | None = None
        try:
            # 1. Who asks, for what: nothing of the site is read yet.
            model = FLModelUtils.from_shareable(shareable)
            header = TaskHeader.from_meta(model.meta)
            POSITION.update(run=header.run_id, round=header.round, step=header.step, task=task_name)
            fl_ctx.set_prop(audit.HEADER_PROP, header, private=True, sticky=False)
            if reason := fl_ctx.get_prop(NOT_ALLOWED_PROP):
                raise ExchangeError(reason)
            if header.method != self.method:
                raise ExchangeError(f"the task is of method '{header.method}', this job's is '{self.method}'")
            site = Site.of_task(fl_ctx, abort_signal)
            if site.simulated:
                hush_simulator()
            elif header.rounds_per_period:
                raise ExchangeError("rounds_per_period is for simulations: at a hospital, visits arrive by themselves")
            audit.require_writable(site)
            check_inbound(model.params)
            # 2. The task, unless the site does not take part, or changes its mind while the task runs.
            reply, tensors = _veto(header, site), None
            if reply is None:
                reply, tensors = self._in_processes(task_name, header, model.params or {}, site)
                if veto := _veto(header, site):
                    reply, tensors = veto, None
        except TaskAborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception as error:
            text, public = reasons(error)
            self.logger.error(f"task '{task_name}': {text}")  # the logger alone: FLARE's log_error fires events
            reply, tensors = failure(header, public), None
        # 3. The answer.
        if reply.status == ABSTAIN:
            self.logger.info(f"task '{task_name}': no update from here: {reply.reason}")
        reply.numbers["seconds"] = round(time.monotonic() - start, 3)
        if not tensors:
            return FLModelUtils.to_shareable(FLModel(metrics={}, meta=reply.to_meta()))
        kind = ParamsType.DIFF if self.contract.task(task_name).sends == "difference" else ParamsType.FULL
        return FLModelUtils.to_shareable(FLModel(params=dict(tensors), params_type=kind, meta=reply.to_meta()))

    def _in_processes(self, name: str, header: TaskHeader, weights: Tensors, site: Site) -> Answer:
        """:meth:`perform` here, or in as many processes as the site file says, started where there are none."""
        config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        group, self._group = self._group, None
        if config.processes > 1:
            from fedtar_flare.learning.device import device_of_each

            device = device_of_each(config.device, config.processes)
            if group is not None and not (group.alive and (group.size, group.device) == (config.processes, device)):
                group.close()
                group = None
            site.most_seconds = config.policy.max_seconds
            self._group = group or ProcessGroup(config.processes, device)
            return self._group.perform(name, header, weights, site)
        if group is not None:
            group.close()
        return self.perform(name, header, weights, site, config)

    def perform(
        self, name: str, header: TaskHeader, weights: Tensors, site: Site, config: SiteConfig | None = None
    ) -> Answer:
        """Do a task in this process."""
        if self.definition.simulation_only and not site.simulated:
            text = f"method '{self.method}' runs in a simulation only: it is no method for hospitals"
            raise ConfigError(text, public=text)
        handlers = self.strategy.handlers()
        if name not in handlers:
            raise ConfigError(f"task '{name}' is unknown; this executor does {', '.join(handlers)}")
        if weights and not self.contract.task(name).down:
            raise ExchangeError(f"the server sent tensors in task '{name}', in which none come down")
        updates = self.contract.task(name).sends == "difference"
        if header.score == "all" and (updates or name == TRAIN):
            raise ExchangeError("a site of which all patients are scored never trains")
        torch.set_num_threads(self.torch_threads)
        config = config or load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        task = self._open(name, header, weights, site, config)
        if name != HANDSHAKE and self.on_opened:
            self.on_opened()
        with nullcontext() if self.ranks.rank else task.state.answering(name, header):
            if updates and not config.without_patients and not self.ranks.rank:
                count_answer(site.records, str(config.path), config.policy.max_answers)
            answer: Answer = self.strategy.handlers()[name](task)
            task.state.add_answered(name, version(header.round, header.step))
        if name == self.contract.tasks[-1].name and header.round == header.rounds:
            task.state.note(ended=True)
        if header.score == "test" and not self.ranks.rank:  # the other kind never trains
            arrived, r = header.arrived, header.round or int(header.after[:4]) + 1
            cohort = task.cohort if arrived is None else task.cohort.until(arrived + (name == HANDSHAKE))
            task.state.note_patients({s.visit.patient_id for s in cohort.samples(None) if s.split != "test"}, r)
        return answer

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keep the site's audit of what leaves; at the run's end, end the processes that did the tasks together."""
        audit.record_event(event_type, fl_ctx)
        if event_type == EventType.END_RUN and self._group is not None:
            self._group.close()

    def require_sharing(self) -> None:
        """Refuse several processes where the method's tasks cannot be shared."""
        if not self.strategy.shares_batches():
            public = f"the site file asks for several processes, which method '{self.method}' cannot use"
            raise ConfigError(f"{public}: write processes: 1 for its runs", public=public)

    # ------------------------------------------------------------------ opening a task
    def _open(self, name: str, header: TaskHeader, weights: Tensors, site: Site, config: SiteConfig) -> Task:
        """The task, opened; no data is read for a job or a task that may not come."""
        strategy = self.strategy = self.strategy.at(config.source, config.lora_rank)
        # 1. Whether the job is approved where it must be, and within the site's bounds, for which its model is made.
        bounds = config.policy
        site.most_seconds = bounds.max_seconds
        makes_again = not site.simulated and self._require_own_run(header, site)
        if bounds.approval == "required" or makes_again:
            require_approval(site.records, site.app, type(self), self._is_made_by, header.run_id)
        admitted = (bounds, config.source, config.lora_rank, header.rounds, header.time_steps)
        if admitted != self._admitted:  # a job requests the same in all its tasks; the site may change its bounds
            admit(strategy.request(header.rounds, header.time_steps), bounds)
            self._admitted = admitted
        # 2. The site's state of this run, and whether the task has its turn.
        kind = ReadOnlyState if self.ranks.rank else SiteState
        state = kind(site.state_root(config.state_dir), header.run_id, site.name)
        if not site.simulated:
            state.require_capacity()
        taken = not header.origin or state.take_over(header.origin, strategy.state_of_run)
        if not taken or (name != HANDSHAKE and not state.versions()):
            raise missing_state(state, header.origin or header.after)
        check_order(self.contract, name, header.round, state.answered())
        state.check_run(header, strategy.timeline_text(header.time_steps))
        # 3. The patients, and the site's one layout of their visits.
        task = Task(
            name=name,
            header=header,
            weights=weights,
            site=site,
            config=config,
            state=state,
            cohort=strategy.patients(config, site.name, header.time_steps, site.workspace, site.at_once),
            settings=strategy.settings,
            contract=self.contract,
            min_cell=strategy.min_cell(config),
            job_seed=self.seed,
            ranks=self.ranks,
            on_opened=self.on_opened,
            logger=self.logger,
        )
        if name != HANDSHAKE:  # whose own time is when the run is agreed on; visits may have come since
            strategy.hold_to_cell_layout(task)
        return task

    def _require_own_run(self, header: TaskHeader, site: Site) -> bool:
        """Refuse a second run of the job, or other rounds than its files say; returns whether it remakes rounds."""
        try:
            job = only(site.app / SERVER_CONFIG, "workflows").get("args") or {}
        except ConfigError as error:
            raise ConfigError(str(error), public=f"the job has no {SERVER_CONFIG.name} at the site") from error
        for name, requested in (("num_rounds", header.rounds), ("time_steps", header.time_steps)):
            if requested != (planned := job.get(name, ServerConfig.model_fields[name].default)):
                raise ExchangeError(f"the server asks for {name} {requested}; the job's own files say {planned!r:.40}")
        resumes, before = str(job.get("resume_from") or ""), int(job.get("remake_before") or 0)
        if header.origin:
            run_id, _, at = header.origin.partition("/")
            if int(at[:4]) >= before or read_record(site.records / RUNS).get(resumes) != run_id:
                raise ExchangeError("the state to begin with is not one of those that the job's own files say")
        bind_run(site.records, site.job, header.run_id, resumes="" if before else resumes)
        return before > 0

    def _is_made_by(self, arguments: Mapping[str, Any]) -> bool:
        """Whether an executor of these arguments does what this one does."""
        other = type(self)(**arguments)
        here = other.strategy.at(self.strategy.source, None)
        return other.method == self.method and bool(here.settings_digest() == self.strategy.settings_digest())


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
