"""What a site minimises when it tunes its module, beside the cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

Objective = Literal["plain", "proximal", "frozen_a", "head_only", "maml", "distil", "fisher"]

TEMPERATURE = 2.0
"""Of the distillation."""


@dataclass(frozen=True)
class Local:
    """A plan's local part.

    Args:
        objective: ``plain``; ``proximal``: plus mu / 2 times the squared distance to the start (FedProx); ``frozen_a``:
            LoRA's A stays (FFA-LoRA); ``head_only``: the adapter stays; ``maml``: an update takes the gradient of the
            second half of its batch after one plain step, of the same size, on the first (first-order MAML, as in
            Per-FedAvg); ``distil``: plus the distillation of the start (FLwF);
            ``fisher``: plus the distance to all sites' latest modules, weighted by their Fisher information (FedCurv).
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

IMPORTANCE, PULL = "importance.", "pull."
"""Before a tensor's name on the wire: its Fisher information, and that times the tensor."""


@dataclass(frozen=True)
class Curvature:
    """Sums over the sites' latest modules, by tensor name: ``importance`` F = sum_j F_j, ``pull`` = sum_j F_j theta_j.

    FedCurv leaves a site's own module out of its sum; here it is in, so that all sites get one message and a site needs
    nothing of what it sent before.
    """

    importance: Mapping[str, Tensor]
    pull: Mapping[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """As they go down, each with a leading axis of 1."""
        found = {f"{IMPORTANCE}{name}": value[None] for name, value in self.importance.items()}
        return found | {f"{PULL}{name}": value[None] for name, value in self.pull.items()}


def split_curvature(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Curvature | None]:
    """Tensors that came down without those of a curvature, and it; None where there is none."""
    plain = {name: value for name, value in tensors.items() if not name.startswith((IMPORTANCE, PULL))}
    if len(plain) == len(tensors):
        return plain, None
    parts = (
        {n.removeprefix(prefix): value[0] for n, value in tensors.items() if n.startswith(prefix)}
        for prefix in (IMPORTANCE, PULL)
    )
    return plain, Curvature(*parts)


def add_curvature(gradients: Mapping[str, Tensor], theta: Mapping[str, Tensor], curvature: Curvature) -> None:
    """``g += F theta - pull`` in place: the gradient of FedCurv's term, of weight 1::

    1 / 2 sum_j (theta - theta_j)^T F_j (theta - theta_j)
    """
    for name, gradient in gradients.items():
        importance, pull = (part[name].to(gradient) for part in (curvature.importance, curvature.pull))
        gradient.add_(importance * theta[name].detach() - pull)


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
