"""``FederatedController``: a run of any method: handshake, initial weights, rounds, checkpoints, resume, record."""

import inspect
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.widgets.info_collector import InfoCollector

from fedtar_flare import registry
from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import StateError, read_json
from fedtar_flare.core.settings import build
from fedtar_flare.protocol.contract import CLOSE_ROUND, TRAIN
from fedtar_flare.protocol.exchange import Tensors, expect_at_most
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.record.events import End
from fedtar_flare.record.log import STATS_GROUP, RunRecord, alarms, utc_now
from fedtar_flare.runtime.aggregation import MAJORITY, limited_shares
from fedtar_flare.runtime.checkpoint import SIMULATED_JOB, Checkpoint, RunCheckpoints
from fedtar_flare.runtime.exchange import POLL_SECONDS, Answers, Exchange, ReplyHandler, RunAborted
from fedtar_flare.runtime.membership import Membership
from fedtar_flare.runtime.results import Results
from fedtar_flare.runtime.server_config import ServerConfig
from fedtar_flare.runtime.training import TrainingStep
from fedtar_flare.site.context import end_unfit_simulator

__all__ = ["FederatedController"]


class FederatedController(ModelController):
    """Runs any method at the server; the method's own part is its :class:`ServerStrategy`.

    Parameters
    ----------
    method : str
        Name of an installed method (:mod:`fedtar_flare.registry`).
    settings : dict, optional
        Groups of the method's settings at the server, by name: ``server``, and those that it shares with the sites.
    **config
        Fields of :class:`~fedtar_flare.runtime.server_config.ServerConfig`.

    Raises
    ------
    ConfigError
        The method is not installed, or a value is not allowed.
    """

    def __init__(self, method: str, settings: dict[str, Any] | None = None, **config: Any):
        end_unfit_simulator(SIMULATED_JOB)
        self.method, self.definition = method, registry.method(method)
        self.contract, self.settings = self.definition.contract, settings
        self.config = build(ServerConfig, config, "server")
        super().__init__(persistor_id="", ignore_result_error=True, task_check_period=POLL_SECONDS)
        self.__dict__.update(self.config.to_dict())  # FLARE exports attributes named as the constructor's parameters
        self.wire_contract = self.contract.allowing(["*"])  # which parameters travel whole is for the sites to say
        self.exchange, self.membership = Exchange(self), Membership(self)
        self.round = self.first_round = 1
        self.origin = ""  # run and version of the sites' state with which a run that is made again begins
        self.strategy = self.definition.server(self)

    # ------------------------------------------------------------------ a run
    def run(self) -> None:
        """Handshake, R rounds of the method's algorithm with a checkpoint after each, closing page."""
        self.record = RunRecord(self.results_folder)
        self.results, self.checkpoints = Results(self), RunCheckpoints(self)
        with self._recorded():
            w = self._begin()
            for r in range(self.first_round, self.config.num_rounds + 1):
                self.round = r
                self.membership.admit_late_sites(w, r)
                w = self.strategy.one_round(w, r)
                self._save(w, r)
        try:
            self.results.finish(self.strategy.numbers())
        except Exception as error:  # the run is whole and saved: a page that cannot be written must not fail it
            self.exception(f"the closing page or box could not be written: {error}")

    def train(self, w: Tensors, r: int, t: int, **about: Any) -> tuple[Tensors | None, Answers]:
        """Have the sites train at step t, and aggregate their updates.

        Parameters
        ----------
        w : mapping of str to Tensor
            Weights to train from.
        r, t : int
            Round and time step.
        **about
            Fields of :class:`.TaskHeader` that the method sets, such as ``alpha``.

        Returns
        -------
        tuple of (dict of str to Tensor or None, Answers)
            The float64 aggregate, by the names of ``w`` and of the strategy's extra tensors; None if no site has an
            update, or none may leave. Who answered what.
        """
        down = {**w, **self.strategy.extra_tensors(w)}
        step = TrainingStep(self, w, down, r)
        with step.updates:
            # 1. Weights go down; each update is checked, brought to one form and stored as it comes.
            header = replace(self.header(r, t, after=version(r, t - 1)), **about)
            answers = self.send_task(TRAIN, header, down, self.strategy.trainers(), step.accept)
            # 2. Late updates of this step of an earlier round join.
            self.exchange.add_late_answers(answers, header, step.accept)
            # 3. A site's share follows from its visits, n_k: no more than it announced in the handshake.
            counts = {}
            for site, reply in answers.replies.items():
                announced = self.strategy.trained_visits(self.membership.visits[site]["train"], r, t)
                counts[site] = min(int(reply.numbers["samples"]), max(1, announced))
            shares = self.shares_of(counts) if counts and self.contract.shares else {}
            # 4. The updates become one.
            aggregate = step.aggregate(shares) if shares else None
            self.results.step(r, t, answers, step.norm)
        return aggregate, answers

    def shares_of(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Weight the sites in a mean as the strategy does, but none of three or more above ``max_share``.

        Parameters
        ----------
        counts : mapping of str to int
            Visits n_k by site.

        Returns
        -------
        dict of str to float
            c_k by site, which sum to one.
        """
        shares, most = self.strategy.shares_of(counts), self.config.max_share
        if len(shares) < MAJORITY or max(shares.values()) <= most:
            return shares
        limited = limited_shares(shares, most)
        for site in limited:
            if shares[site] > most and limited[site] < shares[site]:
                self.results.alarm(f"{site} would have had more than max_share, {most:.0%}, of a mean of the sites")
        return limited

    def close_round(self, w: Tensors, r: int) -> Answers:
        """Have the sites validate the weights after a round, and score them when due.

        Parameters
        ----------
        w : mapping of str to Tensor
        r : int

        Returns
        -------
        Answers
            Validation losses, scores and what the method adds.
        """
        config = self.config
        evaluate = r % (config.rounds_per_period or config.evaluate_every) == 0 or r == config.num_rounds

        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            if "validation_loss" in reply.numbers:
                most = max(1, sum(self.membership.visits[site]["validation"]))
                reply.numbers["reports"] = min(int(reply.numbers.get("reports", 0)), most)

        header = self.header(r, config.time_steps, after=version(r, config.time_steps), evaluate=evaluate)
        answers = self.send_task(CLOSE_ROUND, header, w, self.membership.sites, accept)
        self.results.validation(r, answers)
        self.results.evaluation(r, answers, self.membership.unlearnt_periods(r))
        return answers

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
        """Send one task to sites and hand each good answer to ``on_reply`` as it comes.

        Sites in ``server.unseen`` come after the others, and are scored on all of their patients.

        Parameters
        ----------
        task : str
        header : TaskHeader
        weights : mapping of str to Tensor or None
            Go down in float32 in a task whose contract sends any.
        sites : sequence of str
            Those that are connected get the task.
        on_reply : callable
            Takes site, reply and tensors, one call at a time; raises ExchangeError to refuse the answer.
        time_limit, min_sites : int, optional
            In place of ``step_time_limit`` (seconds) and ``min_sites``.

        Returns
        -------
        Answers

        Raises
        ------
        RunAborted, FedTARError, OSError
            The job was aborted; fewer than ``min_sites`` took part; the server could not store an answer.
        """
        unseen = [site for site in sites if site in self.config.unseen]
        members = [site for site in sites if site not in unseen]
        answers = self.exchange.send_task(task, header, weights, members, on_reply, time_limit, min_sites)
        if unseen and (task != CLOSE_ROUND or header.evaluate):
            header = replace(header, score="all")
            answers.add(self.exchange.send_task(task, header, weights, unseen, on_reply, time_limit, min_sites=0))
        return answers

    def header(self, r: int, t: int, after: str, evaluate: bool = False) -> TaskHeader:
        """Make the header of a task.

        Parameters
        ----------
        r, t : int
        after : str
            Version of the site's state that the task begins from (:func:`fedtar_flare.protocol.messages.version`).
        evaluate : bool
            Whether test patients are scored.

        Returns
        -------
        TaskHeader
        """
        return TaskHeader(
            method=self.method,
            run_id=self.run_id,
            round=r,
            step=t,
            rounds=self.config.num_rounds,
            time_steps=self.config.time_steps,
            after=after,
            evaluate=evaluate,
            keep=version(self.results.best, self.config.time_steps) if self.results.best else "",
            rounds_per_period=self.config.rounds_per_period,
        )

    # ------------------------------------------------------------------ begin, save and resume
    def _begin(self) -> Tensors:
        """Handshake: agree on the exchange and return the weights to start from."""
        # 1. A resumed run goes on with its checkpoint; else the weights may come from a file.
        config, w, resumed = self.config, None, None
        self.run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        if config.resume_from:
            resumed, problems = self.checkpoints.resumed(self._fixed_settings(), config.remake_before)
            for problem in problems:
                self.warning(f"passed over: {problem}")
            info, w = resumed.info, resumed.weights
            self.first_round = resumed.round + 1
            if config.remake_before:
                self.origin = f"{info['run_id']}/{version(resumed.round, config.time_steps)}"
            else:
                self.run_id = info["run_id"]
            self.membership.resumed = set(info.get("members", ()))
            self.membership.steps_before = info["settings"]["time_steps"]
            self.strategy.load_info(info.get("method"))
            self.strategy.load_state(resumed.method)
            comparable = self.membership.steps_before == config.time_steps and not self.origin
            self.results.restore(info, comparable)  # the best round so far may be one that is made again
            try:
                best = self.checkpoints.best(resumed, self.results.best)
            except StateError as error:  # then the resumed round is the best so far
                self.warning(f"passed over: {error}")
                self.results.restore(info, comparable=False)
                best = resumed
        elif config.initial_checkpoint:
            w = self.checkpoints.initial(config.initial_checkpoint)
        # 2. The handshake, with which the record begins.
        w, answers = self.membership.gather(w)
        expect_at_most(self.strategy.largest_message())
        settings = self._fixed_settings() | {"min_sites": config.min_sites}
        for file in sorted(Path(self.get_run_dir()).glob("app*/config/config_fed_client.json"))[:1]:
            executor = read_json(file)["executors"][0]["executor"]
            settings["sites"] = executor.get("args", {}).get("settings") or {}
        self.results.start(
            self.membership.schema,
            answers,
            method=self.method,
            run_id=self.run_id,
            first_round=self.first_round,
            rounds=config.num_rounds,
            time_steps=config.time_steps,
            settings=settings,
        )
        if not self.membership.members:
            raise FedTARError("every site that takes part is named in server.unseen: there is nobody to train")
        self.strategy.on_start()
        self.results.evaluation(self.first_round - 1, answers, self.membership.unlearnt_periods(self.first_round - 1))
        # 3. The resumed run's checkpoints become this job's.
        if resumed:
            self.checkpoints.carry_over(resumed, best)
            if self.contract.shares:
                self.results.adapter(best.weights, best.round)
        return w

    def _fixed_settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share."""
        return {"method": self.method} | self.config.fixed() | self.strategy.fixed_settings()

    def _save(self, w: Tensors, r: int) -> None:
        """Checkpoint after a whole round; the best one by validation loss also becomes ``adapter/``."""
        membership, best = self.membership, self.results.is_best(r)
        info = {
            "run_id": self.run_id,
            "schema": membership.schema.to_dict(),
            "settings": self._fixed_settings(),
            "members": sorted({*membership.resumed, *membership.sites}),
        }
        if (state := self.strategy.info()) is not None:
            info["method"] = state
        self.checkpoints.save(Checkpoint(r, w, self.strategy.state(), info | self.results.progress()), best=best)
        if best and self.contract.shares:
            self.results.adapter(w, r)

    # ------------------------------------------------------------------ record
    @property
    def results_folder(self) -> Path:
        """``<server run folder>/fedtar``."""
        return Path(self.get_run_dir()) / "fedtar"

    def scalar(self, tag: str, value: float | None, step: int) -> None:
        """Draw one point of a curve in the server's TensorBoard.

        Parameters
        ----------
        tag : str
        value : float or None
            None and non-finite values are left out.
        step : int
        """
        if value is not None and math.isfinite(value):
            dxo = create_analytic_dxo(tag, float(value), AnalyticsDataType.SCALAR, global_step=int(step))
            send_analytic_dxo(self, dxo, self.fl_ctx)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Always write the ``end`` event; an error of this package ends the job with its one-line reason."""
        start, status, reason = time.monotonic(), "", ""
        try:
            yield
            status, reason = "completed", self.results.nothing_learnt()
        except RunAborted:
            status, reason = "aborted", "the job was aborted"
            self.warning("the job was aborted: stopped without saving the running round")
        except FedTARError as error:
            status, reason = "failed", str(error)
            for line in reason.splitlines():
                self.error(line)
        except OSError as error:
            status, reason = "failed", f"the server could not write its results ({error.strerror or error}). The last "
            reason += "whole checkpoint stays; make room or mend the disk, then resume the job"
            self.error(f"{reason}: {error}")
        except Exception as error:
            status, reason = "failed", f"unexpected {type(error).__name__}"
            raise
        finally:
            seconds = round(time.monotonic() - start, 1)
            with suppress(OSError):  # on a full disk the log still has the reason
                if status:  # a process that is killed has no say
                    self.record.write(End(time=utc_now(), seconds=seconds, status=status, reason=reason))
        if status == "failed":  # the record has the reason before FLARE ends the job
            self.panic(reason)

    # ------------------------------------------------------------------ what FLARE calls
    def handle_event(self, event_type: str, fl_ctx: Any) -> None:  # `fedtar status`, `nvflare job stats`: how far it is
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if collector is not None:
                losses = self.results.losses() if hasattr(self, "results") else {}
                more = {"validation_loss": losses, "numbers": self.strategy.numbers()}
                more["alarms"] = alarms(Path(self.get_run_dir()).parent)
                collector.add_info(STATS_GROUP, self.exchange.progress() | more)

    def _accept_train_result(self, client_name: str, result: Any, fl_ctx: Any, is_unknown_task: bool = False) -> bool:
        code = result.get_return_code()
        if not is_unknown_task and code not in (None, ReturnCode.OK):
            self.exchange.note_failure(client_name, code)
        return super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task)

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Any, fl_ctx: Any
    ) -> None:  # it came after its task was closed
        self.exchange.note_late(client.name, task_name)


# FLARE finds the parameters of a component, and the defaults that it need not export, in the signature
_PARAMETERS = {name: field.default for name, field in ServerConfig.model_fields.items()} | {"settings": None}
FederatedController.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "method")]
    + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in _PARAMETERS.items()]
)
