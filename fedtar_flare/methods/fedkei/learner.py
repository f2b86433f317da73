"""FedKEI at one site, without FLARE: PROBE and ADAPT.

::

    PROBE   inner epoch from alpha0; v = gradient of the mean loss over the training split at C alpha'; G
    ADAPT   alpha (inner epoch from alpha0, other batches); theta = C alpha; E epochs of SGD, AUC on the test split at
            e = 0..E

ADAPT needs nothing of PROBE. Batches depend on seed, task and phase alone: from equal centres, plans end at equal bits.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.minimum_cell import winsorised_mean
from fedtar_flare.learning.device import choose_device
from fedtar_flare.learning.training import parts, require_finite
from fedtar_flare.methods.fedkei.config import PLANS, LearnerSettings, Plan
from fedtar_flare.methods.fedkei.contract import IMPORTANCE, PULL
from fedtar_flare.methods.fedkei.mixing import Kind, Layout, Vectors, combined, first_order, inner_steps, origin_of
from fedtar_flare.methods.fedkei.tasks import Adapted, Examples, TaskData, shuffled
from fedtar_flare.metrics.classification import auc
from fedtar_flare.models.adapters.lora import adapter_config, load_shared_state, shared_parameters, shared_state
from fedtar_flare.models.classifier import ClassifierConfig, build_classifier
from fedtar_flare.models.weights import fingerprint

logger = logging.getLogger(__name__)

EVALUATION_BATCH = 64
TEMPERATURE = 2.0
"""tau of the distillation."""


class TaskLearner:
    """One site learns tasks with its classifier, and whatever module was loaded last; ``seed`` is of its batches.

    :attr:`start` is w0, the same bits at all sites.
    """

    min_cell: int = 1
    """Fewest patients whose extreme losses may show in a mean loss that leaves the site."""
    checkpoint: Callable[[], None] = staticmethod(lambda: None)
    """Called before each batch; it raises where the task is to stop."""
    batch_losses: Sequence[tuple[str, float]] = ()
    """Patient and loss of each example of the last batch."""

    def __init__(
        self,
        config: ClassifierConfig,
        settings: LearnerSettings,
        *,
        seed: int,
        device: str = "cpu",
        precision: str = "float32",
        local_paths: Mapping[str, Path | None] | None = None,
    ):
        self.config, self.settings, self.seed = config, settings, seed
        self._seconds: dict[str, float] = {}  # of the task's phases
        self.classifier = build_classifier(config, local_paths)
        size = sum(parameter.numel() for parameter in self.classifier.parameters())
        device, self._autocast = choose_device(device, precision, size)
        self.device = torch.device(device)
        self.start = shared_state(self.classifier)
        self.layout = Layout.of(self.start)
        self.fingerprint = fingerprint(self.classifier)
        self.classifier.to(self.device)
        self.parameters = shared_parameters(self.classifier)

    def describe(self) -> dict[str, Any]:
        """Name, sizes and PEFT's configuration of the adapter, without any path of the site."""
        trained = sum(value.numel() for value in self.start.values())
        return {
            "base_model": self.config.encoder_name or f"fedtar_flare classifier '{self.config.encoder}'",
            "adapter": self.config.adapter,
            "adapter_config": adapter_config(self.classifier),
            "parameters": sum(p.numel() for p in self.classifier.parameters()) - trained,
            "trained": trained,
            "fingerprint": self.fingerprint,
            "config": self.config.to_dict(),
        }

    def is_start(self, centres: Mapping[str, Tensor]) -> bool:
        """Whether these centres (K, *shape) are the common start."""
        return all(len(centres[name]) == 1 and torch.equal(centres[name][0], v) for name, v in self.start.items())

    # ------------------------------------------------------------------ PROBE
    def probe(
        self, centres: Mapping[str, Tensor], data: TaskData, task: int, *, direct: bool = False
    ) -> dict[str, Tensor]:
        """G (K, *shape) of these centres (Eq. 9), to first order; ``direct``: without inner steps (Variant C)."""
        c = self._columns(centres)
        alpha, gradient_sum = self._inner(c, data.train, task, None if direct else "probe")
        everything = range(len(data.train.labels))
        v = self.gradient(self._theta(combined(c, alpha)), data.train, everything, self.settings.batch_size)
        g = self.layout.stacked(first_order(c, alpha, gradient_sum, v, self.settings.eta_in))
        gradients = {name: value.float().cpu().contiguous() for name, value in g.items()}
        if not all(torch.isfinite(value).all() for value in gradients.values()):
            raise DataError("the gradient of the start is not finite; lower eta_in", reason="non-finite-gradient")
        return gradients

    # ------------------------------------------------------------------ ADAPT
    def adapt(
        self,
        received: Mapping[str, Tensor],
        data: TaskData,
        task: int,
        plan: Plan = PLANS["fedkei"],
        on_epoch: Callable[[int], None] = lambda epoch: None,
    ) -> Adapted:
        """Learn alpha as the plan says and tune theta; the common start is one centre, whose alpha is 1.

        ``received`` are the centres (K, *shape), and for the objective ``fisher`` the pool's curvature.
        """
        self._seconds = {}
        curvature = {name: value[0] for name, value in received.items() if name.startswith((IMPORTANCE, PULL))}
        centres = {name: value for name, value in received.items() if name not in curvature}
        # 1. The start: theta of the mixture.
        with self._timed("alpha"):
            c = self._columns(centres)
            learns = plan.alpha == "learnt" and not self.is_start(centres)
            alpha, _ = self._inner(c, data.train, task, "alpha" if learns else None)
            theta = self.layout.tensors(self._theta(combined(c, alpha)))
            require_finite(theta)
        mixture_loss = self.mean_loss(self.vectors(theta), data.validation)
        start_loss = self.mean_loss(self.vectors(self.start), data.validation)
        load_shared_state(self.classifier, theta)

        # 2. Tuning, with the scores of the test images at e = 0..E.
        curve: list[float | None] = []
        at_epoch: list[float] = []
        scores: list[Tensor] = []

        def evaluate() -> None:
            at_epoch.append(self._seconds["alpha"] + self._seconds.get("tuning", 0.0))
            with self._timed("evaluation"):
                scores.append(self.scores(data.test))
                curve.append(auc(data.test.labels.numpy(), scores[-1].numpy()))
            on_epoch(len(curve) - 1)

        evaluate()
        losses, skipped = [], 0
        for loss, left_out in self._tune(data.train, plan, task, curvature):
            losses.append(loss)
            skipped += left_out
            evaluate()
        if skipped:
            logger.warning("%d local updates were left out: their loss or gradient was not finite", skipped)

        # 3. The module, and what is said of it.
        state = shared_state(self.classifier)
        require_finite(state)
        with self._timed("tuning"):
            importance = self.fisher(data.train) if plan.objective == "fisher" else {}
        with self._timed("evaluation"):
            final_loss = self.mean_loss(self.vectors(state), data.validation)
            load_shared_state(self.classifier, state)
            membership = _membership(data, self.scores(data.train), scores[-1])
        return Adapted(
            difference={name: value - self.start[name] for name, value in state.items()},
            importance=importance,
            curve=curve,
            losses=losses,
            skipped_updates=skipped,
            mixture_loss=mixture_loss,
            start_loss=start_loss,
            final_loss=final_loss,
            alpha={kind: value.tolist() for kind, value in alpha.items()},
            scores=torch.stack(scores),
            membership=membership,
            seconds=self._seconds,
            at_epoch=at_epoch,
        )

    def _tune(
        self, examples: Examples, plan: Plan, task: int, curvature: Mapping[str, Tensor]
    ) -> Iterator[tuple[float, int]]:
        """Tune the loaded module by SGD; yields each epoch's mean loss and its number of skipped updates."""
        settings = self.settings
        tuned = {
            name: p for name, p in self.parameters.items() if plan.objective != "frozen_a" or ".lora_A." not in name
        }
        start = {name: parameter.detach().clone() for name, parameter in tuned.items()}
        optimizer = torch.optim.SGD(tuned.values(), lr=settings.lr, momentum=settings.momentum)
        with self._timed("tuning"):
            taught = self._taught(examples) if plan.objective == "distil" else None
        for epoch in range(1, settings.epochs + 1):
            losses: list[tuple[str, float]] = []
            skipped = 0
            batches = shuffled(range(len(examples.labels)), settings.batch_size, self.seed, task, "tune", epoch)
            with self._timed("tuning"):
                for batch in batches:
                    loss, gradients = self._gradients(examples, batch, tuned, plan, taught)
                    if plan.objective == "proximal":
                        for name, gradient in gradients.items():
                            gradient.add_(tuned[name].detach() - start[name], alpha=settings.mu)
                    elif plan.objective == "fisher":
                        add_curvature(gradients, tuned, curvature)
                    for name, parameter in tuned.items():
                        parameter.grad = gradients[name]
                    norm = nn.utils.get_total_norm(gradients.values())
                    if math.isfinite(loss) and math.isfinite(norm):
                        optimizer.step()
                        losses += self.batch_losses
                    else:
                        skipped += 1
                optimizer.zero_grad(set_to_none=True)
                if not losses:
                    text = f"no update of epoch {epoch} had a finite loss and gradient; lower the learning rate"
                    raise DataError(text, reason="non-finite-gradient")
            yield winsorised_mean(losses, self.min_cell), skipped

    def _gradients(
        self,
        examples: Examples,
        batch: Sequence[int],
        tuned: Mapping[str, nn.Parameter],
        plan: Plan,
        taught: Tensor | None,
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradient of an update, without the terms of the distance to other modules."""
        if plan.objective == "maml" and len(batch) > 1:
            half = (len(batch) + 1) // 2
            _, first = self.gradients(examples, batch[:half], tuned)
            before = {name: parameter.detach().clone() for name, parameter in tuned.items()}
            with torch.no_grad():
                for name, parameter in tuned.items():
                    parameter.sub_(first[name], alpha=self.settings.lr)
            second = self.gradients(examples, batch[half:], tuned)
            with torch.no_grad():
                for name, parameter in tuned.items():
                    parameter.copy_(before[name])
            return second
        if taught is not None:
            logits = self.logits(examples, batch)
            loss = self.cross_entropy(logits, examples, batch) + distillation(logits, taught[list(batch)])
            return float(loss.detach()), dict(zip(tuned, torch.autograd.grad(loss, list(tuned.values())), strict=True))
        return self.gradients(examples, batch, tuned)

    @torch.no_grad()
    def _taught(self, examples: Examples) -> Tensor | None:
        """Logits (n, 2) of the examples by the loaded module; None for the common start, which has nothing to teach."""
        if self.is_start({name: value[None] for name, value in shared_state(self.classifier).items()}):
            return None
        return torch.cat([self.logits(examples, p) for p in parts(range(len(examples.labels)), EVALUATION_BATCH)])

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began

    # ------------------------------------------------------------------ centres
    def _columns(self, centres: Mapping[str, Tensor]) -> dict[Kind, Tensor]:
        """C minus the origin, (d, K), by kind."""
        origin, columns = self.vectors(origin_of(self.start)), self.layout.columns(centres)
        return {kind: c.to(origin[kind]) - origin[kind][:, None] for kind, c in columns.items()}

    def _theta(self, difference: Vectors) -> dict[Kind, Tensor]:
        """theta (d,), given its difference from the origin."""
        return {kind: origin + difference[kind] for kind, origin in self.vectors(origin_of(self.start)).items()}

    def _inner(self, c: Vectors, examples: Examples, task: int, phase: str | None) -> tuple[Vectors, Vectors]:
        """An epoch of :func:`.mixing.inner_steps` from alpha0 = 1 / K; without a phase no step is taken."""
        equal: Vectors = {kind: m.new_full((m.shape[1],), 1 / m.shape[1]) for kind, m in c.items()}
        size, everything = self.settings.batch_size, range(len(examples.labels))
        steps = shuffled(everything, size, self.seed, task, phase, 0) if phase else []

        def gradient(s: int, difference: Vectors) -> Vectors:
            return self.gradient(self._theta(difference), examples, steps[s], size)

        return inner_steps(c, equal, gradient, len(steps), self.settings.eta_in)

    # ------------------------------------------------------------------ with the loaded module
    def logits(self, examples: Examples, indices: Sequence[int]) -> Tensor:
        """Logits (B, 2), float32 or finer."""
        self.checkpoint()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            logits: Tensor = self.classifier(examples.batch(indices).to(self.device))
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def cross_entropy(self, logits: Tensor, examples: Examples, indices: Sequence[int]) -> Tensor:
        """Mean cross-entropy of these examples; sets :attr:`batch_losses`."""
        truth = examples.labels[list(indices)].to(logits.device)
        each = F.cross_entropy(logits.detach(), truth, reduction="none").tolist()
        self.batch_losses = [(examples.patients[i], loss) for i, loss in zip(indices, each, strict=True)]
        return F.cross_entropy(logits, truth)

    def gradients(
        self, examples: Examples, indices: Sequence[int], parameters: Mapping[str, Tensor] | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """Mean loss, and its gradient in these parameters of the module (None: all)."""
        parameters = self.parameters if parameters is None else parameters
        loss = self.cross_entropy(self.logits(examples, indices), examples, indices)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return float(loss.detach()), dict(zip(parameters, gradients, strict=True))

    def fisher(self, examples: Examples) -> dict[str, Tensor]:
        """Diagonal of the empirical Fisher information: mean of examples' squared gradients; float32, on the CPU."""
        squares = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        for i in range(len(examples.labels)):
            for name, gradient in self.gradients(examples, [i])[1].items():
                squares[name].addcmul_(gradient, gradient, value=1 / len(examples.labels))
        return {name: value.float().cpu() for name, value in sorted(squares.items())}

    @torch.no_grad()
    def scores(self, examples: Examples) -> Tensor:
        """Scores (n,) of the new disease in 0..1, float64, on the CPU."""
        everything = range(len(examples.labels))
        logits = [self.logits(examples, part).double().cpu() for part in parts(everything, EVALUATION_BATCH)]
        return torch.cat([part.softmax(1)[:, 1] for part in logits] or [torch.zeros(0, dtype=torch.float64)])

    # ------------------------------------------------------------------ as functions of theta (d,) by kind
    def vectors(self, module: Mapping[str, Tensor]) -> dict[Kind, Tensor]:
        """A module as vectors (d,), of the classifier's dtype and on its device."""
        like = next(iter(self.parameters.values()))
        return {kind: value.to(like) for kind, value in self.layout.vectors(module).items()}

    @torch.no_grad()
    def load_vectors(self, theta: Vectors) -> None:
        """Load theta, in the classifier's own precision."""
        tensors = self.layout.tensors(theta)
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])

    def gradient(self, theta: Vectors, examples: Examples, indices: Sequence[int], size: int) -> dict[Kind, Tensor]:
        """Gradient of the mean loss of all these examples, ``size`` at a time."""
        self.load_vectors(theta)
        mean = {kind: torch.zeros_like(value) for kind, value in theta.items()}
        for chosen in parts(indices, size):
            for kind, value in self.layout.vectors(self.gradients(examples, chosen)[1]).items():
                mean[kind] += value * (len(chosen) / len(indices))
        return mean

    @torch.no_grad()
    def mean_loss(self, theta: Vectors, examples: Examples) -> float | None:
        """Mean loss of all examples, as it may leave the site; None without examples."""
        count = len(examples.labels)
        if not count:
            return None
        self.load_vectors(theta)
        losses: list[tuple[str, float]] = []
        for part in parts(range(count), EVALUATION_BATCH):
            self.cross_entropy(self.logits(examples, part), examples, part)
            losses += self.batch_losses
        return winsorised_mean(losses, self.min_cell)


def add_curvature(
    gradients: Mapping[str, Tensor], theta: Mapping[str, Tensor], curvature: Mapping[str, Tensor]
) -> None:
    """``g += F theta - pull``: FedCurv's gradient, of ``1 / 2 sum_j (theta - theta_j)^T F_j (theta - theta_j)``."""
    for name, gradient in gradients.items():
        importance, pull = (curvature[f"{prefix}{name}"].to(gradient) for prefix in (IMPORTANCE, PULL))
        gradient.add_(importance * theta[name].detach() - pull)


def distillation(logits: Tensor, taught: Tensor) -> Tensor:
    """``tau^2 KL(teacher || student)``, mean over the batch, of logits (B, 2) at temperature tau = 2."""
    student, teacher = (F.log_softmax(values / TEMPERATURE, dim=1) for values in (logits, taught))
    return TEMPERATURE**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def _membership(data: TaskData, training_scores: Tensor, test_scores: Tensor) -> float | None:
    """AUC of guessing by the probability of an image's label whether the module was tuned on it; None without test."""
    pairs = ((training_scores, data.train.labels), (test_scores, data.test.labels))
    members, others = (torch.where(labels == 1, scores, 1 - scores) for scores, labels in pairs)
    truth = torch.cat([torch.ones(len(members)), torch.zeros(len(others))])
    return auc(truth.numpy(), torch.cat([members, others]).numpy())
