"""Local-only: every site trains its own adapter on its own visits, and no weight leaves it.

It shows whether joining a federation pays: pooled visits and as many local updates. The common start comes with the
handshake, or each site makes it from the seed; then no weights travel. The server counts rounds and asks for scores.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.protocol.contract import close_round, handshake, train


class LocalLearner(ReportLearner):
    """Holds the adapter as private state of the site; it begins with the common start of the handshake."""

    def private(self) -> dict[str, torch.Tensor]:
        return super().private() | self.shared()

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_private(state)
        self.load_shared({name: state[name] for name in self.shared()})


METHOD = FEDAVG.derive(
    "local",
    "Local training alone",
    contract={
        "tasks": (handshake, replace(train, down=(), up=(), sends="nothing"), replace(close_round, down=())),
        "stays": "patients, images, reports, and every weight after the common start",
    },
    learner=LocalLearner,
    paper="",
)
