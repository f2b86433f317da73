"""Base of every method's controller: handshake, initial weights, rounds, checkpoints, resume, record."""

from __future__ import annotations

import math
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.data.splits import SPLITS
from fedtar_flare.errors import ConfigError, ExchangeError, FedTARError
from fedtar_flare.files import read_json
from fedtar_flare.flare.aggregation import WEIGHTINGS, SpilledUpdates, aggregation_weights
from fedtar_flare.flare.alarms import alarms
from fedtar_flare.flare.checkpoint import Checkpoint, RunCheckpoints
from fedtar_flare.flare.gathering import GatheringController
from fedtar_flare.flare.results import Results, check_scores
from fedtar_flare.flare.scalars import send_scalar
from fedtar_flare.flare.tasking import Answers, RunAborted, Tensors, now
from fedtar_flare.protocol.exchange import (
    WIRE_DTYPES,
    check_update_size,
    euclidean_norm,
)
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, TRAIN
from fedtar_flare.protocol.tensors import expect_at_most
from fedtar_flare.record.events import End
from fedtar_flare.record.log import RunRecord


class MethodController(GatheringController):
    """What all controllers share; a method writes :meth:`one_round`, its algorithm, and sets ``contract``.

    Args:
        num_rounds, time_steps: R and T.
        weighting: of the sites in a mean: ``samples`` (n_k / N), ``uniform`` or ``inverse``.
        min_sites: fewer sites taking part in a task stop the job.
        step_time_limit: seconds a site has for one task; 0 waits for ever.
        handshake_time_limit: the same for the handshake, in which a site prepares its data; a site that misses it joins
            at the round after its answer.
        evaluate_every: rounds between scorings of test patients, which also happen at the start and at the end.
        update_norm_limit: an update whose norm is larger than this times the weights' norm is refused.
        initial_site: the site that gives the common initial weights; empty: the first by name.
        initial_checkpoint: weights to start from instead: a name under which the server's operator offers a checkpoint
            file (in the simulator: its path).
        resume_from: id of a job of the same submitter (in the simulator: a checkpoint folder).
        seed: of the method's own random state at the server.

    Raises:
        ConfigError: a value is not allowed.
    """

    def __init__(
        self,
        num_rounds: int = 3,
        time_steps: int = 3,
        weighting: str = "samples",
        min_sites: int = 1,
        step_time_limit: int = 3600,
        handshake_time_limit: int = 7200,
        evaluate_every: int = 1,
        update_norm_limit: float = 10.0,
        initial_site: str = "",
        initial_checkpoint: str = "",
        resume_from: str = "",
        keep_checkpoints: int = 3,
        seed: int = 0,
    ):
        super().__init__(min_sites, step_time_limit, handshake_time_limit, initial_site)
        whole = {"num_rounds": num_rounds, "time_steps": time_steps, "evaluate_every": evaluate_every}
        for name, value in (whole | {"keep_checkpoints": keep_checkpoints}).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if weighting not in WEIGHTINGS:
            raise ConfigError(f"weighting '{weighting}' is not one of {', '.join(WEIGHTINGS)}")
        if not (math.isfinite(update_norm_limit) and update_norm_limit > 0):
            raise ConfigError(f"update_norm_limit must be a positive number, not {update_norm_limit}")
        if resume_from and initial_checkpoint:
            raise ConfigError("give either resume_from or initial_checkpoint, not both")
        self.num_rounds, self.time_steps, self.weighting = num_rounds, time_steps, weighting
        self.evaluate_every, self.update_norm_limit = evaluate_every, update_norm_limit
        self.initial_checkpoint, self.resume_from = initial_checkpoint, resume_from
        self.keep_checkpoints, self.seed = keep_checkpoints, seed
        self._shares = self.contract.shares

    # ------------------------------------------------------------------ what a method gives
    @abstractmethod
    def one_round(self, w: Tensors, r: int) -> Tensors:
        """The algorithm: run round r from the weights w and return the weights after it."""

    def method_settings(self) -> dict[str, Any]:
        """Settings of the method that a resumed run must share."""
        return {}

    def method_state(self) -> dict[str, torch.Tensor]:
        """Tensors at the server, beside w, that a resumed run needs."""
        return {}

    def load_method_state(self, state: Tensors) -> None:
        """Restore what :meth:`method_state` gave."""

    def method_info(self) -> Any:
        """What of the method's state is no tensor, as JSON primitives; None: nothing."""
        return None

    def load_method_info(self, info: Any) -> None:
        """Restore what :meth:`method_info` gave; called before :meth:`load_method_state`."""

    def method_numbers(self) -> dict[str, list[float]]:
        """Numbers to show beside a run's progress."""
        return {}

    def on_start(self) -> None:
        """Called once after the handshake, to write the method's own events."""

    def beside(self, w: Tensors) -> Tensors:
        """Further tensors that go down with w in a training task; their mean difference comes back with that of w.

        Rows of a group that the contract collects may be among them; what comes back of these goes to :meth:`collect`.
        """
        return {}

    def collect(self, site: str, rows: Tensors) -> None:
        """Take the collected rows of a site's update; :class:`ExchangeError` refuses them, and the update with them."""

    def shares_of(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Weights of the sites in a mean, which sum to one, given the visits n_k of those that are in it."""
        return aggregation_weights(counts, self.weighting)

    def largest_message(self) -> int:
        """Most values that a site's answer to a task of a round may hold; more are not fetched."""
        return self.schema.parameters * max(len(task.up) for task in self.contract.tasks)

    def trainers(self) -> list[str]:
        """The sites that are asked to train; all by default."""
        return self.sites

    def trained_visits(self, r: int, t: int) -> Callable[[list[int]], int]:
        """How many visits a site trains on at step t of round r, given its counts per step; by default those of t."""
        return lambda counts: counts[t - 1]

    # ------------------------------------------------------------------ a run
    def run(self) -> None:
        """Handshake, R rounds of the method's algorithm with a checkpoint after each, closing page."""
        self.record = RunRecord(self.results_folder)
        self.results = Results(self.results_folder, self.record, self.scalar)
        run_dir, job = Path(self.get_run_dir()), self.fl_ctx.get_job_id()
        self._checkpoints = RunCheckpoints(
            self.results_folder, run_dir, job, self.resume_from, self.keep_checkpoints, _submitter(run_dir)
        )
        with self._recorded():
            w = self._begin()
            for r in range(self.first_round, self.num_rounds + 1):
                self.welcome(w, r)
                w = self.one_round(w, r)
                self._save(w, r)
        try:
            self.results.finish(self.method_numbers())
        except Exception as error:  # the run is whole and saved: a page that cannot be written must not fail it
            self.exception(f"the closing page or table could not be written: {error}")

    def train(self, w: Tensors, r: int, t: int) -> tuple[dict[str, torch.Tensor] | None, Answers]:
        """Every live site trains from w; returns the weighted mean of the differences (float64) and the answers.

        The mean has the tensors of w and of :meth:`beside`. It is None when no site had anything to add, or where the
        contract lets no weights leave.
        """
        down = {**w, **self.beside(w)}
        visits, shapes = self.trained_visits(r, t), {name: tuple(value.shape) for name, value in down.items()}
        dtypes = {self.schema.dtype_up: WIRE_DTYPES[self.schema.dtype_up]}

        def accept(site: str, reply: Reply, update: Tensors) -> None:
            if not self._shares:
                return
            self._wire.check_tensors(TRAIN, update, shapes, sends="difference", dtypes=dtypes)
            rows = {name: value.float() for name, value in update.items() if self.contract.is_collected(name)}
            update = {name: value.float() for name, value in update.items() if name not in rows}
            check_update_size(update, w, self.update_norm_limit)
            self.collect(site, rows)
            updates.add(site, update)

        averaged = [name for name in shapes if not self.contract.is_collected(name)]
        by_rows = [name for name in averaged if shapes[name] and self.contract.is_by_rows(name)]
        with SpilledUpdates(self.results_folder / "updates", averaged, by_rows) as updates:
            answers = self.ask(TRAIN, self.header(r, t, after=version(r, t - 1)), down, self.trainers(), accept)
            counts = {}
            for site, reply in answers.replies.items():  # a site weighs no more than the visits it announced
                counts[site] = min(int(reply.numbers["samples"]), max(1, visits(self._counts[site]["train"])))
            mean = updates.mean(self.shares_of(counts)) if counts and self._shares else None
        norm = euclidean_norm({name: mean[name] for name in w}) if mean else None
        self.results.step(r, t, answers, norm)
        return mean, answers

    def close_round(self, w: Tensors, r: int) -> Answers:
        """Ask for the validation loss at w, what the method adds, and scores when due."""
        evaluate = r % self.evaluate_every == 0 or r == self.num_rounds

        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            if "validation_loss" in reply.numbers:
                reports = int(reply.numbers.get("reports", 0))
                reply.numbers["reports"] = min(reports, max(1, sum(self._counts[site]["validation"])))

        header = self.header(r, self.time_steps, after=version(r, self.time_steps), evaluate=evaluate)
        answers = self.ask(CLOSE_ROUND, header, w, self.sites, accept)
        self.results.validation(r, answers)
        self.results.evaluation(r, answers)
        return answers

    def check_content(self, reply: Reply) -> None:
        """Refuse counts that are not T whole numbers per split, malformed scores, and a loss without reports."""
        check_scores(reply)
        if (counts := reply.payload.get("counts")) is not None:
            lists = [counts.get(split) for split in SPLITS]
            whole = all(isinstance(n, int) and n >= 0 for values in lists for n in values or ())
            if not whole or any(not isinstance(v, list | tuple) or len(v) != self.time_steps for v in lists):
                raise ExchangeError(f"the field 'counts' is not {self.time_steps} whole numbers for each split")
        if "validation_loss" in reply.numbers and reply.numbers.get("reports", 0) < 1:
            raise ExchangeError("it sends a validation loss without a number of reports")

    def header(self, r: int, t: int, after: str, evaluate: bool = False) -> TaskHeader:
        best = self.results.best()
        return TaskHeader(
            method=self.contract.method,
            run_id=self.run_id,
            round=r,
            step=t,
            rounds=self.num_rounds,
            time_steps=self.time_steps,
            after=after,
            evaluate=evaluate,
            keep=version(best, self.time_steps) if best else "",
        )

    # ------------------------------------------------------------------ begin
    def _begin(self) -> Tensors:
        """Handshake: agree on the exchange and return the weights to start from."""
        resumed = self._resumed()
        self.run_id = resumed.info["run_id"] if resumed else f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        self.first_round = resumed.round + 1 if resumed else 1
        w = resumed.weights if resumed else None
        if self.initial_checkpoint:
            w = self._checkpoints.initial(self.initial_checkpoint)
        self._members = set(resumed.info.get("members", ())) if resumed else set()
        w, answers = self.gather(w)
        expect_at_most(self.largest_message())
        self.results.start(
            self.schema,
            answers,
            method=self.contract.method,
            run_id=self.run_id,
            first_round=self.first_round,
            rounds=self.num_rounds,
            time_steps=self.time_steps,
            settings=self.settings() | {"min_sites": self.min_sites},
        )
        self.on_start()
        self.results.evaluation(self.first_round - 1, answers)
        if resumed:
            best = self._checkpoints.carry_over(resumed, is_best=self.results.is_best(resumed.round))
            if best and self._shares:
                self.results.adapter(best.weights, best.round)
        return w

    # ------------------------------------------------------------------ save and resume
    def settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share."""
        names = ("num_rounds", "time_steps", "weighting", "seed")
        return {"method": self.contract.method} | {n: getattr(self, n) for n in names} | self.method_settings()

    def _save(self, w: Tensors, r: int) -> None:
        """Checkpoint after a whole round; the best one by validation loss also becomes ``adapter/``."""
        best = self.results.is_best(r)
        info = {
            "run_id": self.run_id,
            "schema": self.schema.to_dict(),
            "settings": self.settings(),
            "members": sorted({*self._members, *self.sites}),
        }
        if (own := self.method_info()) is not None:
            info["method"] = own
        self._checkpoints.save(Checkpoint(r, w, self.method_state(), info | self.results.progress()), best=best)
        if best and self._shares:
            self.results.adapter(w, r)

    def _resumed(self) -> Checkpoint | None:
        """The checkpoint to go on from, with the method's state restored; None in a fresh run."""
        if not self.resume_from:
            return None
        checkpoint, problems = self._checkpoints.resumed(self.settings(), may_differ=("num_rounds",))
        for problem in problems:
            self.warning(f"passed over: {problem}")
        self.load_method_info(checkpoint.info.get("method"))
        self.load_method_state(checkpoint.method)
        self.results.restore(checkpoint.info)
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
        more = {"validation_loss": losses, "numbers": self.method_numbers()}
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


def _submitter(run_dir: Path) -> str:
    """Who submitted the job, as the server wrote it beside the job; empty in the simulator."""
    file = run_dir / "meta.json"
    return str(read_json(file).get("submitter_name") or "") if file.is_file() else ""
