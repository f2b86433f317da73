"""``FederatedController``: a run of any method: handshake, initial weights, rounds, checkpoints, resume, record."""

import inspect
import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from fedtar_flare import registry
from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import read_json
from fedtar_flare.core.globs import matches
from fedtar_flare.core.settings import build
from fedtar_flare.protocol.exchange import WIRE_DTYPES, Tensors, check_update_size, euclidean_norm, expect_at_most
from fedtar_flare.protocol.lora_ranks import padded, sent_shapes
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, TRAIN
from fedtar_flare.record.events import End
from fedtar_flare.record.log import RunRecord
from fedtar_flare.runtime.aggregation import (
    MAJORITY,
    SpilledUpdates,
    rescaled,
    with_ceiling,
    work_of,
)
from fedtar_flare.runtime.alarms import alarms
from fedtar_flare.runtime.checkpoint import SIMULATED_JOB, Checkpoint, RunCheckpoints
from fedtar_flare.runtime.handshaking import HandshakeController
from fedtar_flare.runtime.lora_mean import ProductMean, gap
from fedtar_flare.runtime.results import Results
from fedtar_flare.runtime.scalars import send_scalar
from fedtar_flare.runtime.server_config import ServerConfig
from fedtar_flare.runtime.tasking import Answers, RunAborted, now
from fedtar_flare.site.context import check_workspace, hush_simulator

logger = logging.getLogger(__name__)


class FederatedController(HandshakeController):
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
        _in_simulator()
        self.method, self.definition = method, registry.method(method)
        self.contract, self.settings = self.definition.contract, settings
        self.config = build(ServerConfig, config, "server")
        super().__init__()
        self.__dict__.update(self.config.to_dict())  # FLARE exports attributes named as the constructor's parameters
        self._shares, self._steps_before = self.contract.shares, self.config.time_steps
        self.strategy = self.definition.server(self)

    # ------------------------------------------------------------------ a run
    def run(self) -> None:
        """Handshake, R rounds of the method's algorithm with a checkpoint after each, closing page."""
        self.record = RunRecord(self.results_folder)
        self.results = Results(self.record, self.scalar, newest_is_best=self.config.rounds_per_period > 0)
        run_dir, job = Path(self.get_run_dir()), self.fl_ctx.get_job_id()
        self._checkpoints = RunCheckpoints(
            self.results_folder, run_dir, job, self.config.resume_from, self.config.keep_checkpoints
        )
        with self._recorded():
            first = w = self._begin()
            for r in range(self.first_round, self.config.num_rounds + 1):
                w = first if self.config.restart and (r - 1) % self.config.rounds_per_period == 0 else w
                self.admit_late_sites(w, r)
                w = self.strategy.one_round(w, r)
                self._save(w, r)
        try:
            self.results.finish(self.strategy.numbers())
        except Exception as error:  # the run is whole and saved: a page that cannot be written must not fail it
            self.exception(f"the closing page or box could not be written: {error}")

    def train(self, w: Tensors, r: int, t: int) -> tuple[dict[str, torch.Tensor] | None, Answers]:
        """The trainers train from w; returns the weighted mean of the differences (float64) and the answers.

        The mean has the tensors of w and the strategy's extra ones; None if nobody had one, or none may leave.
        """
        down = {**w, **self.strategy.extra_tensors(w)}
        visits, shapes = self.strategy.trained_visits(r, t), {name: tuple(value.shape) for name, value in down.items()}
        dtypes = {self.schema.dtype_up: WIRE_DTYPES[self.schema.dtype_up]}

        def accept(site: str, reply: Reply, update: Tensors, before: Tensors = down) -> None:
            if not self._shares:
                return
            agreed = sent_shapes(shapes, self.lora_ranks[site], frozen_a=self.lora_mean == "ffa")
            self._wire.check_tensors(TRAIN, update, agreed, sends="difference", dtypes=dtypes)
            rows = {name: value.float() for name, value in update.items() if self.contract.is_collected(name)}
            update = {name: value.float() for name, value in update.items() if name not in rows}
            work[site], late = work_of(reply.numbers), 1 + r - reply.round
            update = rescaled(update, w, 1 / (work[site] * late))  # a late one counts less
            check_update_size(update, w, self.config.update_norm_limit)
            self.strategy.collect(site, rows)
            stale.update({site: (late, before)} if late > 1 else {})
            updates.add(site, update if agreed == shapes else padded(update, {n: before[n] / late for n in averaged}))

        work, stale = dict[str, float](), dict[str, tuple[int, Tensors]]()
        averaged = [name for name in shapes if not self.contract.is_collected(name)]
        by_rows = [name for name in averaged if shapes[name] and matches(name, self.contract.by_rows)]
        with SpilledUpdates(self.results_folder / "updates", averaged, by_rows) as updates:
            header = self.header(r, t, after=version(r, t - 1))
            answers = self.ask(TRAIN, header, down, self.strategy.trainers(), accept)
            self.take_late(answers, header, accept)
            counts = {}
            for site, reply in answers.replies.items():  # a site weighs no more than the visits it announced
                counts[site] = min(int(reply.numbers["samples"]), max(1, visits(self.visits[site]["train"])))
            shares = self.shares_of(counts) if counts and self._shares else {}
            tau = math.fsum(shares[s] * work[s] for s in shares) if any(work[s] < 1 for s in shares) else 1.0
            mean = rescaled(self.strategy.combine(updates, shares), w, tau) if shares else None
            norm = euclidean_norm({name: mean[name] for name in w}) if mean else None
            product = self.lora_mean == "product"
            mean = ProductMean(mean, w, updates, shares, tau, stale) if mean and product else mean
            self.results.step(r, t, answers, norm, gap(w, updates, {} if product and stale else shares))
        return mean, answers

    def shares_of(self, counts: Mapping[str, int]) -> dict[str, float]:
        """The strategy's weights of the sites in a mean, of three or more none above ``max_share``."""
        shares = self.strategy.shares_of(counts)
        found = with_ceiling(shares, self.config.max_share) if len(shares) >= MAJORITY else shares
        for site in (site for site in found if shares[site] > self.config.max_share and found[site] < shares[site]):
            self.raise_alarm(
                f"{site} would have had more than max_share, {self.config.max_share:.0%}, of a mean of the sites"
            )
        return found

    def close_round(self, w: Tensors, r: int) -> Answers:
        """Ask for the validation loss at w, what the method adds, and scores when due."""
        evaluate = r % (self.config.rounds_per_period or self.config.evaluate_every) == 0 or r == self.config.num_rounds

        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            if "validation_loss" in reply.numbers:
                most = max(1, sum(self.visits[site]["validation"]))
                reply.numbers["reports"] = min(int(reply.numbers.get("reports", 0)), most)

        header = self.header(r, self.config.time_steps, after=version(r, self.config.time_steps), evaluate=evaluate)
        answers = self.ask(CLOSE_ROUND, header, w, self.sites, accept)
        self.results.validation(r, answers, by_median=self.config.aggregation != "mean")
        self.results.evaluation(r, answers, self.ahead(r))
        return answers

    def header(self, r: int, t: int, after: str, evaluate: bool = False) -> TaskHeader:
        return TaskHeader(
            method=self.method,
            run_id=self.run_id,
            round=r,
            step=t,
            rounds=self.config.num_rounds,
            time_steps=self.config.time_steps,
            after=after,
            evaluate=evaluate,
            keep=version(best, self.config.time_steps) if (best := self.results.best()) else "",
            rounds_per_period=self.config.rounds_per_period,
        )

    # ------------------------------------------------------------------ begin
    def _begin(self) -> Tensors:
        """Handshake: agree on the exchange and return the weights to start from."""
        resumed = self._resumed()
        self.run_id = resumed.info["run_id"] if resumed else f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        self.first_round = resumed.round + 1 if resumed else 1
        initial = self._checkpoints.initial(self.config.initial_checkpoint) if self.config.initial_checkpoint else None
        w = resumed.weights if resumed else initial
        self._members = set(resumed.info.get("members", ())) if resumed else set()
        w, answers = self.gather(w)
        expect_at_most(self.strategy.largest_message())
        self.results.start(
            self.schema,
            answers,
            method=self.method,
            run_id=self.run_id,
            first_round=self.first_round,
            rounds=self.config.num_rounds,
            time_steps=self.config.time_steps,
            settings=self.fixed_settings() | {"min_sites": self.config.min_sites} | self._settings_of_sites(),
        )
        if not self.members:
            raise FedTARError("every site that takes part is named in server.unseen: there is nobody to train")
        self.strategy.on_start()
        self.results.evaluation(self.first_round - 1, answers, self.ahead(self.first_round - 1))
        if resumed:
            best = self._checkpoints.carry_over(resumed, is_best=self.results.is_best(resumed.round))
            if best and self._shares:
                self.results.adapter(best.weights, best.round)
        return w

    # ------------------------------------------------------------------ save and resume
    def fixed_settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share."""
        names = ("num_rounds", "time_steps", "weighting", "seed")
        fixed = {"method": self.method} | {name: getattr(self.config, name) for name in names}
        fixed |= self.strategy.fixed_settings()
        more: dict[str, Any] = {"rounds_per_period": self.config.rounds_per_period, "unseen": list(self.config.unseen)}
        more["aggregation"] = self.config.aggregation != "mean" and self.config.aggregation
        return fixed | {name: value for name, value in more.items() if value}

    def _settings_of_sites(self) -> dict[str, Any]:
        """Settings that the job gives to sites, for the record; nothing where their file is not at the server."""
        for file in Path(self.get_run_dir()).glob("app*/config/config_fed_client.json"):
            arguments = read_json(file)["executors"][0]["executor"].get("args", {})
            return {"sites": arguments.get("settings") or {}}
        return {}

    def _save(self, w: Tensors, r: int) -> None:
        """Checkpoint after a whole round; the best one by validation loss also becomes ``adapter/``."""
        best = self.results.is_best(r)
        info = {
            "run_id": self.run_id,
            "schema": self.schema.to_dict(),
            "settings": self.fixed_settings(),
            "members": sorted({*self._members, *self.sites}),
        }
        if (own := self.strategy.info()) is not None:
            info["method"] = own
        self._checkpoints.save(Checkpoint(r, w, self.strategy.state(), info | self.results.progress()), best=best)
        if best and self._shares:
            self.results.adapter(w, r)

    def _resumed(self) -> Checkpoint | None:
        """The checkpoint to go on from, with the method's state restored; None in a fresh run."""
        if not self.config.resume_from:
            return None
        checkpoint, problems = self._checkpoints.resumed(self.fixed_settings(), ("num_rounds", "time_steps"))
        for problem in problems:
            self.warning(f"passed over: {problem}")
        self._steps_before = checkpoint.info["settings"]["time_steps"]
        self.strategy.load_info(checkpoint.info.get("method"))
        self.strategy.load_state(checkpoint.method)
        self.results.restore(checkpoint.info, comparable=self._steps_before == self.config.time_steps)
        return checkpoint

    # ------------------------------------------------------------------ record
    @property
    def results_folder(self) -> Path:
        """``<server run folder>/fedtar``."""
        return Path(self.get_run_dir()) / "fedtar"

    def scalar(self, tag: str, value: float | None, step: int) -> None:
        """One point of a curve in the server's TensorBoard."""
        send_scalar(self, self.fl_ctx, tag, value, step)

    def progress(self) -> dict[str, Any]:
        """Place in the run, validation loss by round, the method's numbers, and the server's alarms."""
        losses = self.results.losses() if hasattr(self, "results") else {}
        more = {"validation_loss": losses, "numbers": self.strategy.numbers()}
        return super().progress() | more | {"alarms": alarms(Path(self.get_run_dir()).parent)}

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Always write the ``end`` event; an error of this package ends the job with its one-line reason."""
        start = time.monotonic()

        def end(status: Any, reason: str = "") -> None:
            seconds = round(time.monotonic() - start, 1)
            with suppress(OSError):  # on a full disk the log still has the reason
                self.record.write(End(time=now(), seconds=seconds, status=status, reason=reason))

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
            reason = f"the server could not write its results ({error.strerror or error}). The last whole checkpoint "
            reason += "stays; make room or mend the disk, then resume the job"
            end("failed", reason)
            self.error(f"{reason}: {error}")
            self.panic(reason)
        except Exception as error:
            end("failed", f"unexpected {type(error).__name__}")
            raise
        else:
            end("completed", self.results.nothing_learnt())


FederatedController.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    # FLARE finds the parameters of a component, and the defaults that it need not export, in the signature
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("method", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
            for name, field in ServerConfig.model_fields.items()
        ),
        inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=None),
    ]
)


def _in_simulator() -> None:
    """In FLARE's simulator, end it at once and in one line where it could not start its sites from the workspace."""
    folder = Path.cwd().parent  # the simulator builds its server in <workspace>/server
    if not (folder / "server" / SIMULATED_JOB / "app_server").is_dir():
        return
    hush_simulator()
    try:
        check_workspace(folder)
    except ConfigError as error:
        logger.error(str(error))
        raise SystemExit(2) from None  # it ends the server's thread; anything else would be three long tracebacks
