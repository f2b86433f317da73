"""Send tasks to the live sites, take each answer as it comes, and account for sites that did not answer.

FLARE's own waiting has traps that this module closes for all methods: one failing site must not end the job, quick
sites must not shut out slow ones, an aborted job must stop at once, a late or foreign answer must never be counted, and
memory must not grow with the number of sites.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.widgets.info_collector import InfoCollector

from fedtar_flare.core.errors import ExchangeError, FedTARError
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.exchange import Tensors, register_tensors
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, Reply, TaskHeader
from fedtar_flare.protocol.tasks import TRAIN
from fedtar_flare.record.events import Late
from fedtar_flare.record.log import STATS_GROUP, RunRecord
from fedtar_flare.runtime.server_config import ServerConfig

register_tensors()

POLL_SECONDS = 0.02
"""Interval at which standing tasks and the abort signal are checked."""
BEHIND = "still at work; its answer may enter a later round"
CLOSE, ROOM, WASTEFUL = 0.8, 3.0, 20.0
"""A slowest answer above CLOSE times the limit is nearly lost, ROOM times it is safe; WASTEFUL times it costs time."""


class RunAborted(Exception):
    """The job was aborted: unwind without saving anything."""


@dataclass
class Answers:
    """Who answered what to one task. Every asked site ends up in exactly one of the first four, by name."""

    replies: dict[str, Reply] = field(default_factory=dict)  # ``ok``, and accepted
    abstained: dict[str, str] = field(default_factory=dict)  # why it adds nothing at this step
    refused: dict[str, str] = field(default_factory=dict)  # why its answer was not accepted
    absent: dict[str, str] = field(default_factory=dict)  # error at the site, time limit, disconnected
    seconds: dict[str, float] = field(default_factory=dict)  # until its answer came
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: int = 0  # to all sites
    closed: bool = False  # the account is settled; every further answer is late

    @property
    def count(self) -> int:
        """How many sites took part: accepted or abstaining."""
        return len(self.replies) + len(self.abstained)

    @property
    def known(self) -> set[str]:
        """Sites that are accounted for."""
        return {*self.replies, *self.abstained, *self.refused, *self.absent}

    @property
    def missing(self) -> dict[str, str]:
        """Sites without an accepted answer, with the reason."""
        return self.abstained | self.absent | self.refused

    def add(self, more: "Answers") -> None:
        """Merge in the account of other sites."""
        for name in ("replies", "abstained", "refused", "absent", "seconds", "bytes_up"):
            getattr(self, name).update(getattr(more, name))
        self.bytes_down += more.bytes_down


OnReply = Callable[[str, Reply, Tensors], None]


class TaskController(ModelController):
    """Sends tasks and keeps the account of answers; arguments as :class:`FederatedController`.

    A malformed answer of any kind is refused and recorded; a fault of the server itself (a full disk) stops the job. A
    site that missed a time limit is not waited for again until it has answered something.

    With ``wait_seconds`` a training task goes on without its slow sites. It stays open for them, since FLARE's client
    drops the answer to a closed one; they get no other task meanwhile, and :meth:`take_late` adds what they answer.
    """

    config: ServerConfig
    contract: Contract
    strategy: Any  # ServerStrategy, which is written for the whole controller
    record: RunRecord

    def __init__(self) -> None:
        super().__init__(persistor_id="", ignore_result_error=True, task_check_period=POLL_SECONDS)
        self._lock = threading.Lock()
        self._answers = Answers(closed=True)
        self._silent: set[str] = set()
        self._behind: dict[str, tuple[float, Tensors]] = {}
        """Sites at work on a training task that went on without them, when its time limit is up, and what it sent."""
        self._kept: dict[str, tuple[TaskHeader, FLModel, Tensors]] = {}
        self._slowest: dict[str, float] = {}
        self._advised: set[tuple[str, bool]] = set()
        self._open_task: tuple[str, TaskHeader, float, list[str]] | None = None
        self._fault: Exception | None = None

    def live_sites(self) -> list[str]:
        """Names of the sites that are connected now, sorted."""
        names = sorted(client.name for client in self.engine.get_clients())
        return [name for name in names if not self.get_client_disconnect_time(name)]

    def ask(
        self,
        task: str,
        header: TaskHeader,
        weights: Tensors | None,
        sites: Sequence[str],
        on_reply: OnReply,
        time_limit: int | None = None,
        min_sites: int | None = None,
    ) -> Answers:
        """Send one task to the given sites and hand each good answer to ``on_reply`` as it comes.

        ``weights`` go down in float32 in a task whose contract sends any. ``on_reply`` is called once per site, one
        call at a time, and raises :class:`ExchangeError` to refuse the answer. ``time_limit`` (seconds) and
        ``min_sites`` take the place of the controller's own. Raises RunAborted, FedTARError where fewer than
        ``min_sites`` took part, and OSError where the server could not keep an answer.
        """
        limit = self.config.step_time_limit if time_limit is None else time_limit
        too_late = f"no answer within {limit} s"
        least = self.config.min_sites if min_sites is None else min_sites
        of_all = task != TRAIN and header.round == header.rounds  # the last scores
        while (behind := self._at_work()) and (of_all or len({*sites} & {*self.live_sites()} - behind) < least):
            self.stop_if_aborted()
            time.sleep(POLL_SECONDS)
        start = time.monotonic()
        live = set(self.live_sites())
        answers = Answers(absent={site: "disconnected" for site in sites if site not in live})
        answers.absent |= {site: BEHIND for site in sites if site in behind}
        targets = [site for site in sites if site not in answers.absent]
        with self._lock:
            self._answers = answers
            self._open_task = (task, header, start, targets)
        if not self.contract.task(task).down:
            weights = None
        if targets:
            answers.bytes_down = 4 * sum(value.numel() for value in (weights or {}).values()) * len(targets)
            self.send_model(
                task_name=task,
                data=_message(header, weights),
                targets=targets,
                min_responses=0,
                timeout=limit,
                callback=lambda model: self._take(answers, task, header, model, on_reply, start),
            )
            while self.get_num_standing_tasks():
                self.stop_if_aborted()
                if self._goes_on(answers, task, targets, time.monotonic() - start, limit):
                    break
                if self._fault is not None or (limit and self._only_silent_left(answers, targets)):
                    self.cancel_all_tasks()
                    self._behind.clear()
                time.sleep(POLL_SECONDS)
        self.stop_if_aborted()
        with self._lock:
            answers.closed = True
            if self._fault is not None:
                raise self._fault
            for site in targets:
                if site in answers.known:
                    self._silent.discard(site)
                    continue
                if self.get_client_disconnect_time(site):
                    answers.absent[site] = "disconnected while it had the task"
                elif task == TRAIN and self.config.wait_seconds and not 0 < limit <= time.monotonic() - start:
                    answers.absent[site] = BEHIND
                    self._behind[site] = start + (limit or math.inf), weights or {}
                    continue
                else:
                    answers.absent[site] = "still silent; not waited for again" if site in self._silent else too_late
                self._silent.add(site)
        self._advise(task, answers, limit, missed=sum(why == too_late for why in answers.absent.values()))
        if answers.count < least:
            problems = [*answers.absent.items(), *((s, f"refused: {why}") for s, why in answers.refused.items())]
            raise FedTARError(
                f"task '{task}' of {place(header)}: {answers.count} site(s) took part, min_sites is {least}. "
                + "; ".join(f"{site}: {why}" for site, why in sorted(problems))
                + " (--min-sites lets a run go on with fewer)"
            )
        return answers

    def _advise(self, task: str, answers: Answers, limit: int, missed: int) -> None:
        """Log when the time limit does not fit what was seen; the same advice once."""
        self._slowest[task] = max([self._slowest.get(task, 0.0), *answers.seconds.values()])
        setting = "step_time_limit" if limit == self.config.step_time_limit else f"{task}_time_limit"
        line = advice(limit, self._slowest[task], missed, setting)
        if line and (task, missed > 0) not in self._advised:
            self._advised.add((task, missed > 0))
            self.info(f"task '{task}': {line}")

    def stop_if_aborted(self) -> None:
        """Raise :class:`RunAborted` when the job was aborted."""
        if self.abort_signal.triggered:
            raise RunAborted

    def _at_work(self) -> set[str]:
        """Sites that have an earlier training task still."""
        with self._lock:
            left = {s: one for s, one in self._behind.items() if time.monotonic() <= one[0]}
            self._behind = {s: one for s, one in left.items() if not self.get_client_disconnect_time(s)}
            return set(self._behind)

    def _goes_on(self, answers: Answers, task: str, targets: Sequence[str], spent: float, limit: float) -> bool:
        """Whether a task ends though FLARE has open ones: all have answered, or ``wait_seconds`` are up for others."""
        with self._lock:
            open_ = [s for s in targets if s not in answers.known and not self.get_client_disconnect_time(s)]
            late = task == TRAIN and 0 < self.config.wait_seconds < spent and answers.count >= self.config.min_sites
            return late or (self.config.wait_seconds > 0 and (not open_ or 0 < limit < spent))

    def take_late(self, answers: Answers, header: TaskHeader, on_reply: Callable[..., None]) -> None:
        """Add what sites without an answer of their own have answered late to this step of an earlier round.

        ``on_reply`` is given ``before``, too: what that round sent down.
        """
        for site in sorted(self._kept):
            asked, model, before = self._kept[site]
            if asked.step == header.step and asked.round < header.round:
                del self._kept[site]
                if site not in {*answers.replies, *answers.abstained}:
                    answers.absent.pop(site, None)
                    self._account(answers, TRAIN, asked, site, model, partial(on_reply, before=before))

    def _only_silent_left(self, answers: Answers, targets: Sequence[str]) -> bool:
        with self._lock:
            waiting = [site for site in targets if site not in answers.known]
        return bool(waiting) and len(waiting) < len(targets) and all(site in self._silent for site in waiting)

    def _take(
        self, answers: Answers, task: str, header: TaskHeader, model: FLModel, on_reply: OnReply, start: float
    ) -> bool:
        """Check and sort an answer; returns whether it was accepted. Never raises: FLARE would swallow it."""
        site = str(model.meta.get("client_name"))
        with self._lock:
            if answers.closed:
                if task == TRAIN and (behind := self._behind.pop(site, None)) is not None:
                    self._kept[site] = header, model, behind[1]
                self._late(site, task)
                return False
            answers.seconds[site] = round(time.monotonic() - start, 3)
            return self._account(answers, task, header, site, model, on_reply)

    def _account(
        self, answers: Answers, task: str, header: TaskHeader, site: str, model: FLModel, on_reply: OnReply
    ) -> bool:
        """Sort an answer, or refuse it; whether it was accepted."""
        try:
            self._sort(answers, task, header, site, model, on_reply)
        except ExchangeError as error:
            answers.refused[site] = str(error)
        except OSError as error:  # the server's own fault, not the site's: ask() raises it
            self._fault = error
            return False
        except Exception as error:
            self.exception(f"{place(header)}: the answer of {site} could not be read: {error}")
            answers.refused[site] = f"its answer is malformed ({type(error).__name__})"
        for problems, word in ((answers.refused, "refused"), (answers.absent, "no answer from")):
            if site in problems:
                self.warning(f"{place(header)}: {word} {site}: {problems[site]}")
        return site in answers.replies

    def _sort(
        self, answers: Answers, task: str, header: TaskHeader, site: str, model: FLModel, on_reply: OnReply
    ) -> None:
        """Put one answer where it belongs; one to be refused raises :class:`ExchangeError`."""
        reply = Reply.from_meta(model.meta)
        if (reply.round, reply.step) != (header.round, header.step):
            raise ExchangeError(f"it answers round {reply.round}, step {reply.step}, not the open task")
        if site in answers.known:
            raise ExchangeError("the site had answered already")
        self.contract.check_reply(task, reply)
        self.strategy.check_content(reply)
        if reply.status == ERROR:
            answers.absent[site] = reply.reason
        elif reply.status == ABSTAIN:
            answers.abstained[site] = reply.reason
        else:
            params, sends = model.params or {}, self.contract.task(task).sends
            if params and sends == "nothing":
                raise ExchangeError("it sent tensors where only numbers are asked for")
            if params and (model.params_type == ParamsType.DIFF) is not (sends == "difference"):
                raise ExchangeError("it sent whole weights for a difference, or the other way round")
            on_reply(site, reply, params)
            answers.replies[site] = reply
            answers.bytes_up[site] = sum(value.numel() * value.element_size() for value in params.values())

    def _accept_train_result(self, client_name: str, result: Any, fl_ctx: Any, is_unknown_task: bool = False) -> bool:
        code = result.get_return_code()
        if not is_unknown_task and code not in (None, ReturnCode.OK):
            with self._lock:
                self._behind.pop(client_name, None)
                if not self._answers.closed and client_name not in self._answers.known:
                    self._answers.absent[client_name] = f"the site's FLARE answered {code} (see the site's own log)"
        return super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task)

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Any, fl_ctx: Any
    ) -> None:
        """Drop and record a result that came after its task was closed."""
        with self._lock:
            self._late(client.name, task_name)

    def _late(self, site: str, task: str) -> None:
        """Record a late answer; the site is waited for again from now on."""
        does = "waits for the next round" if site in self._kept else "was dropped"
        self.warning(f"a late answer of {site} to task '{task}' {does}")
        self._silent.discard(site)
        if getattr(self, "record", None) is not None:
            self.record.write(Late(time=now(), site=site, task=task))

    # ------------------------------------------------------------------ status
    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Tell ``fedtar status`` and ``nvflare job stats`` how far the run is."""
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if collector is not None:
                collector.add_info(STATS_GROUP, self.progress())

    def progress(self) -> dict[str, Any]:
        """Place in the run and what each site does, as primitives."""
        with self._lock:
            if self._open_task is None:
                return {"task": "", "sites": {}}
            task, header, since, sites = self._open_task
            answers = self._answers
            word = dict.fromkeys(sites, "working")
            word |= dict.fromkeys(answers.replies, "answered") | dict.fromkeys(answers.abstained, "abstained")
            word |= {site: f"absent: {why}" for site, why in answers.absent.items()}
            word |= {site: f"refused: {why}" for site, why in answers.refused.items()}
        return {
            "task": task,
            "round": header.round,
            "rounds": header.rounds,
            "step": header.step,
            "time_steps": header.time_steps,
            "seconds": round(time.monotonic() - since, 1),
            "sites": dict(sorted(word.items())),
        }


def advice(limit: float, slowest: float, missed: int, setting: str = "step_time_limit") -> str | None:
    """One line for the log, or None when the limit (seconds; 0 waits for ever) is fine.

    ``slowest`` is the time to the slowest answer to this kind of task so far (0: there was none); ``missed`` sites did
    not answer in time.
    """
    if not limit or not (slowest or missed):
        return None
    took = f"the slowest answer took {slowest:.0f} s"
    better = math.ceil(ROOM * slowest)
    if missed:
        known = f"; {took}" if slowest else ""
        return (
            f"{missed} site(s) did not answer within {setting} = {limit:g} s{known}. If such a site only works "
            f"slowly, try {max(math.ceil(2 * limit), better)} s"
        )
    if slowest > CLOSE * limit:
        return f"{took} of {setting} = {limit:g} s; {better} s would be safe"
    if limit > WASTEFUL * max(slowest, 1):
        return f"{took} of {setting} = {limit:g} s; consider {max(better, 60)} s"
    return None


def place(header: TaskHeader) -> str:
    """'round 2, step 1', for messages."""
    return f"round {header.round}, step {header.step}"


def now() -> str:
    """The time as ISO 8601 in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _message(header: TaskHeader, weights: Tensors | None) -> FLModel:
    about: dict[str, Any] = {"current_round": header.round, "total_rounds": header.rounds, "meta": header.to_meta()}
    if weights is None:
        return FLModel(metrics={}, **about)
    params = {name: weights[name].float().contiguous() for name in sorted(weights)}  # others cannot be sent
    return FLModel(params=params, params_type=ParamsType.FULL, **about)
