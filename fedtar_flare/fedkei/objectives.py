"""What a site minimises when it tunes its module, beside the cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Objective = Literal["plain", "proximal", "frozen_a", "head_only", "maml"]


@dataclass(frozen=True)
class Local:
    """A plan's local part.

    Args:
        objective: ``plain``; ``proximal``: plus mu / 2 times the squared distance to the start (FedProx); ``frozen_a``:
            LoRA's A stays (FFA-LoRA); ``head_only``: the adapter stays; ``maml``: each update takes the gradient after
            one plain step of the same size on the first half of its batch, at the second half (first-order MAML).
        extra_epochs: epochs before the first counted one; they cost what FedKEI's start costs.
    """

    objective: Objective = "plain"
    extra_epochs: int = 0

    def trains(self, name: str) -> bool:
        """Whether a tensor of the module is tuned, by its name on the wire."""
        if self.objective == "frozen_a":
            return ".lora_A." not in name
        return self.objective != "head_only" or name.startswith("head.")


def add_proximal(gradients: Mapping[str, Tensor], theta: Mapping[str, Tensor], start: Mapping[str, Tensor], mu: float):
    """``g += mu (theta - start)`` in place: the gradient of mu / 2 times the squared distance."""
    for name, gradient in gradients.items():
        gradient.add_(theta[name].detach() - start[name], alpha=mu)
