"""SCAFFOLD: FedAvg whose local gradients are corrected by control variates, against the drift of unlike sites.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML 2020), Algorithm 1. Site i
adds c - c_i to each local gradient, and afterwards sets c_i to the mean of its K uncorrected local gradients::

    c_i+ = (1 / K) sum_j g_i(y_j)          which under plain SGD is option II: c_i - c + (x - y_i) / (K lr)
    x <- x + server_lr sum_i p_i (y_i - x)
    c <- c + sum_i p_i (c_i+ - c_i)        over the sites that answered

p_i are the shares by ``weighting`` of all sites (1 / N, the paper's, with ``uniform``). c_i is private and stays at the
site, c goes down with the weights, and the change of c_i comes up with the update: twice the bytes of FedAvg.

The local optimiser is AdamW by default, as in every method here. There (x - y_i) / (K lr) would be a mean of normalised
steps, of another unit than the gradients that it corrects, and so the mean of the gradients takes its place. AdamW
rescales the corrected gradient in each coordinate, so that the correction turns the local steps and does not cancel the
drift exactly as the paper's analysis has it. ``scaffold.optimizer=sgd`` is the paper's own local step; its learning
rate, ``training.lr``, must then be much larger.

An update that comes too late or is refused leaves the site's c_i ahead of the server's c until it is trained again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from fedtar_flare.baselines.control import CONTROL, PREFIX
from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.errors import ConfigError
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.flare.tasking import Answers, Tensors
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.protocol.tasks import TRAIN
from fedtar_flare.settings import Settings, build
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.learning.learner import ReportLearner

CONTRACT = replace(
    FEDAVG,
    method="scaffold",
    title="SCAFFOLD on pooled visits",
    groups=(*FEDAVG.groups, CONTROL),
    tasks=tuple(
        replace(t, down=(*t.down, CONTROL.name), up=(*t.up, CONTROL.name)) if t.name == TRAIN else t
        for t in FEDAVG.tasks
    ),
    server_classes=("fedtar_flare.baselines.scaffold.ScaffoldController",),
    site_classes=("fedtar_flare.baselines.scaffold.ScaffoldExecutor",),
    stays="patients, images, reports, the site's own control variate",
)


class ScaffoldConfig(Settings):
    """SCAFFOLD at a site."""

    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="local optimiser of the shared part")


class ScaffoldController(FedAvgController):
    """SCAFFOLD at the server, with c (float64) in the checkpoint.

    Args:
        server_lr: the paper's eta_g.
        args, kwargs: of :class:`MethodController`; FLARE's export finds its parameters by these two names.
    """

    contract = CONTRACT

    def __init__(self, *args: Any, server_lr: float = 1.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not (math.isfinite(server_lr) and server_lr > 0):
            raise ConfigError(f"server_lr must be a positive number, not {server_lr!r}")
        self.server_lr = server_lr
        self._control: dict[str, torch.Tensor] = {}

    def beside(self, w: Tensors) -> Tensors:
        """c, at first 0."""
        if not self._control:
            self._control = {f"{PREFIX}{name}": torch.zeros_like(w[name], dtype=torch.float64) for name in sorted(w)}
        return self._control

    def merge(self, w: Tensors, mean: Tensors, answers: Answers) -> Tensors:
        """The steps of x and of c; the latter by the share of the sites that answered."""
        visits = {site: sum(self._counts[site]["train"]) for site in self.sites}
        counts = {site: max(n, site in answers.replies) for site, n in visits.items()}
        shares = self.shares_of({site: n for site, n in counts.items() if n})
        answered = math.fsum(shares[site] for site in answers.replies)
        self._control = {name: c + answered * mean[name] for name, c in self._control.items()}
        return super().merge(w, {name: self.server_lr * mean[name] for name in w}, answers)

    def method_settings(self) -> dict[str, Any]:
        return {"server_lr": self.server_lr}

    def method_state(self) -> dict[str, torch.Tensor]:
        """c."""
        return dict(self._control)

    def load_method_state(self, state: Tensors) -> None:
        self._control = dict(state)


class ScaffoldExecutor(PooledExecutor):
    """SCAFFOLD at a site; takes ``scaffold`` (:class:`ScaffoldConfig`) beside the arguments of :class:`ReportExecutor`.

    Raises :class:`ConfigError` where parameters travel whole: control variates are of the adapter alone.
    """

    contract = CONTRACT

    def __init__(self, *args: Any, scaffold: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.scaffold = scaffold
        self.scaffold_config = build(ScaffoldConfig, scaffold, "scaffold")
        if self.lora_config.exchange:
            raise ConfigError(
                f"lora: exchange is {list(self.lora_config.exchange)}: SCAFFOLD has control variates for the adapter "
                "alone; leave it empty, or warm-start these parameters (fedtar warmstart)"
            )

    def method_settings(self) -> tuple[Any, ...]:
        return (self.scaffold_config,)

    def learner_class(self) -> type[ReportLearner]:
        from fedtar_flare.baselines.learners import ScaffoldLearner

        return ScaffoldLearner

    def learner_settings(self, header: TaskHeader, state: SiteState) -> dict[str, Any]:
        return {"optimizer": self.scaffold_config.optimizer}


class ScaffoldRecipe(MethodRecipe):
    """The job of SCAFFOLD; beside the arguments of :class:`MethodRecipe` it takes ``scaffold``."""

    contract = CONTRACT
    controller_class = ScaffoldController
    executor_class = ScaffoldExecutor
    own_groups = ("scaffold",)
