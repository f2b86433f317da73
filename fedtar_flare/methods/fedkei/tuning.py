"""How a site tunes a module: its settings, and the local epochs by SGD on what a plan's local objective trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedtar_flare.errors import DataError
from fedtar_flare.learning.training import limit_norm, parts
from fedtar_flare.methods.fedkei.examples import Examples, shuffled
from fedtar_flare.methods.fedkei.model import TaskModel
from fedtar_flare.methods.fedkei.objectives import Curvature, Local, add_curvature, add_proximal, distillation
from fedtar_flare.settings import Settings

logger = logging.getLogger(__name__)


class LearnerSettings(Settings):
    """How a site learns; part of a job's settings (a method's config derives from it)."""

    epochs: int = Field(5, ge=1, description="E of tuning")
    batch_size: int = Field(16, ge=1, le=1024, description="of tuning and of the inner loop")
    lr: float = Field(0.05, gt=0, description="of SGD, tuning")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD, tuning")
    eta_in: float = Field(0.05, gt=0, description="step size of alpha (Eq. 6)")
    mu: float = Field(0.01, ge=0, description="weight of FedProx' term")
    safeguard: Literal["off", "validation"] = Field(
        "off", description="'validation': start from the common start where the mixture's validation loss is worse"
    )


@dataclass
class Tuned:
    """Mean loss of each epoch's updates, and how many updates were left out because they were not finite."""

    losses: list[float] = field(default_factory=list)
    skipped: int = 0


def tune(
    model: TaskModel,
    settings: LearnerSettings,
    examples: Examples,
    local: Local,
    tuned: Tuned,
    clock: Callable[[str], AbstractContextManager[None]],
    *key: object,
    curvature: Curvature | None = None,
) -> Iterator[int]:
    """Tune the module that is loaded; yields each epoch's number, from 1, after it, and fills ``tuned``.

    Args:
        curvature: for the objective ``fisher``; None: no term.
        clock: times a phase; everything here is its ``tuning``.
        key: what the order of the examples depends on.

    Raises:
        DataError: ``non-finite-gradient`` where every update of an epoch was left out.
    """
    own = {name: p for name, p in model.parameters().items() if local.trains(name)}
    start = {name: parameter.detach().clone() for name, parameter in own.items()}
    optimizer = torch.optim.SGD(own.values(), lr=settings.lr, momentum=settings.momentum)
    with clock("tuning"):
        taught = _taught(model, examples) if local.objective == "distil" else None
    for epoch in range(1, settings.epochs + local.extra_epochs + 1):
        with clock("tuning"):
            losses: list[float] = []
            for batch in shuffled(range(len(examples.labels)), settings.batch_size, *key, "tune", epoch):
                loss, gradients = _gradients(model, examples, batch, own, local, taught, settings.lr)
                if local.objective == "proximal":
                    add_proximal(gradients, own, start, settings.mu)
                if curvature is not None and local.objective == "fisher":
                    add_curvature(gradients, own, curvature)
                for name, parameter in own.items():
                    parameter.grad = gradients[name]
                if not math.isfinite(loss) or not math.isfinite(limit_norm(list(own.values()), 0)):
                    tuned.skipped += 1
                    continue
                optimizer.step()
                losses.append(loss)
            optimizer.zero_grad(set_to_none=True)
            if not losses:
                raise DataError(
                    f"no update of epoch {epoch} had a finite loss and gradient; lower the learning rate",
                    reason="non-finite-gradient",
                )
            tuned.losses.append(sum(losses) / len(losses))
        yield epoch
    if tuned.skipped:
        logger.warning("%d local updates were left out: their loss or gradient was not finite", tuned.skipped)


def _gradients(
    model: TaskModel,
    examples: Examples,
    batch: Sequence[int],
    own: Mapping[str, nn.Parameter],
    local: Local,
    taught: Tensor | None,
    lr: float,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient that an update takes; without the proximal term."""
    names = list(own)
    if local.objective == "maml" and len(batch) > 1:
        half = (len(batch) + 1) // 2
        _, first = model.gradients(examples, batch[:half], names)
        before = {name: parameter.detach().clone() for name, parameter in own.items()}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.sub_(first[name], alpha=lr)
        found = model.gradients(examples, batch[half:], names)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(before[name])
        return found
    if taught is not None:
        logits = model.logits(examples, batch)
        truth = examples.labels[list(batch)].to(logits.device)
        loss = nn.functional.cross_entropy(logits, truth) + distillation(logits, taught[list(batch)])
        return float(loss.detach()), dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
    return model.gradients(examples, batch, names)


@torch.no_grad()
def _taught(model: TaskModel, examples: Examples) -> Tensor | None:
    """The start's logits (n, 2) of the training examples; None of the common start, which knows nothing to teach."""
    if all(torch.equal(value, model.start[name]) for name, value in model.state().items()):
        return None
    everything = range(len(examples.labels))
    return torch.cat([model.logits(examples, part) for part in parts(everything, 64)])
