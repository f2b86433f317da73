"""Pieces of local training: what it gives, batches, and the optimiser with its state."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedtar_flare.core.draws import orders
from fedtar_flare.core.errors import DataError
from fedtar_flare.core.files import without_prefix

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_PREFIX = "adamw/"


@dataclass(frozen=True)
class Trained:
    """What one training task gave."""

    update: dict[str, Tensor]
    """W_k - w_{t-1} by name, float32."""
    samples: int
    """N_k, training visits of this site at this step."""
    loss: float
    """Mean token loss over the local updates (:attr:`ReportLearner.loss_updates`)."""
    updates: int = 0
    """Made or skipped: all that were planned, unless ``training.seconds`` is up."""
    skipped_updates: int = 0
    """Left out because their loss or gradient was not finite."""
    patients: int = 0
    """Distinct ones that the updates were made from."""
    loss_patients: int = 0
    """Distinct patients behind the loss."""
    loss_visits: int = 0
    """Visits behind the loss."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers that the method's contract declares."""


@dataclass(frozen=True)
class Validated:
    """What validation gave: the mean loss of the reports (of their tokens), its gradient in w by name, their number."""

    loss: float
    gradient: dict[str, Tensor]
    reports: int


def batches(samples: int, size: int, count: int, seed: int, least: int = 1) -> Iterator[list[int]]:
    """Draw batches of indices through shuffled epochs; a last one of fewer than ``least`` joins the one before."""
    epochs, order = orders(samples, seed), list[int]()
    for _ in range(count):
        order = order or next(epochs)
        end = size if len(order) - size >= least else len(order)
        yield order[:end]
        order = order[end:]


def parts(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Cut a sequence into parts of a size; the last may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def retry_smaller_batch(size: int, run: Callable[[int], _Result]) -> _Result:
    """``run(size)``, again with half the size until memory holds it; DataError (``out-of-memory``) at one report."""
    while True:
        try:
            return run(size)
        except torch.OutOfMemoryError:
            pass  # until here the exception's frames keep the tensors of the failed attempt
        if size == 1:
            text = "the GPU's memory does not hold one report; take a smaller model, or device: cpu in the site file"
            raise DataError(text, reason="out-of-memory")
        torch.cuda.empty_cache()
        size //= 2
        logger.warning("out of GPU memory: going on with micro-batches of %d reports (same result)", size)


def adamw(parameters: Sequence[Any], **settings: Any) -> torch.optim.AdamW:
    """Make AdamW of parameters or of groups of them; one kernel for all where they are on a GPU."""
    tensors: list[Tensor] = []
    for item in parameters:
        tensors += item["params"] if isinstance(item, dict) else [item]
    return torch.optim.AdamW(parameters, fused=any(map(attrgetter("is_cuda"), tensors)) or None, **settings)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's state of these parameters, as ``adamw/<field>/<parameter>``; empty before the first step."""
    return {
        f"{_PREFIX}{key}/{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Replace AdamW's state by what :func:`optimizer_state` gave; other names in ``state`` are ignored."""
    optimizer.state.clear()
    for key, value in without_prefix(state, _PREFIX).items():
        field, name = key.split("/", 1)
        parameter = parameters[name]
        # AdamW keeps its step counts on the CPU, unless it is fused
        stays = field == "step" and not optimizer.defaults.get("fused")
        optimizer.state[parameter][field] = (value if stays else value.to(parameter.device)).clone()


def require_finite(state: Mapping[str, Tensor]) -> None:
    """Refuse a private state with NaN or infinity: saved, it would spoil every later task."""
    for name, value in state.items():
        if not torch.isfinite(value).all():
            text = f"after training, {name} has values that are not finite; nothing was saved: lower the learning rate"
            raise DataError(text, reason="non-finite-state")
