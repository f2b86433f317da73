"""``Exchange``: send a task to the live sites, take each answer as it comes, account for sites that do not answer.

FLARE's own waiting has traps that this module closes for all methods: one failing site must not end the job, quick
sites must not shut out slow ones, an aborted job must stop at once, a late or foreign answer must never be counted, and
memory must not grow with the number of sites.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedtar_flare.core.errors import ExchangeError, FedTARError
from fedtar_flare.core.log_fields import POSITION
from fedtar_flare.protocol.contract import TRAIN
from fedtar_flare.protocol.exchange import Tensors, register_tensors
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, Reply, TaskHeader, check_reply
from fedtar_flare.record.events import Late
from fedtar_flare.record.log import utc_now

__all__ = ["Answers"]

register_tensors()

POLL_SECONDS = 0.02
"""Interval at which standing tasks and the abort signal are checked."""
STILL_WORKING = "still at work; its answer may enter a later round"


class RunAborted(Exception):
    """The job was aborted: nothing of the running round is saved."""


@dataclass
class Answers:
    """Who answered what to one task; each site that got it is in exactly one of the first four dictionaries."""

    replies: dict[str, Reply] = field(default_factory=dict)
    """Accepted answers by site."""
    abstained: dict[str, str] = field(default_factory=dict)
    """Sites that take part and have no update at this step, with the reason."""
    refused: dict[str, str] = field(default_factory=dict)
    """Sites whose answer was not accepted, with the reason."""
    absent: dict[str, str] = field(default_factory=dict)
    """Sites that failed, missed the time limit or were disconnected, with the reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds until a site's answer came."""
    bytes_up: dict[str, int] = field(default_factory=dict)
    """Size of a site's tensors."""
    bytes_down: int = 0
    """Size of the tensors that were sent, summed over the sites."""
    closed: bool = False
    """Whether the task is over; any further answer is late."""

    @property
    def count(self) -> int:
        """Number of sites that took part: their answer was accepted, or they abstained."""
        return len(self.replies) + len(self.abstained)

    @property
    def missing(self) -> dict[str, str]:
        """Sites without an accepted answer, with the reason."""
        return self.abstained | self.absent | self.refused

    def __contains__(self, site: str) -> bool:
        """Whether a site is accounted for."""
        return site in self.replies or site in self.abstained or site in self.refused or site in self.absent

    def add(self, more: Answers) -> None:
        """Merge in the answers of other sites to the same task.

        Parameters
        ----------
        more : Answers
        """
        for name in ("replies", "abstained", "refused", "absent", "seconds", "bytes_up"):
            getattr(self, name).update(getattr(more, name))
        self.bytes_down += more.bytes_down


ReplyHandler = Callable[[str, Reply, Tensors], None]
"""Takes a site's name, reply and tensors; raises :class:`ExchangeError` to refuse the answer."""


class Exchange:
    """Sends tasks and accounts for the answers; ``run`` is the controller, through which messages go.

    With ``wait_seconds`` a training task goes on without its slow sites, but stays open, since FLARE's client drops the
    answer to a closed one. They get no other task until :meth:`add_late_answers` adds theirs to a later round.
    """

    def __init__(self, run: Any):
        self.run = run
        self.silent: set[str] = set()
        """Sites that missed a time limit and have answered nothing since."""
        self.left_out: dict[str, str] = {}
        """Sites that no task goes to, with the reason, for the status."""
        self._lock = threading.RLock()  # FLARE hands over answers in threads of its own
        self._answers = Answers(closed=True)
        self._open_task: tuple[str, TaskHeader, float, list[str]] | None = None
        self._working: dict[str, tuple[float, Tensors]] = {}
        """Sites still at work on a training task that went on without them: its deadline, and what it sent down."""
        self._late: dict[tuple[str, int], tuple[TaskHeader, FLModel, Tensors]] = {}
        """Their answers that wait for this step of a later round, with the task's header and what it sent down."""
        self._fault: Exception | None = None
        self._last_answer: dict[str, float] = {}
        self._bytes = {"down": 0, "up": 0}

    def live_sites(self) -> list[str]:
        """Names of the sites that are connected now, sorted."""
        names = sorted(client.name for client in self.run.engine.get_clients())
        return [name for name in names if not self.run.get_client_disconnect_time(name)]

    def send_task(
        self,
        task: str,
        header: TaskHeader,
        weights: Tensors | None,
        sites: Sequence[str],
        on_reply: ReplyHandler,
        time_limit: int | None = None,
        min_sites: int | None = None,
    ) -> Answers:
        """As :meth:`FederatedController.send_task`, for sites of one kind."""
        config = self.run.config
        limit = config.step_time_limit if time_limit is None else time_limit
        least = config.min_sites if min_sites is None else min_sites

        # 1. Wait until enough sites are free of an earlier training task; all of them for the last scores.
        last_scores = task != TRAIN and header.round == header.rounds
        while self._working and (working := self._still_working()):
            if not last_scores and len({*sites} & {*self.live_sites()} - working) >= least:
                break
            self.stop_if_aborted()
            time.sleep(POLL_SECONDS)
        start, live, answers, targets = time.monotonic(), self.live_sites(), Answers(), list[str]()
        for site in sites:
            if site in self._working:
                answers.absent[site] = STILL_WORKING
            elif site not in live:
                answers.absent[site] = "disconnected"
            else:
                targets.append(site)
        with self._lock:
            self._answers, self._open_task = answers, (task, header, start, targets)
        POSITION.update(run=header.run_id, round=header.round, step=header.step, task=task)

        # 2. Send it to these, and take their answers until all have come or the time is up.
        weights = weights or {} if self.run.contract.task(task).down else {}
        if targets:
            answers.bytes_down = 4 * sum(map(torch.numel, weights.values())) * len(targets)
            self._bytes["down"] += answers.bytes_down
            receive = partial(self._receive, answers, task, header, on_reply, start)
            message = _message(header, weights)
            self.run.send_model(
                task_name=task, data=message, targets=targets, min_responses=0, timeout=limit, callback=receive
            )
            while self.run.get_num_standing_tasks() and not self._is_over(task, answers, targets, start, limit):
                time.sleep(POLL_SECONDS)
        self.stop_if_aborted()

        # 3. Account for those that did not answer; enough must have taken part.
        self._close(task, answers, targets, start, limit, weights)
        if answers.count < least:
            problems = answers.absent | {site: f"refused: {why}" for site, why in answers.refused.items()}
            raise FedTARError(
                f"task '{task}' of {_position(header)}: {answers.count} site(s) took part, min_sites is {least}. "
                + "; ".join(f"{site}: {why}" for site, why in sorted(problems.items()))
                + " (--min-sites lets a run go on with fewer)"
            )
        return answers

    def add_late_answers(self, answers: Answers, header: TaskHeader, on_reply: Callable[..., None]) -> None:
        """Add late answers to this step of an earlier round, with what it ``sent``, of sites that have no other."""
        for site, step in sorted(self._late):
            late, model, sent = self._late[site, step]
            if step == header.step and late.round < header.round:
                del self._late[site, step]
                answers.absent.pop(site, None)
                if site not in answers:
                    self._sort(answers, TRAIN, late, site, model, partial(on_reply, sent=sent))
                    continue
                self.run.warning(f"{_position(late)}: the late answer of {site} is left out: it has a newer one")

    def stop_if_aborted(self) -> None:
        """Raise :class:`RunAborted` when the job was aborted."""
        if self.run.abort_signal.triggered:
            raise RunAborted

    # ------------------------------------------------------------------ waiting
    def _still_working(self) -> set[str]:
        """Sites that have an earlier training task still; others are forgotten."""
        with self._lock:
            for site, (deadline, _) in [*self._working.items()]:
                if time.monotonic() > deadline or self.run.get_client_disconnect_time(site):
                    del self._working[site]
            return set(self._working)

    def _is_over(self, task: str, answers: Answers, targets: Sequence[str], start: float, limit: float) -> bool:
        """Whether a task ends though FLARE has open ones; cancels them where only silent sites or a fault are left."""
        self.stop_if_aborted()
        seconds, wait = time.monotonic() - start, self.run.config.wait_seconds
        with self._lock:
            unanswered = [site for site in targets if site not in answers]
            if task == TRAIN and 0 < wait < seconds and answers.count >= self.run.config.min_sites:
                return True
            connected = [site for site in unanswered if not self.run.get_client_disconnect_time(site)]
            if wait and (not connected or 0 < limit < seconds):
                return True
            only_silent = bool(unanswered) and len(unanswered) < len(targets) and self.silent.issuperset(unanswered)
        if self._fault is not None or (limit and only_silent):
            self.run.cancel_all_tasks()
            self._working.clear()
        return False

    def _close(
        self, task: str, answers: Answers, targets: Sequence[str], start: float, limit: float, weights: Tensors
    ) -> None:
        """Account for the sites that have not answered."""
        seconds, standing = time.monotonic() - start, self.run.get_num_standing_tasks()  # a cancelled task is over
        at_work = task == TRAIN and standing > 0 and not 0 < limit <= seconds
        with self._lock:
            answers.closed = True
            if self._fault is not None:
                raise self._fault
            for site in targets:
                if site in answers:
                    self.silent.discard(site)
                elif self.run.get_client_disconnect_time(site):
                    answers.absent[site] = "disconnected while it had the task"
                    self.silent.add(site)
                elif self.run.config.wait_seconds and at_work:
                    answers.absent[site] = STILL_WORKING
                    self._working[site] = start + (limit or math.inf), weights
                else:
                    late = f"no answer within {limit} s"
                    answers.absent[site] = "still silent; not waited for again" if site in self.silent else late
                    self.silent.add(site)

    # ------------------------------------------------------------------ an answer
    def _receive(
        self, answers: Answers, task: str, header: TaskHeader, on_reply: ReplyHandler, start: float, model: FLModel
    ) -> bool:
        """Take a site's answer from FLARE; returns whether it was accepted. Never raises: FLARE would swallow it."""
        site = str(model.meta.get("client_name"))
        with self._lock:
            if not answers.closed:
                answers.seconds[site] = round(time.monotonic() - start, 3)
                return self._sort(answers, task, header, site, model, on_reply)
            working = self._working.pop(site, None) if task == TRAIN else None
            if working is not None:
                self._late[site, header.step] = header, model, working[1]
            self.note_late(site, task, "was dropped" if working is None else "waits for the next round")
            return False

    def _sort(
        self, answers: Answers, task: str, header: TaskHeader, site: str, model: FLModel, on_reply: ReplyHandler
    ) -> bool:
        """Check an answer and put it where it belongs; returns whether it was accepted."""
        try:
            # 1. It answers the open task once, with what the contract and the method let it say.
            reply = Reply.from_meta(model.meta)
            unread = reply.status == ERROR and reply.round < 0  # a site of another release could not read the task
            if not unread and (reply.round, reply.step) != (header.round, header.step):
                raise ExchangeError(f"it answers round {reply.round}, step {reply.step}, not the open task")
            if site in answers:
                raise ExchangeError("the site had answered already")
            check_reply(self.run.contract, task, reply)
            self.run.strategy.check_content(reply)
            if reply.status == ERROR:
                answers.absent[site] = reply.reason
            elif reply.status == ABSTAIN:
                answers.abstained[site] = reply.reason
            else:
                # 2. Its tensors are of the kind that the task asks for, and are taken in.
                params, sends = model.params or {}, self.run.contract.task(task).sends
                if params and sends == "nothing":
                    raise ExchangeError("it sent tensors where only numbers are asked for")
                if params and (model.params_type == ParamsType.DIFF) is not (sends == "difference"):
                    raise ExchangeError("it sent whole weights for a difference, or the other way round")
                on_reply(site, reply, params)
                answers.replies[site] = reply
                answers.bytes_up[site] = sum(map(attrgetter("nbytes"), params.values()))
                self._bytes["up"] += answers.bytes_up[site]
                self._last_answer[site] = time.time()
        except ExchangeError as error:
            answers.refused[site] = str(error)
        except OSError as error:  # the server's own fault, not the site's: _close raises it
            self._fault = error
            return False
        except Exception as error:
            self.run.exception(f"{_position(header)}: the answer of {site} could not be read: {error}")
            answers.refused[site] = f"its answer is malformed ({type(error).__name__})"
        if site in answers.refused:
            self.run.warning(f"{_position(header)}: refused {site}: {answers.refused[site]}")
        if site in answers.absent:
            self.run.warning(f"{_position(header)}: no answer from {site}: {answers.absent[site]}")
        return site in answers.replies

    def note_failure(self, site: str, code: str) -> None:
        """Account for a site whose FLARE, not this package, says that its task failed."""
        with self._lock:
            self._working.pop(site, None)
            if not self._answers.closed and site not in self._answers:
                self._answers.absent[site] = f"the site's FLARE answered {code} (see the site's own log)"

    def note_late(self, site: str, task: str, does: str = "was dropped") -> None:
        """Record an answer that came after its task was closed; the site names the task, so it may be any text."""
        if task not in self.run.contract.task_names:
            return
        with self._lock:
            self.run.warning(f"a late answer of {site} to task '{task}' {does}")
            self.silent.discard(site)
            if hasattr(self.run, "record"):  # there is none before the run has begun
                self.run.record.write(Late(time=utc_now(), site=site, task=task))

    # ------------------------------------------------------------------ status
    def progress(self) -> dict[str, Any]:
        """Position in the run and what each site does, as primitives."""
        with self._lock:
            if self._open_task is None:
                return {"task": "", "sites": {}}
            (task, header, since, sites), answers = self._open_task, self._answers
            status = {site: f"absent: {why}" for site, why in self.left_out.items()} | dict.fromkeys(sites, "working")
            status |= dict.fromkeys(answers.replies, "answered") | dict.fromkeys(answers.abstained, "abstained")
            status |= {site: f"absent: {why}" for site, why in answers.absent.items()}
            status |= {site: f"refused: {why}" for site, why in answers.refused.items()}
        return {
            "task": task,
            "round": header.round,
            "rounds": header.rounds,
            "step": header.step,
            "time_steps": header.time_steps,
            "seconds": round(time.monotonic() - since, 1),
            "sites": dict(sorted(status.items())),
            "last_answer": dict(self._last_answer),
            "bytes": dict(self._bytes),
        }


def _position(header: TaskHeader) -> str:
    return f"round {header.round}, step {header.step}"


def _message(header: TaskHeader, weights: Tensors) -> FLModel:
    """A task for FLARE; weights go down in float32."""
    about: dict[str, Any] = {"current_round": header.round, "total_rounds": header.rounds, "meta": header.to_meta()}
    params = {name: weights[name].float().contiguous() for name in sorted(weights)}  # others cannot be sent
    return FLModel(params=params, params_type=ParamsType.FULL, **about) if params else FLModel(metrics={}, **about)
