"""FedMedian: FedAvg with the coordinate-wise median in place of the mean, which no single site can drag away.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML 2018), Algorithm 1.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from fedtar_flare.core.settings import Settings
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import FedAvgServer
from fedtar_flare.protocol.exchange import Tensors, euclidean_norm
from fedtar_flare.record.events import Event
from fedtar_flare.reporting.format import significant
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, table
from fedtar_flare.runtime.aggregation import SpilledUpdates
from fedtar_flare.runtime.exchange import Answers


class MedianConfig(Settings):
    """The server's step."""

    step_size: float = Field(1.0, gt=0, le=2, description="what the median is multiplied by before it is added")


class Median(Event):
    """One exchange: the norm of the median that was added, and of the mean that would have been."""

    kind: ClassVar[str] = "median"
    round: int
    median_norm: float
    mean_norm: float


def median(columns: torch.Tensor) -> torch.Tensor:
    """The median over sites of each value, (sites, values) to (values,); of two in the middle, their mean."""
    ordered, n = columns.sort(0).values, len(columns)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


class FedMedianServer(FedAvgServer):
    """FedMedian at the server."""

    def aggregate(self, updates: SpilledUpdates, shares: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """The coordinate-wise median, in which every site counts the same."""
        self.mean_norm = euclidean_norm(updates.mean(shares))
        return updates.reduce(median)

    def merge(self, w: Tensors, aggregate: Tensors, answers: Answers) -> Tensors:
        """``w + step_size * median``."""
        number = next(reply.round for reply in answers.replies.values())
        self.run.record.write(Median(round=number, median_norm=euclidean_norm(aggregate), mean_norm=self.mean_norm))
        rate = self.settings.server.step_size
        return super().merge(w, {name: rate * value for name, value in aggregate.items()}, answers)


def medians(run: Run) -> Section:
    """The norm of each median beside that of the mean."""
    rows = [(str(e.round), significant(e.median_norm), significant(e.mean_norm)) for e in run.events(Median)]
    lead = (
        "The median of the sites' updates is added in place of their mean. A mean that is far longer than the median "
    )
    lead += "is pulled by few sites."
    return Section("medians", "Medians", lead, table(("round", "norm of the median", "norm of the mean"), rows))


METHOD = FEDAVG.derive(
    "fedmedian",
    "Coordinate-wise median of updates",
    paper="https://arxiv.org/abs/1803.01498",
    server=FedMedianServer,
    server_settings=MedianConfig,
    events=(Median,),
    sections=(medians,),
)
