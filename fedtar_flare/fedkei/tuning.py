"""The local epochs of ADAPT: SGD on what a plan's local objective trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedtar_flare.errors import DataError
from fedtar_flare.fedkei.examples import Examples, shuffled
from fedtar_flare.fedkei.objectives import Local, add_proximal, distillation
from fedtar_flare.learning.training import limit_norm, parts
from fedtar_flare.models.adapters.lora import shared_parameters

if TYPE_CHECKING:
    from fedtar_flare.fedkei.learner import TaskLearner

logger = logging.getLogger(__name__)


@dataclass
class Tuned:
    """Mean loss of each epoch's updates, and how many updates were left out because they were not finite."""

    losses: list[float] = field(default_factory=list)
    skipped: int = 0


def tune(
    learner: TaskLearner,
    examples: Examples,
    task: int,
    local: Local,
    tuned: Tuned,
    clock: Callable[[str], AbstractContextManager[None]],
) -> Iterator[int]:
    """Tune the module that is loaded; yields each epoch's number, from 1, after it. ``tuned`` is filled.

    Raises:
        DataError: ``non-finite-gradient`` where every update of an epoch was left out.
    """
    settings = learner.settings
    own = {name: p for name, p in shared_parameters(learner.model).items() if local.trains(name)}
    start = {name: parameter.detach().clone() for name, parameter in own.items()}
    optimizer = torch.optim.SGD(
        own.values(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    with clock("tuning"):
        taught = _taught(learner, examples) if local.objective == "distil" else None
    everything = range(len(examples.labels))
    for epoch in range(1, settings.epochs + local.extra_epochs + 1):
        with clock("tuning"):
            losses: list[float] = []
            for batch in shuffled(everything, settings.batch_size, learner.seed, task, "tune", epoch):
                loss, gradients = _gradients(learner, examples, batch, own, local, taught)
                if local.objective == "proximal":
                    add_proximal(gradients, own, start, settings.mu)
                for name, parameter in own.items():
                    parameter.grad = gradients[name]
                if not torch.isfinite(torch.tensor([loss, limit_norm(list(own.values()), 0)])).all():
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
    learner: TaskLearner,
    examples: Examples,
    batch: Sequence[int],
    own: Mapping[str, nn.Parameter],
    local: Local,
    taught: Tensor | None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient that an update takes; without the proximal term."""
    if local.objective == "maml" and len(batch) > 1:
        half = (len(batch) + 1) // 2
        _, first = learner.gradients(examples, batch[:half], list(own))
        before = {name: parameter.detach().clone() for name, parameter in own.items()}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.sub_(first[name], alpha=learner.settings.lr)
        loss, gradients = learner.gradients(examples, batch[half:], list(own))
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(before[name])
        return float(loss), gradients
    if taught is not None:
        logits = learner.logits(examples, batch)
        truth = examples.labels[list(batch)].to(logits.device)
        whole = nn.functional.cross_entropy(logits, truth) + distillation(logits, taught[list(batch)])
        return float(whole.detach()), dict(zip(own, torch.autograd.grad(whole, list(own.values())), strict=True))
    loss, gradients = learner.gradients(examples, batch, list(own))
    return float(loss), gradients


@torch.no_grad()
def _taught(learner: TaskLearner, examples: Examples) -> Tensor:
    """The start's logits (n, 2) of the training examples."""
    everything = range(len(examples.labels))
    return torch.cat([learner.logits(examples, part) for part in parts(everything, learner.settings.batch_size)])
