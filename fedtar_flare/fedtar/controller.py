"""FedTAR at the server: ``TemporalResidualController``, rounds of time steps with residual aggregation."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.errors import ConfigError, ExchangeError, FedTARError
from fedtar_flare.fedtar.contract import CONTRACT
from fedtar_flare.fedtar.policy import AlphaPolicy, OuterOptimizer, floored_steps, hypergradient, pool_t_numbers
from fedtar_flare.fedtar.residual import SpilledUpdates, aggregation_weights, residual_step
from fedtar_flare.fedtar.results import ResultsWriter
from fedtar_flare.flare.checkpoint import BEST, Checkpoint, CheckpointFolder, load
from fedtar_flare.flare.controller import Answers, MethodController, Tensors
from fedtar_flare.protocol.exchange import ExchangeSchema, check_update_size, disagreement_table
from fedtar_flare.protocol.messages import Reply, TaskHeader, same_release, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.record.log import RunRecord
from fedtar_flare.version import __version__


class TemporalResidualController(MethodController):
    """Federated temporal adaptation by residual aggregation with a meta-learned alpha (FedTAR, CVPR 2026).

    In each round the server walks through the time steps t = 1..T. At each step every live site trains on its visit-t
    data from w_{t-1}; the mean of their updates (Eq. 6) enters as a residual weighted by alpha_t (Eq. 7). After step T
    the outer step moves psi along the gradient of the validation loss at w_T (Eq. 8), from T numbers per site.

    Args:
        num_rounds: R.
        time_steps: T.
        weighting: of the sites in Eq. 6: ``samples`` (n_k / N), ``uniform``, ``inverse``.
        alpha_form: ``softmax`` (the paper: the alphas of a round sum to one) or ``sigmoid`` (each in (0, 1)).
        initial_alpha: start of every alpha_t under ``sigmoid``; under ``softmax`` they start at 1/T.
        eta: learning rate of psi (AdamW).
        eta_schedule: ``constant`` or ``inverse_sqrt``.
        min_sites: fewer sites taking part in a task stop the job.
        step_time_limit: seconds a site has for one task; 0 waits for ever.
        evaluate_every: test patients are scored every so many rounds, and always at the start and at the end.
        update_norm_limit: an update whose norm is larger than this times the weights' norm is refused.
        initial_site: whose initial weights all start from; empty: the first by name.
        initial_checkpoint: file (at the server) of weights to start from instead.
        resume_from: what to go on with: the id of a job whose checkpoints this server keeps, or a checkpoint folder at
            the server.
        keep_checkpoints: how many of the newest stay.
        seed: of psi.

    Raises:
        ConfigError: when built with a value that is not allowed.
    """

    def __init__(
        self,
        num_rounds: int = 3,
        time_steps: int = 3,
        weighting: str = "samples",
        alpha_form: str = "softmax",
        initial_alpha: float = 0.7,
        eta: float = 1e-2,
        eta_schedule: str = "constant",
        min_sites: int = 1,
        step_time_limit: int = 3600,
        evaluate_every: int = 1,
        update_norm_limit: float = 10.0,
        initial_site: str = "",
        initial_checkpoint: str = "",
        resume_from: str = "",
        keep_checkpoints: int = 3,
        seed: int = 0,
    ):
        super().__init__(min_sites=min_sites, step_time_limit=step_time_limit)
        for name, value in (("num_rounds", num_rounds), ("time_steps", time_steps), ("evaluate_every", evaluate_every)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if weighting not in ("samples", "uniform", "inverse"):
            raise ConfigError(f"weighting '{weighting}' is not one of samples, uniform, inverse")
        if update_norm_limit <= 0:
            raise ConfigError(f"update_norm_limit must be positive, not {update_norm_limit}")
        if resume_from and initial_checkpoint:
            raise ConfigError("give either resume_from or initial_checkpoint, not both")
        self.num_rounds, self.time_steps = num_rounds, time_steps
        self.weighting, self.alpha_form, self.initial_alpha = weighting, alpha_form, initial_alpha
        self.eta, self.eta_schedule = eta, eta_schedule
        self.evaluate_every, self.update_norm_limit = evaluate_every, update_norm_limit
        self.initial_site, self.initial_checkpoint, self.resume_from = initial_site, initial_checkpoint, resume_from
        self.keep_checkpoints, self.seed = keep_checkpoints, seed
        self.policy = AlphaPolicy(time_steps, alpha_form=alpha_form, initial_alpha=initial_alpha, seed=seed)
        self.outer = OuterOptimizer(self.policy, eta=eta, schedule=eta_schedule)

    # ------------------------------------------------------------------ the algorithm
    def run(self) -> None:
        """Handshake, then R rounds of T residual steps and one outer step each (FedTAR, Algorithm 1)."""
        self.record = RunRecord(self.results_folder)
        self.results = ResultsWriter(self.results_folder, self.record, self.scalar)
        with self.recorded(self.record):
            w, first_round = self.begin()
            for r in range(first_round, self.num_rounds + 1):
                alphas = self.policy.alphas().detach()
                taken = torch.zeros(self.time_steps, dtype=torch.bool)
                for t in range(1, self.time_steps + 1):
                    with SpilledUpdates(self.results_folder / "updates", dict(self.schema.shapes)) as updates:
                        answers = self.train_step(w, r, t, updates)
                        counts = {site: int(reply.numbers["samples"]) for site, reply in answers.replies.items()}
                        residual = size = 0.0  # a step that nobody answered is skipped: w stays
                        if counts:
                            mean = updates.mean(aggregation_weights(counts, self.weighting))  # Eq. 6
                            w, residual, size = residual_step(w, mean, float(alphas[t - 1]))  # Eq. 7
                            taken[t - 1] = True
                    self.results.step(r, t, float(alphas[t - 1]), answers, residual, size)
                closing = self.close_round(w, r)
                self.outer_step(closing, alphas, taken, r)  # Eq. 8
                self.save(w, r)
        try:
            self.results.finish()
        except Exception as error:  # the run is whole and saved: a page that cannot be written must not fail it
            self.exception(f"the closing page or table could not be written: {error}")

    def train_step(self, w: Tensors, r: int, t: int, updates: SpilledUpdates) -> Answers:
        """Every live site trains from w_{t-1} on its visit-t data alone; good updates are spilled to disk."""

        def accept(site: str, reply: Reply, update: Tensors) -> None:
            self.schema.check(update, dtypes=[self.schema.dtype_up])
            check_update_size(update, w, self.update_norm_limit)
            samples = reply.numbers.get("samples", 0)
            if samples != int(samples) or samples < 1:
                raise ExchangeError(f"it reports {samples} samples")
            updates.add(site, {name: value.float() for name, value in update.items()})

        return self.ask(TRAIN, self.order(r, t, after=version(r, t - 1)), w, self.sites(), accept)

    def close_round(self, w: Tensors, r: int) -> Answers:
        """Validation loss and T numbers at w_T, and scores when due."""
        evaluate = r % self.evaluate_every == 0 or r == self.num_rounds

        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            if tensors:
                raise ExchangeError("it sent tensors where only numbers are asked for")
            check_closing(reply, self.time_steps)

        order = self.order(r, self.time_steps, after=version(r, self.time_steps), evaluate=evaluate)
        return self.ask(CLOSE_ROUND, order, w, self.sites(), accept)

    def outer_step(self, closing: Answers, alphas: torch.Tensor, taken: torch.Tensor, r: int) -> None:
        """psi <- psi - eta grad_psi L_val(w_T(psi)) from the sites' T numbers (first order, exact)."""
        start = time.monotonic()
        sent = {s: a for s, a in closing.replies.items() if a.payload.get("t_numbers") is not None}
        gradient_norm, floored = None, []
        if sent and bool(taken.any()):
            numbers = {site: reply.payload["t_numbers"] for site, reply in sent.items()}
            reports = {site: int(reply.numbers["reports"]) for site, reply in sent.items()}
            gradient = hypergradient(pool_t_numbers(numbers, reports), alphas, taken)
            gradient_norm, floored = self.outer.step(self.policy, gradient, r), floored_steps(alphas, taken)
        seconds = round(time.monotonic() - start, 4)
        self.results.outer(r, closing, alphas, self.policy.alphas().detach(), gradient_norm, floored, seconds)

    # ------------------------------------------------------------------ begin and save
    def begin(self) -> tuple[Tensors, int]:
        """Handshake: agree on the exchange, take the common start. Returns w_0 and the first round."""
        resumed = self._resumed()
        self.run_id = resumed.info["run_id"] if resumed else f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        self.first_round = resumed.round + 1 if resumed else 1
        w = resumed.weights if resumed else self._initial_weights()
        self._sites = self.live_sites()
        source = self.initial_site or (self._sites[0] if self._sites else "")
        if w is None and source not in self._sites:
            raise FedTARError(
                f"initial_site '{source}' is not connected; connected: {', '.join(self._sites) or 'none'}"
            )
        initial: dict[str, Tensors] = {}
        answers = self._greet(w, "" if w is not None else source, True, initial)
        self._sites = sorted(answers.replies)
        if not self._sites:  # all were heard, and all abstained
            raise FedTARError("no site takes part: " + "; ".join(f"{s}: {why}" for s, why in answers.abstained.items()))
        self.schema = agreed_schema(answers.replies)
        if w is None and not initial:  # the site that was to give the start failed: take the next one's
            self._greet(None, self._sites[0], False, initial)
        w = w if w is not None else next(iter(initial.values()))
        self.schema.check(w, dtypes=["float32"])
        self.results.start(self, answers)
        if resumed:
            self._carry_over(resumed.round)
        return w, self.first_round

    def _greet(self, w: Tensors | None, source: str, evaluate: bool, initial: dict[str, Tensors]) -> Answers:
        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            schema = ExchangeSchema.from_dict(reply.payload.get("schema"))
            if tensors or site == source:
                schema.check(tensors, dtypes=["float32"])
                initial[site] = {name: tensors[name].clone() for name in sorted(tensors)}

        after = version(self.first_round - 1, self.time_steps if self.first_round > 1 else 0)
        order = self.order(0, 0, after=after, evaluate=evaluate, initial_site=source)
        return self.ask(HANDSHAKE, order, w, self._sites, accept)

    def sites(self) -> list[str]:
        """Sites that agreed in the handshake, in sorted order; who is disconnected is sorted out by :meth:`ask`."""
        return self._sites

    def order(self, r: int, t: int, after: str, evaluate: bool = False, initial_site: str = "") -> TaskHeader:
        """The header of a task."""
        return TaskHeader(
            CONTRACT.method, self.run_id, r, t, self.num_rounds, self.time_steps, after, evaluate, initial_site
        )

    def save(self, w: Tensors, r: int) -> None:
        """Checkpoint after a whole round; the best one by validation loss also becomes ``adapter/``."""
        best = self.results.is_best(r)
        info = {"run_id": self.run_id, "schema": self.schema.to_dict(), "settings": self.settings()}
        policy = {**self.policy.state_dict(), **{f"outer.{k}": v for k, v in self.outer.state_tensors().items()}}
        checkpoint = Checkpoint(r, w, policy, info | self.results.progress())
        for folder in self.checkpoint_folders():
            CheckpointFolder(folder, self.keep_checkpoints).save(checkpoint, best=best)
        if best:
            self.results.adapter(w, r)

    def settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share."""
        names = ("num_rounds", "time_steps", "weighting", "alpha_form", "initial_alpha", "eta", "eta_schedule", "seed")
        return {name: getattr(self, name) for name in names}

    def _initial_weights(self) -> Tensors | None:
        return load(Path(self.initial_checkpoint)).weights if self.initial_checkpoint else None

    def _resumed(self) -> Checkpoint | None:
        """The checkpoint to go on from, psi and its optimiser restored; None in a fresh run."""
        if not self.resume_from:
            return None
        checkpoint, problems = CheckpointFolder(self.resume_folder(self.resume_from)).last()
        for problem in problems:
            self.warning(f"passed over: {problem}")
        before = checkpoint.info["settings"]
        differing = [
            f"{k}: {before.get(k)!r} then, {v!r} now" for k, v in self.settings().items() if before.get(k) != v
        ]
        differing = [line for line in differing if not line.startswith("num_rounds")]  # a run may be made longer
        if differing:
            raise FedTARError(f"{self.resume_from} was made with other settings: " + "; ".join(differing))
        outer = {k.removeprefix("outer."): v for k, v in checkpoint.policy.items() if k.startswith("outer.")}
        self.policy.load_state_dict({k: v for k, v in checkpoint.policy.items() if not k.startswith("outer.")})
        self.outer.load_state_tensors(outer)
        self.results.restore(checkpoint.info)
        return checkpoint

    def _carry_over(self, round_: int) -> None:
        """A resumed run has the checkpoint that it starts from and the best one as its own from the beginning."""
        source = CheckpointFolder(self.resume_folder(self.resume_from))
        for folder in self.checkpoint_folders():
            source.carry_to(CheckpointFolder(folder), round_)
        best = self.results_folder / "checkpoint" / BEST
        if best.is_file():
            checkpoint = load(best)
            self.results.adapter(checkpoint.weights, checkpoint.round)

    def progress(self) -> dict[str, Any]:
        """What :class:`MethodController` says, with alpha and the validation losses so far."""
        so_far = self.results.progress() if hasattr(self, "results") else {"losses": {}}
        alpha = [round(float(a), 6) for a in self.policy.alphas().detach()]
        return super().progress() | {"alpha": alpha, "validation_loss": so_far["losses"]}


def check_closing(reply: Reply, time_steps: int) -> None:
    """Refuse a site's part of the outer step that is not a finite loss, a positive count, and T finite numbers or None.

    Raises:
        ExchangeError: names the field.
    """
    if "validation_loss" not in reply.numbers:
        return  # a site without a validation patient
    if not math.isfinite(reply.numbers["validation_loss"]):
        raise ExchangeError("its validation loss is not finite")
    reports = reply.numbers.get("reports", 0)
    if reports != int(reports) or reports < 1:
        raise ExchangeError(f"it reports {reports} validation reports")
    numbers = reply.payload.get("t_numbers")
    if numbers is None:
        return  # it did not receive every step of the round
    if not isinstance(numbers, list | tuple) or len(numbers) != time_steps:
        raise ExchangeError(f"it did not send {time_steps} T numbers")
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ExchangeError("a T number is not a finite number")


def agreed_schema(replies: Mapping[str, Reply]) -> ExchangeSchema:
    """The exchange schema that all sites and the server's version share.

    Raises:
        FedTARError: with a table of who differs in what.
    """
    schemas = {site: ExchangeSchema.from_dict(reply.payload["schema"]) for site, reply in replies.items()}
    rows: dict[str, dict[str, Any]] = {
        site: {
            "fedtar_flare": same_release((reply.payload.get("versions") or {}).get("fedtar_flare")),
            "settings": reply.payload.get("settings"),
            "base weights": (reply.payload.get("model") or {}).get("fingerprint"),
            "updates in": schemas[site].dtype_up,
            "tensors": len(schemas[site].shapes),
            "parameters": schemas[site].parameters,
            **{f"tensor {name}": list(shape) for name, shape in schemas[site].shapes},
        }
        for site, reply in replies.items()
    }
    same = {key: value for key, value in next(iter(rows.values())).items() if key != "fedtar_flare"}
    rows["(server)"] = {**same, "fedtar_flare": __version__}
    table = disagreement_table(rows)
    if table:
        raise FedTARError(
            "the sites do not agree on what is exchanged; install the same fedtar_flare everywhere and give all sites "
            f"the same model and adapter settings. Who differs in what:\n{table}"
        )
    return next(iter(schemas.values()))
