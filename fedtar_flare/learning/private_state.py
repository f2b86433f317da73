"""What a method keeps at a site between tasks, as tensors by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedtar_flare.errors import DataError

_PREFIX = "adamw/"


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimiser's state of these parameters, as ``adamw/<field>/<parameter>``; empty before its first step."""
    return {
        f"{_PREFIX}{key}/{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Load what :func:`optimizer_state` gave; other names are ignored."""
    optimizer.state.clear()
    for key, value in state.items():
        if key.startswith(_PREFIX):
            field, name = key.removeprefix(_PREFIX).split("/", 1)
            parameter = parameters[name]
            # AdamW keeps its step counts on the CPU
            optimizer.state[parameter][field] = (value if field == "step" else value.to(parameter.device)).clone()


def require_finite(state: Mapping[str, Tensor]) -> None:
    """Raise DataError (``non-finite-state``) on NaN or infinity: a state saved with it would spoil every later task."""
    for name, value in state.items():
        if not torch.isfinite(value).all():
            raise DataError(
                f"after training, {name} has values that are not finite (NaN or infinity); nothing was saved. Lower "
                "the learning rate, or set a limit on the gradient norm",
                reason="non-finite-state",
            )
