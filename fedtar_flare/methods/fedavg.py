"""FedAvg: the sites' visits of all time steps are pooled, and the mean update is added whole.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), Algorithm
1, on the shared low-rank adapter: ``w <- w + sum_k (n_k / N) (w_k - w)``. A round has T exchanges, as FedTAR's has.
"""

from collections.abc import Collection, Sequence

from fedtar_flare.protocol.contract import ADAPTER, PARAMETERS, Contract, close_round, handshake, train
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.registry import Method
from fedtar_flare.runtime.exchange import Answers
from fedtar_flare.runtime.recipe import PRESETS
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.runtime.server_strategy import ServerStrategy
from fedtar_flare.runtime.task import Task
from fedtar_flare.runtime.training import ProductMean

__all__ = ["METHOD", "FedAvgServer", "PooledSite"]


class FedAvgServer(ServerStrategy):
    """FedAvg at the server; arguments as :class:`.ServerStrategy`, hooks :meth:`merge` and :meth:`after_exchange`."""

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """T exchanges, or one for each period so far; each replaces w by the weighted mean of the sites' weights."""
        for t in self.steps(r):
            aggregate, answers = self.run.train(w, r, t)
            self.after_exchange(t, answers)
            if aggregate is not None:
                w = self.merge(w, aggregate, answers)
        self.run.close_round(w, r)
        return w

    def after_exchange(self, t: int, answers: Answers) -> None:
        """Use the sites' answers of an exchange, before their aggregate is merged; by default nothing.

        Parameters
        ----------
        t : int
            The exchange within the round, from 1.
        answers : Answers
            Replies by site, and why sites are missing.
        """

    def merge(self, w: Tensors, aggregate: Tensors, answers: Answers) -> Tensors:
        """Add the aggregate of the sites' updates to the weights.

        Parameters
        ----------
        w : Tensors
            The weights that went down, float32 by name.
        aggregate : Tensors
            Aggregate of the sites' updates (differences from ``w``), float64, by the names of ``w`` and of
            :meth:`extra_tensors`.
        answers : Answers
            The sites' replies.

        Returns
        -------
        Tensors
            The weights after the exchange, float32, by the names of ``w``.
        """
        if isinstance(aggregate, ProductMean):
            return aggregate.step(w)[0]
        return {name: (w[name].double() + aggregate[name]).float() for name in sorted(w)}

    def trained_visits(self, counts: Sequence[int], r: int, t: int) -> int:
        return sum(counts)  # a site pools the visits of all steps


class PooledSite(ReportSite):
    """A site that trains on the visits of all time steps together; arguments as :class:`.ReportSite`."""

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
