"""FedTAR at the server: rounds of time steps with residual aggregation."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.methods.fedtar.events import Alphas, Outer, Residual
from fedtar_flare.methods.fedtar.policy import (
    ALPHA_FLOOR,
    FIXED,
    AlphaPolicy,
    OuterOptimizer,
    RetainedShares,
    StepTest,
    hypergradient,
    pool_t_numbers,
    residual_step,
)
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.runtime.aggregation import MAJORITY, trimmed_mean
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.exchange import Answers
from fedtar_flare.runtime.server_strategy import ServerStrategy

__all__ = ["TemporalResidualController", "TemporalResidualServer"]


class TemporalResidualServer(ServerStrategy):
    """FedTAR at the server: residual aggregation with a meta-learned alpha; arguments as :class:`.ServerStrategy`.

    At each time step t = 1..T of a round the mean of the sites' updates (Eq. 6) enters as a residual weighted by
    alpha_t (Eq. 7). Then the outer step moves psi along the gradient of the validation loss at w_T (Eq. 8), from T
    numbers per site.
    """

    def __init__(self, run: FederatedController):
        super().__init__(run)
        self.policy = AlphaPolicy(run.config.time_steps, self.settings.server, seed=run.config.seed)
        self.outer = OuterOptimizer(self.policy, eta=self.settings.server.eta)
        self.retained = RetainedShares() if self.settings.server.hypergradient == "corrected" else None
        replay = self.settings.temporal.replay
        self.test = StepTest(run.config.time_steps) if replay == "tested" else None
        self.replays = replay == "seen"  # whether this round's steps learn from each other's visits

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """T residual steps and one outer step (FedTAR, Algorithm 1)."""
        steps = self.steps(r)
        alphas = self.policy.alphas(len(steps)).detach()
        if self.test:
            self.replays = self.test.passed(len(steps))
        taken = torch.zeros(len(steps), dtype=torch.bool)
        for t in steps:
            alpha, residual = float(alphas[t - 1]), 0.0
            weight = alpha if alpha >= ALPHA_FLOOR else 0.0
            aggregate, _ = self.run.train(w, r, t, alpha=weight, replay=self.replays)  # Eq. 6
            if aggregate is not None:  # a step that nobody answered is skipped: w stays
                if self.retained:
                    self.retained.add(t, w, aggregate)
                w, residual = residual_step(w, aggregate, weight)  # Eq. 7
                taken[t - 1] = True
            self.run.record.write(Residual(round=r, step=t, alpha=alpha, residual_norm=residual))
            self.run.scalar(f"alpha/step {t}", alpha, r)
            self.run.scalar(f"norm of the residual/step {t}", residual, r)
        self._outer_step(self.run.close_round(w, r), alphas, taken, r)  # Eq. 8
        return w

    def _outer_step(self, closing: Answers, alphas: torch.Tensor, taken: torch.Tensor, r: int) -> None:
        """psi <- psi - eta grad_psi L_val(w_T(psi)) from the sites' T numbers (first order, exact)."""
        replies = dict(sorted(closing.replies.items()))
        validated = {site: reply for site, reply in replies.items() if "validation_loss" in reply.numbers}
        numbers = {site: reply.payload.get("t_numbers") for site, reply in validated.items()}
        sent = {site: values for site, values in numbers.items() if values is not None}
        missed = "it trained at no step, or did not receive every step of this round"
        left_out = closing.missing | dict.fromkeys(replies.keys() - validated.keys(), "no validation patient")
        left_out |= dict.fromkeys(numbers.keys() - sent.keys(), missed)
        every = torch.tensor([sent[site] for site in sorted(sent)], dtype=torch.float64)
        norm: float | None = None
        if sent and bool(taken.any()) and self.policy.alpha_form not in FIXED:
            reports = {site: int(validated[site].numbers["reports"]) for site in sent}
            by_mean = self.run.config.aggregation == "mean"
            pooled = pool_t_numbers(sent, reports) if by_mean else trimmed_mean(every, 0.5)
            retained = self.retained.shares(len(alphas)) if self.retained else None
            rate = r**-0.5 if self.settings.server.eta_schedule == "inverse_sqrt" else 1.0
            norm = self.outer.step(hypergradient(pooled, alphas, taken, retained), rate)
        if self.test and not self.replays and len(sent) < MAJORITY:
            self.run.results.alarm(f"fewer than {MAJORITY} hospitals sent T numbers: time steps are not tested yet")
        elif self.test and not self.replays:
            losses = [validated[site].numbers["validation_loss"] for site in sorted(sent)]
            for t in self.test.judge(every, torch.tensor(losses, dtype=torch.float64)):
                text = f"time step {t} made drafts worse at the hospitals and was dropped: check its reports, and"
                self.run.results.alarm(f"{text} those of validation patients")
            self.policy.active = self.test.active
        moved = self.policy.alphas(len(alphas)).detach().tolist()
        about = {"t_numbers": numbers, "left_out": left_out, "psi_grad_norm": norm}
        if self.retained:
            about["retained"] = self.retained.shares(len(alphas))
        self.run.record.write(Outer(round=r, alpha_before=alphas.tolist(), alpha_after=moved, **about))
        self.run.info(f"round {r}: alpha " + " ".join(f"{alpha:.3f}" for alpha in moved))

    def trained_visits(self, counts: Sequence[int], r: int, t: int) -> int:
        """Those of step t; with replay, of every step that the run has come to."""
        return sum(counts[: None if r > 1 else t]) if self.replays else counts[t - 1]

    def check_content(self, reply: Reply) -> None:
        """T numbers come with a validation loss, and there are T of them."""
        super().check_content(reply)
        numbers, wanted = reply.payload.get("t_numbers"), len(self.steps(reply.round))
        if numbers is not None and ("validation_loss" not in reply.numbers or len(numbers) != wanted):
            raise ExchangeError(f"it did not send {wanted} T numbers with a validation loss")

    # ------------------------------------------------------------------ state and record
    def on_start(self) -> None:
        if self.retained and self.run.membership.lora_mean == "product":
            raise ConfigError("server.hypergradient 'corrected' compares factors, which lora.mean 'product' makes anew")
        visits = self.run.membership.visits
        if self.test and sum(any(visits[site]["validation"]) for site in self.run.membership.members) < MAJORITY:
            text = f"it takes {MAJORITY} of them or more with validation patients"
            raise ConfigError(f"temporal.replay 'tested' compares hospitals: {text}")
        if self.test and self.retained:
            raise ConfigError("server.hypergradient 'corrected' takes temporal.replay 'none': 'tested' changes visits")
        self.run.record.write(Alphas(alpha=self.policy.alphas().tolist(), first_round=self.run.first_round))

    def state(self) -> dict[str, torch.Tensor]:
        state = self.outer.state() | (self.retained.state() if self.retained else {})
        return state | (self.test.state() if self.test else {})

    def load_state(self, state: Tensors) -> None:
        state, rows = dict(state), self.run.config.time_steps
        for name, value in state.items():
            if name.endswith("embedding") and value.dim():  # an added period has the row of the newest before it
                state[name] = torch.cat([value, *[value[-1:]] * (rows - len(value))])
        self.outer.load_state(state)
        if self.retained:
            self.retained.load_state(state)
        if self.test:
            self.test.load_state(state)
            self.policy.active = self.test.active

    def numbers(self) -> dict[str, list[float]]:
        return {"alpha": [round(float(alpha), 6) for alpha in self.policy.alphas().detach()]}


class TemporalResidualController(FederatedController):
    """The controller of FedTAR's jobs; arguments as :class:`.FederatedController`."""

    # FLARE's export finds the base's parameters by the names args and kwargs
    def __init__(self, method: Literal["fedtar"] = "fedtar", *args: Any, **kwargs: Any):
        if method != "fedtar":
            raise ConfigError(f"method is '{method}': a TemporalResidualController runs 'fedtar'")
        super().__init__(method, *args, **kwargs)
