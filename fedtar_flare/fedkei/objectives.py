"""What a site minimises when it tunes its module, beside the cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

Objective = Literal["plain", "proximal", "frozen_a", "head_only", "maml", "distil"]

TEMPERATURE = 2.0
"""Of the distillation."""


@dataclass(frozen=True)
class Local:
    """A plan's local part.

    Args:
        objective: ``plain``; ``proximal``: plus mu / 2 times the squared distance to the start (FedProx); ``frozen_a``:
            LoRA's A stays (FFA-LoRA); ``head_only``: the adapter stays; ``maml``: an update takes the gradient of the
            second half of its batch after one plain step, of the same size, on the first (first-order MAML, as in
            Per-FedAvg); ``distil``: plus the distillation of the start (FLwF).
        extra_epochs: of tuning, beyond the settings'.
    """

    objective: Objective = "plain"
    extra_epochs: int = 0

    def trains(self, name: str) -> bool:
        """Whether a tensor of the module is tuned, by its name on the wire."""
        if self.objective == "frozen_a":
            return ".lora_A." not in name
        return self.objective != "head_only" or name.startswith("head.")


PLAIN = Local()


def add_proximal(
    gradients: Mapping[str, Tensor], theta: Mapping[str, Tensor], start: Mapping[str, Tensor], mu: float
) -> None:
    """``g += mu (theta - start)`` in place: the gradient of mu / 2 times the squared distance."""
    for name, gradient in gradients.items():
        gradient.add_(theta[name].detach() - start[name], alpha=mu)


def distillation(logits: Tensor, taught: Tensor) -> Tensor:
    """``tau^2 KL(teacher || student)``, mean over the batch, of logits (B, 2) at temperature tau = 2."""
    student, teacher = (F.log_softmax(one / TEMPERATURE, dim=1) for one in (logits, taught))
    return TEMPERATURE**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
