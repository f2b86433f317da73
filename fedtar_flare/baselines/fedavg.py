"""FedAvg: the sites' visits of all time steps are pooled, and the mean update is added whole.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), Algorithm
1, on the shared low-rank adapter: ``w <- w + sum_k (n_k / N) (w_k - w)``. A round has T exchanges, so that R rounds
cost as many exchanges and local updates as FedTAR's.
"""

from __future__ import annotations

from collections.abc import Callable

from fedtar_flare.flare.controller import MethodController
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.flare.report_executor import ReportExecutor
from fedtar_flare.flare.tasking import Answers, Tensors
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.protocol.tasks import ADAPTER, PARAMETERS, close_round, handshake, train

CONTRACT = Contract(
    method="fedavg",
    title="FedAvg on pooled visits",
    groups=(ADAPTER, PARAMETERS),
    tasks=(handshake, train, close_round),
    server_classes=("fedtar_flare.baselines.fedavg.FedAvgController",),
    site_classes=("fedtar_flare.baselines.fedavg.PooledExecutor",),
    stays="patients, images, reports",
)


class FedAvgController(MethodController):
    """FedAvg at the server; arguments as :class:`MethodController`. A rival may override :meth:`merge`."""

    contract = CONTRACT

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """T exchanges, each of which replaces w by the weighted mean of the sites' weights."""
        for t in range(1, self.time_steps + 1):
            mean, answers = self.train(w, r, t)
            if mean is not None:
                w = self.merge(w, mean, answers)
        self.close_round(w, r)
        return w

    def merge(self, w: Tensors, mean: Tensors, answers: Answers) -> Tensors:
        """The weights after an exchange, given the mean of the sites' differences (float64)."""
        return {name: (w[name].double() + mean[name]).float() for name in sorted(w)}

    def trained_visits(self, r: int, t: int) -> Callable[[list[int]], int]:
        """All of a site's training visits."""
        return sum


class PooledExecutor(ReportExecutor):
    """Trains the shared adapter on the visits of all time steps together; arguments as :class:`ReportExecutor`."""

    contract = CONTRACT

    def visits_of(self, header: TaskHeader) -> int | None:
        """All steps together."""
        return None


class FedAvgRecipe(MethodRecipe):
    """The job of FedAvg; arguments as :class:`MethodRecipe`."""

    contract = CONTRACT
    controller_class = FedAvgController
    executor_class = PooledExecutor
