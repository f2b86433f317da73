"""Base of every method's controller: ask the live sites, take each answer as it comes, account for who did not answer.

FLARE's own waiting has traps that this file closes once for all methods: one failing site must not end the job, the
quickest sites must not shut out the others, an aborted job must stop at once, a late or foreign answer must never be
counted, and memory must not grow with the number of sites.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.fl_constant import ReturnCode
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.widgets.info_collector import InfoCollector

from fedtar_flare.errors import ConfigError, ExchangeError, FedTARError
from fedtar_flare.flare.checkpoint import KEPT
from fedtar_flare.flare.scalars import send_scalar
from fedtar_flare.flare.time_limit import advice
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, Reply, TaskHeader
from fedtar_flare.protocol.tensors import register_tensors
from fedtar_flare.record.log import STATS_GROUP, RunRecord

register_tensors()

Tensors = Mapping[str, torch.Tensor]
SIMULATED_JOB = "simulate_job"
"""FLARE's id of every job in the simulator."""

POLL_SECONDS = 0.02
"""How often standing tasks and the abort signal are looked at."""


class RunAborted(Exception):
    """The job was aborted: unwind without saving anything."""


@dataclass
class Answers:
    """Who answered what to one task. Every asked site is in exactly one of the first four.

    Args:
        replies: sites that answered ``ok`` and were accepted.
        abstained: site to its reason (it has nothing to add at this step).
        refused: site to the reason why its answer was not accepted.
        absent: site to the reason why there is no answer (error at the site, time limit, disconnected).
        seconds: site to the time until its answer came.
        bytes_up: site to the bytes of its tensors.
    """

    replies: dict[str, Reply] = field(default_factory=dict)
    abstained: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)

    @property
    def heard(self) -> int:
        """How many sites took part: accepted or abstaining."""
        return len(self.replies) + len(self.abstained)


OnReply = Callable[[str, Reply, Tensors], None]


class MethodController(ModelController):
    """What every method's controller shares; a method implements ``run()`` with :meth:`ask`.

    Args:
        min_sites: a task to which fewer sites answer (abstaining counts as an answer) stops the job.
        step_time_limit: seconds that a site has for one task; 0 waits for ever. A site that is late once is not
            waited for again until it has answered something.
    """

    def __init__(self, min_sites: int = 1, step_time_limit: int = 3600):
        super().__init__(persistor_id="", ignore_result_error=True, task_check_period=POLL_SECONDS)
        if min_sites < 1:
            raise ConfigError(f"min_sites must be at least 1, not {min_sites}")
        if step_time_limit < 0:
            raise ConfigError(f"step_time_limit must be 0 (none) or a number of seconds, not {step_time_limit}")
        self.min_sites = min_sites
        self.step_time_limit = step_time_limit
        self._lock = threading.Lock()
        self._answers = Answers()
        self._silent: set[str] = set()
        self._slowest: dict[str, float] = {}
        self._advised: set[tuple[str, bool]] = set()
        self._too_late = f"no answer within {step_time_limit} s"
        self._open_task: tuple[str, TaskHeader, float, list[str]] | None = None

    # ------------------------------------------------------------------ sites
    def live_sites(self) -> list[str]:
        """Names of the sites that are connected now, sorted."""
        names = sorted(client.name for client in self.engine.get_clients())
        return [name for name in names if not self.get_client_disconnect_time(name)]

    # ------------------------------------------------------------------ tasks
    def ask(
        self,
        task: str,
        order: TaskHeader,
        weights: Tensors | None,
        sites: Sequence[str],
        on_reply: OnReply,
        dtype_up: str = "float32",
    ) -> Answers:
        """Send one task to the given sites and hand each good answer to ``on_reply`` as it comes.

        Args:
            task: name of a task of the method's contract.
            order: header of the task.
            weights: tensors that go down in float32, or None.
            sites: who is asked; those disconnected meanwhile become absent.
            on_reply: called once per site with its reply and tensors, one call at a time; raises
                :class:`ExchangeError` to refuse the answer.
            dtype_up: for the record only.

        Returns:
            the account of all asked sites.

        Raises:
            RunAborted: the job was aborted.
            FedTARError: fewer than ``min_sites`` took part.
        """
        answers = self._answers = Answers()
        start = time.monotonic()
        live = set(self.live_sites())
        answers.absent.update({site: "disconnected" for site in sites if site not in live})
        targets = [site for site in sites if site in live]
        self._open_task = (task, order, start, targets)
        if targets:
            limit = self.step_time_limit
            self.send_model(
                task_name=task,
                data=_message(order, weights),
                targets=targets,
                min_responses=0,
                timeout=limit,
                callback=lambda model: self._take(answers, order, model, on_reply, start),
            )
            while self.get_num_standing_tasks():
                self.stop_if_aborted()
                if limit and self._only_silent_left(answers, targets):
                    self.cancel_all_tasks()
                time.sleep(POLL_SECONDS)
        self.stop_if_aborted()
        with self._lock:
            known = {*answers.replies, *answers.abstained, *answers.refused, *answers.absent}
            for site in targets:
                if site in known:
                    self._silent.discard(site)
                else:
                    if self.get_client_disconnect_time(site):
                        answers.absent[site] = "disconnected while it had the task"
                    elif site in self._silent:
                        answers.absent[site] = "still silent; not waited for again"
                    else:
                        answers.absent[site] = self._too_late
                    self._silent.add(site)
        self._advise(task, answers)
        if answers.heard < self.min_sites:
            raise FedTARError(
                f"task '{task}' of round {order.round}, step {order.step}: {answers.heard} site(s) took part, "
                f"min_sites is {self.min_sites}. " + "; ".join(f"{s}: {why}" for s, why in _problems(answers))
            )
        return answers

    def _advise(self, task: str, answers: Answers) -> None:
        """Say in the log when the time limit does not fit what was seen; the same advice once."""
        seen = [self._slowest.get(task, 0.0), *answers.seconds.values()]
        self._slowest[task] = max(seen)
        missed = sum(why == self._too_late for why in answers.absent.values())
        line = advice(self.step_time_limit, self._slowest[task] or None, missed)
        kind = (task, missed > 0)
        if line and kind not in self._advised:
            self._advised.add(kind)
            self.info(f"task '{task}': {line}")

    def stop_if_aborted(self) -> None:
        """Raise :class:`RunAborted` when the job was aborted."""
        if self.abort_signal.triggered:
            raise RunAborted

    def _only_silent_left(self, answers: Answers, targets: Sequence[str]) -> bool:
        with self._lock:
            known = {*answers.replies, *answers.abstained, *answers.refused, *answers.absent}
            waiting = [site for site in targets if site not in known]
        return bool(waiting) and len(waiting) < len(targets) and all(site in self._silent for site in waiting)

    def _take(self, answers: Answers, order: TaskHeader, model: FLModel, on_reply: OnReply, start: float) -> bool:
        """One answer has come: check whose and which it is, then hand it on. Returns whether it was accepted."""
        site = str(model.meta.get("client_name"))
        with self._lock:
            answers.seconds[site] = round(time.monotonic() - start, 3)
            try:
                reply = Reply.from_meta(model.meta)
                if answers is not self._answers or (reply.round, reply.step) != (order.round, order.step):
                    raise ExchangeError(f"it answers round {reply.round}, step {reply.step}, not the open task")
                if site in answers.replies or site in answers.abstained:
                    raise ExchangeError("the site had answered already")
                if reply.status == ERROR:
                    answers.absent[site] = reply.reason
                elif reply.status == ABSTAIN:
                    answers.abstained[site] = reply.reason
                else:
                    params = model.params or {}
                    on_reply(site, reply, params)
                    answers.replies[site] = reply
                    answers.bytes_up[site] = sum(v.numel() * v.element_size() for v in params.values())
            except ExchangeError as error:
                answers.refused[site] = str(error)
            for problems, word in ((answers.refused, "refused"), (answers.absent, "no answer from")):
                if site in problems:
                    self.warning(f"{order_name(order)}: {word} {site}: {problems[site]}")
            return site in answers.replies

    def _accept_train_result(self, client_name: str, result: Any, fl_ctx: Any, is_unknown_task: bool = False) -> bool:
        code = result.get_return_code()
        if not is_unknown_task and code not in (None, ReturnCode.OK):
            with self._lock:
                self._answers.absent[client_name] = f"the site's FLARE answered {code} (see the site's own log)"
        return super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task)

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Any, fl_ctx: Any
    ) -> None:
        """A result that came after its task was closed is dropped and said so."""
        self.warning(f"a late answer of {client.name} to task '{task_name}' was dropped")
        if (record := getattr(self, "record", None)) is not None:
            record.write("late", time=now(), site=client.name, task=task_name)
        with self._lock:
            self._silent.discard(client.name)

    # ------------------------------------------------------------------ status
    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Tell an administrator who asks (``fedtar status``, ``nvflare job stats``) how far the run is."""
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if collector is not None:
                collector.add_info(STATS_GROUP, self.progress())

    def progress(self) -> dict[str, Any]:
        """Place in the run and what each site does, as primitives; a method adds its own numbers."""
        if self._open_task is None:
            return {"task": "", "sites": {}}
        with self._lock:
            task, order, since, sites = self._open_task
            answers = self._answers
            word = dict.fromkeys(sites, "working")
            word |= dict.fromkeys(answers.replies, "answered") | dict.fromkeys(answers.abstained, "abstained")
            word |= {site: f"absent: {why}" for site, why in answers.absent.items()}
            word |= {site: f"refused: {why}" for site, why in answers.refused.items()}
        return {
            "task": task,
            "round": order.round,
            "rounds": order.rounds,
            "step": order.step,
            "time_steps": order.time_steps,
            "seconds": round(time.monotonic() - since, 1),
            "sites": dict(sorted(word.items())),
        }

    # ------------------------------------------------------------------ record
    def checkpoint_folders(self) -> list[Path]:
        """Where checkpoints go: with the results, and in the server's kit by the job's id, where they stay.

        FLARE takes the run folder away when a job ends, and a server that was killed leaves no results to download:
        the copy in the kit is what a resumed job starts from. The simulator has no kit.
        """
        folders = [self.results_folder / "checkpoint"]
        job = self.fl_ctx.get_job_id()
        if job and job != SIMULATED_JOB:
            folders.append(self._kept(job))
        return folders

    def resume_folder(self, resume_from: str) -> Path:
        """The folder that ``resume_from`` names: a path at the server, or the id of a job that ran there.

        Raises:
            FedTARError: this server has no checkpoint of that job.
        """
        if not re.fullmatch(r"[0-9A-Za-z-]+", resume_from):
            return Path(resume_from)
        folder = self._kept(resume_from)
        if not folder.is_dir():
            raise FedTARError(f"no checkpoint of job {resume_from} at this server: it ended before its first round did")
        return folder

    def _kept(self, job: str) -> Path:
        return Path(self.get_run_dir()).parent / KEPT / job

    def scalar(self, tag: str, value: float | None, step: int) -> None:
        """One point of a curve in the server's TensorBoard."""
        send_scalar(self, self.fl_ctx, tag, value, step)

    @property
    def results_folder(self) -> Path:
        """``<server run folder>/fedtar``."""
        return Path(self.get_run_dir()) / "fedtar"

    @contextmanager
    def recorded(self, record: RunRecord) -> Any:
        """Write the ``end`` event whatever happens; an error of ours ends the job with its one-line reason."""
        start = time.monotonic()

        def end(status: str, reason: str = "") -> None:
            seconds = round(time.monotonic() - start, 1)
            with suppress(OSError):  # on a full disk the log still has the reason
                record.write("end", time=now(), seconds=seconds, status=status, reason=reason)

        try:
            yield
        except RunAborted:
            end("aborted", "the job was aborted")
            self.warning("the job was aborted: stopped without saving the running round")
        except FedTARError as error:
            end("failed", str(error))
            for line in str(error).splitlines():
                self.error(line)
            self.panic(str(error))
        except OSError as error:
            reason = (
                f"the server could not write its results ({error.strerror or error}). The last whole checkpoint stays; "
                "make room or mend the disk, then resume the job"
            )
            end("failed", reason)
            self.error(f"{reason}: {error}")
            self.panic(reason)
        except Exception as error:
            end("failed", f"unexpected {type(error).__name__}")
            raise
        else:
            end("completed")


def order_name(order: TaskHeader) -> str:
    """'round 2, step 1', for messages."""
    return f"round {order.round}, step {order.step}"


def now() -> str:
    """The time as ISO 8601 in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _problems(answers: Answers) -> list[tuple[str, str]]:
    return sorted([*answers.absent.items(), *((s, f"refused: {why}") for s, why in answers.refused.items())])


def _message(order: TaskHeader, weights: Tensors | None) -> FLModel:
    meta = order.to_meta()
    if weights is None:
        return FLModel(metrics={}, current_round=order.round, total_rounds=order.rounds, meta=meta)
    params = {name: weights[name].float() for name in sorted(weights)}
    return FLModel(
        params=params, params_type=ParamsType.FULL, current_round=order.round, total_rounds=order.rounds, meta=meta
    )
