"""Local-only: every site trains its own adapter on its own visits, and no weight leaves it.

It decides whether joining pays: pooled visits and as many local updates as in the federation. The common start comes
with the handshake, or each site makes it from the seed; after that no weights travel. The server keeps the round's
time and asks for scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.protocol.tasks import close_round, handshake, train

if TYPE_CHECKING:
    from fedtar_flare.learning.learner import ReportLearner

CONTRACT = replace(
    FEDAVG,
    method="local",
    title="Local training alone",
    tasks=(handshake, replace(train, down=(), up=(), sends="nothing"), replace(close_round, down=())),
    server_classes=("fedtar_flare.baselines.local.LocalController",),
    site_classes=("fedtar_flare.baselines.local.LocalExecutor",),
    stays="patients, images, reports, and every weight after the common start",
)


class LocalController(FedAvgController):
    """Local-only at the server: asks for training and scores; the weights that it holds stay the common start."""

    contract = CONTRACT


class LocalExecutor(PooledExecutor):
    """Local-only at a site: its adapter is private state."""

    contract = CONTRACT

    def learner_class(self) -> type[ReportLearner]:
        from fedtar_flare.baselines.learners import LocalLearner

        return LocalLearner


class LocalRecipe(MethodRecipe):
    """The job of local-only; arguments as :class:`MethodRecipe`."""

    contract = CONTRACT
    controller_class = LocalController
    executor_class = LocalExecutor
