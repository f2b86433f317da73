"""SCAFFOLD: FedAvg whose local gradients are corrected by control variates, against the drift of unlike sites.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML 2020), Algorithm 1. Site i
adds c - c_i to each local gradient, and afterwards sets c_i to the mean of its K uncorrected local gradients g_i, each
clipped to ``training.max_grad_norm``::

    c_i+ = (1 / K) sum_j g_i(y_j)          which under plain SGD is option II: c_i - c + (x - y_i) / (K lr)
    x <- x + sum_i p_i (y_i - x)           the paper's eta_g is 1
    c <- c + sum_i p_i (c_i+ - c_i)        over the sites that answered

p_i are the shares by ``weighting`` of all sites (1 / N, the paper's, with ``uniform``). c_i is private and stays at the
site, c goes down with the weights, and the change of c_i comes up with the update: twice the bytes of FedAvg.

The local optimiser is AdamW by default, as in every method here. There (x - y_i) / (K lr) would be a mean of normalised
steps, of another unit than the gradients that it corrects, so the mean of the gradients replaces it; and the correction
turns the local steps, but does not cancel the drift exactly as the paper's analysis has it. ``scaffold.optimizer=sgd``
is the paper's local step; its learning rate, ``training.lr``, must then be much larger.

A change of c_i is a plain mean of gradients, which reveals far more of single visits than weights that AdamW moved:
many means over known batches give the gradient of each visit. At a site with patients the batches are therefore secret,
and unclipped gradients are refused; and a site's kit lists this method only where its staff names it.

An update that comes too late or is refused leaves the site's c_i ahead of the server's c until it is trained again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import without_prefix
from fedtar_flare.core.settings import Settings
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import Trained
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import FedAvgServer, PooledSite
from fedtar_flare.protocol.contract import LORA_NAMES, Group, close_round, handshake, train
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.exchange import Answers
from fedtar_flare.runtime.task import Task

PREFIX = "control."
"""Prefix of a control variate's name, before its tensor's."""
CONTROL = Group("control", "averaged", (f"control.{LORA_NAMES}",), "control variates: means of a site's gradients")


class ScaffoldConfig(Settings):
    """SCAFFOLD at a site."""

    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="local optimiser of the shared part")


class ScaffoldServer(FedAvgServer):
    """SCAFFOLD at the server, with c (float64) in the checkpoint."""

    def __init__(self, run: FederatedController):
        super().__init__(run)
        self.control: dict[str, torch.Tensor] = {}

    def extra_tensors(self, w: Tensors) -> Tensors:
        """c, which starts at 0."""
        if not self.control:
            self.control = {f"{PREFIX}{name}": torch.zeros_like(w[name], dtype=torch.float64) for name in sorted(w)}
        return self.control

    def merge(self, w: Tensors, aggregate: Tensors, answers: Answers) -> Tensors:
        """The steps of x and of c (Algorithm 1); that of c by the share of the sites that answered."""
        visits = {site: sum(self.run.membership.visits[site]["train"]) for site in self.run.membership.members}
        counts = {site: max(n, site in answers.replies) for site, n in visits.items()}
        shares = self.run.shares_of({site: n for site, n in counts.items() if n})
        answered = math.fsum(shares[site] for site in answers.replies)
        self.control = {name: c + answered * aggregate[name] for name, c in self.control.items()}
        return super().merge(w, aggregate, answers)

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self.control)

    def load_state(self, state: Tensors) -> None:
        self.control = dict(state)


class ScaffoldSite(PooledSite):
    """SCAFFOLD at a site, with control variates of the adapter only."""

    def check(self) -> None:
        if exchange := self.settings.lora.exchange:
            raise ConfigError(f"lora: exchange is {list(exchange)}: SCAFFOLD has control variates of the adapter only")

    def before_training(self, task: Task, learner: ReportLearner) -> dict[str, torch.Tensor]:
        """Refuse unclipped gradients, of which one visit could outweigh all others of a control variate."""
        if not (self.settings.training.max_grad_norm or task.config.without_patients):
            text = "training.max_grad_norm is 0: with patients, SCAFFOLD averages clipped gradients alone"
            raise ConfigError(text, public=text)
        return {}


class ScaffoldLearner(ReportLearner):
    """Adds c - c_i to every gradient and sets c_i to the mean of the task's gradients (see the module)."""

    def __init__(self, *, scaffold: ScaffoldConfig, **others: Any):
        super().__init__(**others)
        self._sgd = scaffold.optimizer == "sgd"
        self._c: dict[str, torch.Tensor] = {}
        self._c_i: dict[str, torch.Tensor] = {}
        self._sum: dict[str, torch.Tensor] = {}
        self._batches = 0

    def shared_optimizer(self, parameters: Sequence[nn.Parameter], epochs: float) -> torch.optim.Optimizer:
        if not self._sgd:
            return super().shared_optimizer(parameters, epochs)
        rate = self.rate * self.training.lr
        return torch.optim.SGD(parameters, lr=rate, weight_decay=self.training.weight_decay)

    def load_shared(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load c too, which comes down with the weights of a training task."""
        self._c = without_prefix(weights, PREFIX)
        super().load_shared({name: v for name, v in weights.items() if not name.startswith(PREFIX)})

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        """As :class:`.ReportLearner`; the update holds the change of c_i too."""
        self._sum, self._batches = {}, 0
        trained = super().train(*args, **kwargs)
        control = {name: value / self._batches for name, value in self._sum.items()}
        change = {f"{PREFIX}{n}": value - self._c_i.get(n, torch.zeros_like(value)) for n, value in control.items()}
        self._c_i = control
        return replace(trained, update={**trained.update, **change})

    def after_backward(self, start: Mapping[str, torch.Tensor]) -> None:
        """Clip, then ``grad += c - c_i``; a batch whose gradient is not finite is skipped and does not count in c_i."""
        parameters = self.shared_parameters
        torch.nn.utils.clip_grad_norm_(parameters.values(), self.training.max_grad_norm or math.inf)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
            return
        self._batches += 1
        for name, gradient in gradients.items():
            seen = gradient.detach().float().cpu().clone()
            correction = self._c[name] - self._c_i.get(name, torch.zeros_like(seen))
            self._sum[name] = self._sum[name] + seen if name in self._sum else seen
            parameters[name].grad = gradient + correction.to(gradient)

    def private(self) -> dict[str, torch.Tensor]:
        return {f"{PREFIX}{name}": value for name, value in self._c_i.items()}

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        self._c_i = without_prefix(state, PREFIX)


METHOD = FEDAVG.derive(
    "scaffold",
    "SCAFFOLD on pooled visits",
    contract={
        "groups": (*FEDAVG.contract.groups, CONTROL),
        "tasks": (
            handshake,
            replace(train, down=(*train.down, CONTROL.name), up=(*train.up, CONTROL.name)),
            close_round,
        ),
        "stays": "patients, images, reports, the site's own control variate",
        "caution": "control variates are plain means of gradients; many of them can give those of single visits",
    },
    server=ScaffoldServer,
    site=ScaffoldSite,
    learner=ScaffoldLearner,
    settings={"scaffold": ScaffoldConfig},
    paper="https://arxiv.org/abs/1910.06378",
)
