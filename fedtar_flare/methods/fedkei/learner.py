"""FedKEI at one site, without FLARE: PROBE and ADAPT.

::

    PROBE   inner epoch from alpha0; v = gradient of the mean loss over the training split at C alpha'; G
    ADAPT   alpha (inner epoch from alpha0, other batches); theta = C alpha; E epochs of SGD, AUC on the test split at
            e = 0..E

ADAPT needs nothing of PROBE. Batches depend on the learner's seed, the task and the phase alone, so two plans that
start from equal centres end at equal bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.errors import DataError
from fedtar_flare.learning.training import require_finite
from fedtar_flare.methods.fedkei import hypergradient as hyper
from fedtar_flare.methods.fedkei.answers import Adapted, Clock, Probe
from fedtar_flare.methods.fedkei.examples import Examples, TaskData, require_both, shuffled
from fedtar_flare.methods.fedkei.hypergradient import InnerPath, Vectors
from fedtar_flare.methods.fedkei.mixing import Kind, origin_of
from fedtar_flare.methods.fedkei.mixture import AlphaMode
from fedtar_flare.methods.fedkei.model import TaskModel
from fedtar_flare.methods.fedkei.objectives import PLAIN, Curvature, Local
from fedtar_flare.methods.fedkei.tuning import LearnerSettings, Tuned, tune
from fedtar_flare.metrics.classification import auc
from fedtar_flare.models.adapters.lora import adapter_config
from fedtar_flare.models.classifier import ClassifierConfig


@dataclass(frozen=True)
class _Centres:
    """C less the origin (d, K), and the origin (d,), by kind."""

    columns: Vectors
    origin: Vectors

    def theta(self, alpha: Vectors) -> dict[Kind, Tensor]:
        """Eq. 5."""
        return self.shifted(hyper.combined(self.columns, alpha))

    def shifted(self, at: Vectors) -> dict[Kind, Tensor]:
        return {kind: self.origin[kind] + value for kind, value in at.items()}

    def equal(self) -> dict[Kind, Tensor]:
        """alpha0 = 1/K of each kind."""
        return {kind: c.new_full((c.shape[1],), 1 / c.shape[1]) for kind, c in self.columns.items()}


class TaskLearner(TaskModel):
    """How one site learns a task with its model; ``seed`` is of its batches, ``others`` are of :class:`TaskModel`."""

    def __init__(self, classifier: ClassifierConfig, settings: LearnerSettings, *, seed: int, **others: Any):
        super().__init__(classifier, **others)
        self.settings, self.seed = settings, seed

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's configuration of the adapter, without any path of the site."""
        return adapter_config(self.classifier)

    def scores_of(self, module: Mapping[str, Tensor], examples: Examples) -> Tensor:
        """Scores (n,) of the new disease in 0..1 of a module, float64, on the CPU."""
        self.load(module)
        return self.scores(examples)

    # ------------------------------------------------------------------ PROBE
    def probe(self, centres: Mapping[str, Tensor], data: TaskData, task: int, *, direct: bool = False) -> Probe:
        """G of these centres (Eq. 9), to first order; ``direct``: without inner steps (Variant C).

        Raises:
            DataError: ``one-class`` in the training split; ``non-finite-gradient``.
            ExchangeError: the centres do not fit the model.
        """
        began = time.monotonic()
        require_both(data.train)
        c, everything = self._centres(centres), range(len(data.train.labels))
        path = self._inner(c, data.train, [] if direct else self._inner_batches(everything, task, "probe"))
        start_loss = self.mean_loss(c.theta(path.alphas[0]), data.train, everything)
        loss, v = self.whole_gradient(c.theta(path.last), data.train, everything, self.settings.batch_size)
        if direct:
            found = hyper.direct(path.last, v)
        else:
            found = hyper.first_order(c.columns, path, v, self.settings.eta_in)
        gradients = {n: value.float().cpu().contiguous() for n, value in self.layout.stacked(found).items()}
        if not all(torch.isfinite(value).all() for value in gradients.values()):
            raise DataError(
                "the gradient of the start has values that are not finite (NaN or infinity); lower eta_in",
                reason="non-finite-gradient",
            )
        return Probe(gradients, len(everything), start_loss, loss, time.monotonic() - began)

    # ------------------------------------------------------------------ ADAPT
    def adapt(
        self,
        centres: Mapping[str, Tensor],
        data: TaskData,
        task: int,
        *,
        alpha: AlphaMode = "learnt",
        local: Local = PLAIN,
        curvature: Curvature | None = None,
        on_epoch: Callable[[int, float | None], None] = lambda epoch, auc: None,
    ) -> Adapted:
        """Learn alpha, tune theta; ``on_epoch`` gets e = 0..E and its AUC. ``curvature``: for the objective ``fisher``.

        An update whose loss or gradient is not finite is left out.

        Raises:
            DataError: ``one-class`` in the training split; ``non-finite-gradient`` where every update of an epoch was
                left out, ``non-finite-state``.
            ExchangeError: the centres do not fit the model.
        """
        require_both(data.train)
        clock, c = Clock(), self._centres(centres)
        with clock("alpha"):
            weights = self._weights(alpha, c, data.train, task)
            theta = self.layout.tensors(c.theta(weights))
            require_finite(theta)
        with clock("safeguard"):
            mixture_loss, start_loss = (self._loss(module, data.validation) for module in (theta, self.start))
        fell_back = self.settings.safeguard == "validation" and _worse(mixture_loss, start_loss)
        before = clock.seconds["alpha"] + (clock.seconds["safeguard"] if self.settings.safeguard != "off" else 0)
        self.load(self.start if fell_back else theta)

        curve: list[float | None] = []
        at_epoch: list[float] = []
        scores: list[Tensor] = []

        def evaluate(epoch: int) -> None:
            at_epoch.append(before + clock.seconds.get("tuning", 0.0))
            with clock("evaluation"):
                scores.append(self.scores(data.test))
                curve.append(auc(data.test.labels.numpy(), scores[-1].numpy()))
            on_epoch(epoch, curve[-1])

        tuned = Tuned()
        evaluate(0)
        key = (self.seed, task)
        for epoch in tune(self, self.settings, data.train, local, tuned, clock, *key, curvature=curvature):
            evaluate(epoch)
        state = self.state()
        require_finite(state)
        with clock("tuning"):
            importance = self.fisher(data.train) if local.objective == "fisher" else {}
        with clock("evaluation"):
            final_loss = self._loss(state, data.validation)
            membership = self._membership(state, data, scores[-1])
        return Adapted(
            difference={name: value - self.start[name] for name, value in state.items()},
            importance=importance,
            curve=tuple(curve),
            losses=tuple(tuned.losses),
            mixture_loss=mixture_loss,
            start_loss=start_loss,
            final_loss=final_loss,
            fell_back=fell_back,
            alpha={kind: tuple(value.tolist()) for kind, value in weights.items()},
            scores=torch.stack(scores),
            samples=len(data.train.labels),
            skipped_updates=tuned.skipped,
            membership=membership,
            seconds=clock.seconds,
            at_epoch=tuple(at_epoch),
        )

    def _weights(self, mode: AlphaMode, c: _Centres, examples: Examples, task: int) -> dict[Kind, Tensor]:
        """alpha of each kind (K,)."""
        everything = range(len(examples.labels))
        if mode == "learnt":
            return dict(self._inner(c, examples, self._inner_batches(everything, task, "alpha")).last)
        best = c.equal()
        if mode == "fixed":
            return best
        lowest = float("inf")
        for choice in product(*(range(len(alpha)) for alpha in best.values())):
            chosen = zip(choice, c.equal().items(), strict=True)
            one = {kind: F.one_hot(torch.tensor(k), len(alpha)).to(alpha) for k, (kind, alpha) in chosen}
            loss = self.mean_loss(c.theta(one), examples, everything)
            if loss < lowest:
                best, lowest = one, loss
        return best

    def _membership(self, module: Mapping[str, Tensor], data: TaskData, of_test: Tensor) -> float | None:
        """How well whoever has the module and labelled images tells which of them it was tuned on.

        The attack needs no shadow model: an image counts as the likelier member, the higher the module's probability of
        its label (the lower its loss). 0.5 is a guess; None without test images, who stand for images of others.
        """
        known = ((self.scores_of(module, data.train), data.train.labels), (of_test, data.test.labels))
        members, others = (torch.where(labels == 1, scores, 1 - scores) for scores, labels in known)
        truth = torch.cat([torch.ones(len(members)), torch.zeros(len(others))])
        return auc(truth.numpy(), torch.cat([members, others]).numpy())

    # ------------------------------------------------------------------ pieces
    def _centres(self, centres: Mapping[str, Tensor]) -> _Centres:
        origin = self.vectors(origin_of(self.start))
        columns = self.layout.columns(centres)
        return _Centres({kind: c.to(origin[kind]) - origin[kind][:, None] for kind, c in columns.items()}, origin)

    def _inner_batches(self, indices: Sequence[int], task: int, phase: str) -> list[list[int]]:
        return shuffled(indices, self.settings.batch_size, self.seed, task, phase, 0)

    def _inner(self, c: _Centres, examples: Examples, steps: Sequence[Sequence[int]]) -> InnerPath:
        def gradient(s: int, at: Vectors) -> Vectors:
            return self.gradient(c.shifted(at), examples, steps[s])

        return hyper.inner_steps(c.columns, c.equal(), gradient, len(steps), self.settings.eta_in)

    def _loss(self, module: Mapping[str, Tensor], examples: Examples) -> float | None:
        """Mean loss of a module; None without examples."""
        many = len(examples.labels)
        return self.mean_loss(self.vectors(module), examples, range(many)) if many else None


def _worse(loss: float | None, than: float | None) -> bool:
    """Whether a loss is higher, or not a number."""
    return loss is not None and than is not None and not loss <= than
