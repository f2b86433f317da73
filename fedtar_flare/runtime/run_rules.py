"""What a site holds a run to, whatever its method: initial weights at the start alone, one exchange, one timeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fedtar_flare.errors import ExchangeError
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.messages import MAX_ROUNDS, MAX_STEPS, TaskHeader, version
from fedtar_flare.protocol.tasks import ADAPTER, HANDSHAKE, PARAMETERS
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.learning.training import Trained

Tensors = Mapping[str, torch.Tensor]

LAST = version(MAX_ROUNDS, MAX_STEPS)
"""Later than any version of a site's state."""


def require_start(header: TaskHeader, weights: Tensors, state: SiteState) -> None:
    """Refuse (:class:`ExchangeError`) to give initial weights anywhere but at the start of a run."""
    begun = state.latest(LAST) not in (None, version(0, 0)) or set(state.answered()) - {HANDSHAKE}
    if begun or header.member or header.after != version(0, 0):
        raise ExchangeError("initial weights are asked for in the middle of a run; only untrained ones leave")
    if weights:
        raise ExchangeError("weights came down with the wish for initial ones; only those of the seed leave")


def require_exchange(contract: Contract, task: str, state: SiteState, weights: Tensors) -> None:
    """Refuse (:class:`ExchangeError`) weights that are not the run's exchange, before any of them is kept.

    Tensors of a method's other groups are left to its learner, which loads them or refuses them.
    """
    groups = [contract.group(name) for name in contract.task(task).down]
    others = [group for group in groups if group.name not in (ADAPTER.name, PARAMETERS.name)]
    if groups and (schema := state.schema()) is not None:
        agreed = dict(schema.shapes)
        names = [n for n in weights if n in agreed or not any(group.holds(n) for group in others)]
        schema.check({name: weights[name] for name in names})


def timeline_of(data: DataConfig, header: TaskHeader) -> str:
    """How visits become time steps, as one text."""
    timeline = data.timeline(header.time_steps)
    return " ".join([timeline.alignment, *(date.isoformat() for date in timeline.periods)])


def told_of(
    result: Trained, counts: Sequence[int], steps: int | Collection[int] | None, least: int
) -> dict[str, float]:
    """Numbers of a training reply: visits as they may be told, and no loss of fewer than ``least`` patients.

    ``counts`` are the visits per time step, as they may be told; ``steps`` None takes them all.
    """
    among = range(1, len(counts) + 1) if steps is None else [steps] if isinstance(steps, int) else steps
    numbers = {
        "samples": float(sum(counts[step - 1] for step in among)),
        "train_loss": result.loss,
        "skipped_updates": float(result.skipped_updates),
    }
    if result.first_patients >= least:
        numbers["first_loss"] = result.first_loss
    if result.last_patients >= least:
        numbers["last_loss"] = result.last_loss
    return numbers
