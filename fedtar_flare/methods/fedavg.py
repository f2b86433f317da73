"""FedAvg: the sites' visits of all time steps are pooled, and the mean update is added whole.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), Algorithm
1, on the shared low-rank adapter: ``w <- w + sum_k (n_k / N) (w_k - w)``. A round has T exchanges, so that R rounds
cost as many exchanges and local updates as FedTAR's.
"""

from collections.abc import Callable, Collection

from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.tasks import ADAPTER, PARAMETERS, close_round, handshake, train
from fedtar_flare.registry import Method
from fedtar_flare.runtime.lora_mean import ProductMean
from fedtar_flare.runtime.recipe import PRESETS
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.runtime.server_strategy import ServerStrategy
from fedtar_flare.runtime.task import Task
from fedtar_flare.runtime.tasking import Answers, Tensors


class FedAvgServer(ServerStrategy):
    """FedAvg at the server; a rival may override :meth:`merge`."""

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """T exchanges, or one for each period so far; each replaces w by the weighted mean of the sites' weights."""
        for t in self.steps(r):
            mean, answers = self.run.train(w, r, t)
            self.after_exchange(t, answers)
            if mean is not None:
                w = self.merge(w, mean, answers)
        self.run.close_round(w, r)
        return w

    def after_exchange(self, t: int, answers: Answers) -> None:
        """Called with what the sites answered at exchange t, before it is merged."""

    def merge(self, w: Tensors, mean: Tensors, answers: Answers) -> Tensors:
        """The weights after an exchange, given the mean of the sites' differences (float64)."""
        if isinstance(mean, ProductMean):
            return mean.step(w)[0]
        return {name: (w[name].double() + mean[name]).float() for name in sorted(w)}

    def trained_visits(self, r: int, t: int) -> Callable[[list[int]], int]:
        """All of a site's training visits."""
        return sum


class PooledSite(ReportSite):
    """A site that trains on the visits of all time steps together."""

    def steps_of(self, task: Task) -> int | Collection[int] | None:
        """All steps together."""
        return None


METHOD = Method(
    contract=Contract(
        method="fedavg",
        title="FedAvg on pooled visits",
        groups=(ADAPTER, PARAMETERS),
        tasks=(handshake, train, close_round),
        stays="patients, images, reports",
    ),
    server=FedAvgServer,
    site=PooledSite,
    paper="https://arxiv.org/abs/1602.05629",
    presets=PRESETS,
    mixes_ranks=True,
)
