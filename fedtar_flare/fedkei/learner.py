"""FedKEI at one site, without FLARE: PROBE and ADAPT.

::

    PROBE   inner epoch from alpha0; v = gradient of the mean loss over the training split at C alpha'; G
    ADAPT   alpha (inner epoch from alpha0, other batches); theta = C alpha; E epochs of SGD, AUC on the test split at
            e = 0..E

ADAPT needs nothing of PROBE. Batches depend on the learner's seed, the task and the phase alone, so two plans that start
from equal centres end at equal bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.fedkei import hypergradient as hyper
from fedtar_flare.fedkei.examples import Examples, TaskData, query_split, require_both, shuffled
from fedtar_flare.fedkei.hypergradient import Hypergradient, InnerPath, Vectors
from fedtar_flare.fedkei.mixing import Kind, Layout, Origin, origin_of
from fedtar_flare.fedkei.mixture import AlphaMode
from fedtar_flare.fedkei.objectives import Local
from fedtar_flare.fedkei.tuning import Tuned, tune
from fedtar_flare.learning.training import parts, require_finite
from fedtar_flare.metrics.classification import auc
from fedtar_flare.models.adapters.lora import adapter_config, load_shared_state, shared_parameters, shared_state
from fedtar_flare.models.classifier import ClassifierConfig, build_classifier
from fedtar_flare.models.weights import fingerprint
from fedtar_flare.settings import Settings

EVALUATION_BATCH = 64


class LearnerSettings(Settings):
    """How a site learns; part of a job's settings (a method's config derives from it)."""

    epochs: int = Field(5, ge=1, description="E of tuning")
    batch_size: int = Field(16, ge=1, description="of tuning and of the inner loop")
    lr: float = Field(0.05, gt=0, description="of SGD, tuning")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD, tuning")
    weight_decay: float = Field(0.0, ge=0, description="of SGD, tuning")
    eta_in: float = Field(0.05, gt=0, description="step size of alpha (Eq. 6)")
    inner_epochs: int = Field(1, ge=1, description="epochs of the inner loop")
    hypergradient: Hypergradient = Field(
        "first_order", description="G without or with ('exact') second derivatives; 'direct' skips the inner loop"
    )
    outer_data: Literal["train", "query"] = Field(
        "train", description="outer loss on the whole training split, or on a fifth that the inner loop leaves out"
    )
    mu: float = Field(0.01, ge=0, description="weight of FedProx' term")
    safeguard: Literal["off", "validation"] = Field(
        "off", description="'validation': start from the common start where the mixture's validation loss is worse"
    )


@dataclass(frozen=True)
class Probe:
    """G by tensor name, (K, *shape) as the centres; losses are means over the outer loss's examples.

    ``start_loss`` is that at C alpha0, ``loss`` at C alpha'; ``seconds`` that it took.
    """

    gradients: dict[str, Tensor]
    samples: int
    start_loss: float
    loss: float
    seconds: float


@dataclass(frozen=True)
class Adapted:
    """What tuning gave.

    Args:
        difference: theta - w0, float32 by name: what is sent.
        curve: AUC on the test split at e = 0..E; None where it has one class.
        losses: mean training loss of each tuning epoch.
        mixture_loss, start_loss: mean validation loss of the mixture and of w0; None without validation examples.
        fell_back: whether tuning began from w0 after all (safeguard).
        alpha: by kind; stays at the site.
        test_scores: of the new disease, of each test example after tuning; stay at the site.
        seconds: by phase: ``alpha``, ``safeguard``, ``tuning``, ``evaluation``.
        at_epoch: seconds of start and tuning, without evaluation, until e = 0..E.
    """

    difference: dict[str, Tensor]
    curve: tuple[float | None, ...]
    losses: tuple[float, ...]
    mixture_loss: float | None
    start_loss: float | None
    fell_back: bool
    alpha: dict[Kind, tuple[float, ...]]
    test_scores: tuple[float, ...]
    samples: int
    skipped_updates: int
    seconds: dict[str, float]
    at_epoch: tuple[float, ...]


@dataclass
class _Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


class TaskLearner:
    """One site's model and how it learns a task.

    Args:
        seed: of this site's batches.
        origin: as in the server's ``MixingSettings``.
        checkpoint: called between batches; may raise to stop.
        places: local paths of what the classifier takes by name.

    Raises:
        ConfigError: as ``build_classifier``; IA3 with a weight decay, which would pull its factors from 1 to 0.
    """

    def __init__(
        self,
        classifier: ClassifierConfig,
        settings: LearnerSettings,
        *,
        seed: int,
        origin: Origin = "zero",
        device: str = "cpu",
        autocast: bool = False,
        checkpoint: Callable[[], None] = lambda: None,
        places: Mapping[str, Path | None] | None = None,
    ):
        if classifier.adapter == "ia3" and settings.weight_decay:
            raise ConfigError(f"weight_decay is {settings.weight_decay:g}: it must be 0 with adapter='ia3'")
        self.classifier, self.settings, self.seed, self.origin = classifier, settings, seed, origin
        self.checkpoint, self.device, self._autocast = checkpoint, torch.device(device), autocast
        self.model = build_classifier(classifier, places)
        self._start = shared_state(self.model)
        frozen = {id(p) for p in shared_parameters(self.model).values()}
        self._frozen_values = sum(p.numel() for p in self.model.parameters() if id(p) not in frozen)
        self._fingerprint = fingerprint(self.model)
        self.model.to(self.device)
        self.layout = Layout.of(self._start)

    # ------------------------------------------------------------------ what is told
    def start(self) -> dict[str, Tensor]:
        """w0 by wire name, float32 on the CPU; sorted. All sites of a job have the same bits."""
        return {name: value.clone() for name, value in self._start.items()}

    @property
    def fingerprint(self) -> str:
        """Short hash of the frozen encoder and of w0, for the handshake."""
        return self._fingerprint

    def describe(self) -> dict[str, Any]:
        """Name and sizes of the model, for the record."""
        return {
            "base_model": self.classifier.encoder_name or f"fedtar_flare classifier '{self.classifier.encoder}'",
            "adapter": self.classifier.adapter,
            "parameters": self._frozen_values,
            "trained": sum(value.numel() for value in self._start.values()),
            "fingerprint": self.fingerprint,
            "config": self.classifier.to_dict(),
        }

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's configuration of the adapter, without any path of the site."""
        return adapter_config(self.model)

    # ------------------------------------------------------------------ PROBE
    def probe(self, centres: Mapping[str, Tensor], data: TaskData, task: int, *, direct: bool = False) -> Probe:
        """G of these centres (Eq. 9); ``direct``: Variant C's, whatever the settings say.

        Raises:
            DataError: ``one-class`` in the training split; ``non-finite-gradient``.
            ExchangeError: the centres do not fit the model.
        """
        began = time.monotonic()
        require_both(data.train)
        columns, origin = self._columns(centres)
        kind = "direct" if direct else self.settings.hypergradient
        inner = outer = list(range(len(data.train.labels)))
        if self.settings.outer_data == "query" and kind != "direct":
            inner, outer = query_split(data.train, self.seed, task, "query")
        alpha0 = _equal(columns)
        steps = [] if kind == "direct" else self._inner_batches(inner, task, "probe")
        with self._attention(kind == "exact"):
            path = self._inner(columns, origin, alpha0, data.train, steps)
            start_loss = self._mean_loss(self._theta(columns, origin, alpha0), data.train, outer)
            loss, v = self._whole_gradient(self._theta(columns, origin, path.last), data.train, outer)
            found = self._hypergradient(kind, columns, origin, path, v, data.train, steps)
        gradients = {name: value.float().cpu().contiguous() for name, value in self.layout.stacked(found).items()}
        if not all(torch.isfinite(value).all() for value in gradients.values()):
            raise DataError(
                "the gradient of the start has values that are not finite (NaN or infinity); lower eta_in",
                reason="non-finite-gradient",
            )
        return Probe(gradients, len(outer), start_loss, loss, time.monotonic() - began)

    def _hypergradient(
        self,
        kind: Hypergradient,
        columns: Vectors,
        origin: Vectors,
        path: InnerPath,
        v: Vectors,
        examples: Examples,
        steps: Sequence[Sequence[int]],
    ) -> dict[Kind, Tensor]:
        eta = self.settings.eta_in
        if kind == "direct":
            return hyper.direct(path.last, v)
        if kind == "first_order":
            return hyper.first_order(columns, path, v, eta)
        return hyper.exact(
            columns, path, v, lambda s, at, x: self._product(_shifted(origin, at), examples, steps[s], x), eta
        )

    # ------------------------------------------------------------------ ADAPT
    def adapt(
        self,
        centres: Mapping[str, Tensor],
        data: TaskData,
        task: int,
        *,
        alpha: AlphaMode = "learnt",
        local: Local = Local(),
        on_epoch: Callable[[int, float | None], None] = lambda epoch, auc: None,
    ) -> Adapted:
        """Learn alpha, tune theta; ``on_epoch`` gets e = 0..E and its AUC.

        An update whose loss or gradient is not finite is left out.

        Raises:
            DataError: ``one-class`` in the training split; ``non-finite-gradient`` where every update was left out,
                ``non-finite-state``.
            ExchangeError: the centres do not fit the model.
        """
        require_both(data.train)
        clock, columns_of = _Clock(), self._columns(centres)
        with clock("alpha"):
            weights = self._weights(alpha, *columns_of, data.train, task)
            theta = self.layout.tensors(self._theta(*columns_of, weights))
            require_finite(theta)
        with clock("safeguard"):
            losses = [self._validation_loss(module, data.validation) for module in (theta, self._start)]
        worse = None not in losses and losses[0] > losses[1]  # type: ignore[operator]
        fell_back = self.settings.safeguard == "validation" and worse
        load_shared_state(self.model, self._start if fell_back else theta)
        until_start = clock.seconds["alpha"] + (clock.seconds["safeguard"] if self.settings.safeguard != "off" else 0)

        curve: list[float | None] = []
        at_epoch: list[float] = []
        scores = torch.zeros(0)

        def evaluate(epoch: int) -> None:
            nonlocal scores
            at_epoch.append(until_start + clock.seconds.get("tuning", 0.0))
            with clock("evaluation"):
                scores = self._scores(data.test)
                curve.append(auc(data.test.labels.numpy(), scores.numpy()))
            on_epoch(epoch, curve[-1])

        tuned = Tuned()
        evaluate(0)
        for epoch in tune(self, data.train, task, local, tuned, clock):
            evaluate(epoch)
        state = shared_state(self.model)
        require_finite(state)
        return Adapted(
            difference={name: value - self._start[name] for name, value in state.items()},
            curve=tuple(curve),
            losses=tuple(tuned.losses),
            mixture_loss=losses[0],
            start_loss=losses[1],
            fell_back=fell_back,
            alpha={kind: tuple(value.tolist()) for kind, value in weights.items()},
            test_scores=tuple(scores.tolist()),
            samples=len(data.train.labels),
            skipped_updates=tuned.skipped,
            seconds=clock.seconds,
            at_epoch=tuple(at_epoch),
        )

    def scores(self, theta: Mapping[str, Tensor], examples: Examples) -> Tensor:
        """Scores (n,) of the new disease in 0..1 of a module, float64, on the CPU."""
        load_shared_state(self.model, theta)
        return self._scores(examples)

    def _weights(
        self, mode: AlphaMode, columns: Vectors, origin: Vectors, examples: Examples, task: int
    ) -> dict[Kind, Tensor]:
        """alpha of each kind (K,)."""
        alpha0 = _equal(columns)
        if mode == "learnt":
            steps = self._inner_batches(range(len(examples.labels)), task, "alpha")
            return dict(self._inner(columns, origin, alpha0, examples, steps).last)
        if mode == "fixed":
            return alpha0
        everything = range(len(examples.labels))
        best, lowest = alpha0, float("inf")
        for choice in product(*(range(len(alpha)) for alpha in alpha0.values())):
            one = {kind: F.one_hot(torch.tensor(k), len(a)).to(a) for k, (kind, a) in zip(choice, alpha0.items(), strict=True)}
            loss = self._mean_loss(self._theta(columns, origin, one), examples, everything)
            if loss < lowest:
                best, lowest = one, loss
        return best

    # ------------------------------------------------------------------ pieces
    def _columns(self, centres: Mapping[str, Tensor]) -> tuple[dict[Kind, Tensor], dict[Kind, Tensor]]:
        """C less the origin (d, K), and the origin (d,), by kind, on the device."""
        some = next(iter(shared_parameters(self.model).values()))
        columns = {kind: c.to(some) for kind, c in self.layout.columns(centres).items()}
        origin = {k: o.to(some) for k, o in self.layout.vectors(origin_of(self._start, self.origin)).items()}
        return {kind: c - origin[kind][:, None] for kind, c in columns.items()}, origin

    def _theta(self, columns: Vectors, origin: Vectors, alpha: Vectors) -> dict[Kind, Tensor]:
        """theta (d,) by kind (Eq. 5)."""
        return _shifted(origin, hyper.combined(columns, alpha))

    def _inner_batches(self, indices: Sequence[int], task: int, phase: str) -> list[list[int]]:
        size, epochs = self.settings.batch_size, range(self.settings.inner_epochs)
        return [batch for e in epochs for batch in shuffled(indices, size, self.seed, task, phase, e)]

    def _inner(
        self, columns: Vectors, origin: Vectors, alpha: Vectors, examples: Examples, steps: Sequence[Sequence[int]]
    ) -> InnerPath:
        def gradient(s: int, at: Vectors) -> Vectors:
            self._load(_shifted(origin, at))
            return self.layout.vectors(self.gradients(examples, steps[s])[1])

        return hyper.inner_steps(columns, alpha, gradient, len(steps), self.settings.eta_in)

    def _load(self, theta: Vectors) -> None:
        tensors = self.layout.tensors(theta)
        with torch.no_grad():
            for name, parameter in shared_parameters(self.model).items():
                parameter.copy_(tensors[name])

    def logits(self, examples: Examples, indices: Sequence[int]) -> Tensor:
        """Logits (B, 2) of the module that is loaded."""
        self.checkpoint()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            found: Tensor = self.model(examples.batch(indices).to(self.device))
        return found.float() if found.dtype == torch.bfloat16 else found

    def loss(self, examples: Examples, indices: Sequence[int]) -> Tensor:
        """Mean cross-entropy of these examples."""
        return F.cross_entropy(self.logits(examples, indices), examples.labels[list(indices)].to(self.device))

    def gradients(
        self, examples: Examples, indices: Sequence[int], names: Sequence[str] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of these examples, and its gradient in the tensors of these names (None: all)."""
        parameters = {n: p for n, p in shared_parameters(self.model).items() if names is None or n in names}
        loss = self.loss(examples, indices)
        return loss.detach(), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    def _whole_gradient(
        self, theta: Vectors, examples: Examples, indices: Sequence[int]
    ) -> tuple[float, dict[Kind, Tensor]]:
        """Mean loss of all these examples at theta, and its gradient, in one pass."""
        self._load(theta)
        total, found = 0.0, {kind: torch.zeros_like(value) for kind, value in theta.items()}
        for chosen in parts(indices, self.settings.batch_size):
            loss, gradients = self.gradients(examples, chosen)
            total += float(loss) * len(chosen)
            for kind, value in self.layout.vectors(gradients).items():
                found[kind] += value * (len(chosen) / len(indices))
        return total / len(indices), found

    def _product(
        self, theta: Vectors, examples: Examples, indices: Sequence[int], x: Vectors
    ) -> tuple[dict[Kind, Tensor], dict[Kind, Tensor]]:
        """Gradient of a batch at theta, and its Hessian's product with x, by differentiating twice."""
        self._load(theta)
        parameters = shared_parameters(self.model)
        loss = self.loss(examples, indices)
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        direction = self.layout.tensors(x)
        inner = sum((g * direction[name]).sum() for name, g in zip(parameters, gradients, strict=True))
        assert isinstance(inner, Tensor)
        second = torch.autograd.grad(inner, list(parameters.values()))
        g, u = (dict(zip(parameters, (one.detach() for one in row), strict=True)) for row in (gradients, second))
        return self.layout.vectors(g), self.layout.vectors(u)

    @torch.no_grad()
    def _mean_loss(self, theta: Vectors, examples: Examples, indices: Sequence[int]) -> float:
        self._load(theta)
        losses = [float(self.loss(examples, part)) * len(part) for part in parts(indices, EVALUATION_BATCH)]
        return sum(losses) / len(indices)

    def _validation_loss(self, module: Mapping[str, Tensor], examples: Examples) -> float | None:
        if not len(examples.labels):
            return None
        theta = {kind: value.to(self.device) for kind, value in self.layout.vectors(module).items()}
        return self._mean_loss(theta, examples, range(len(examples.labels)))

    @torch.no_grad()
    def _scores(self, examples: Examples) -> Tensor:
        """Of the module that is loaded."""
        everything = range(len(examples.labels))
        logits = [self.logits(examples, part).double().cpu() for part in parts(everything, EVALUATION_BATCH)]
        return torch.cat([one.softmax(1)[:, 1] for one in logits] or [torch.zeros(0, dtype=torch.float64)])

    def _attention(self, twice: bool) -> AbstractContextManager[Any]:
        """Attention that can be differentiated twice where that is needed: fused kernels cannot."""
        return sdpa_kernel(SDPBackend.MATH) if twice else nullcontext()


def _equal(columns: Vectors) -> dict[Kind, Tensor]:
    """alpha0 = 1/K of each kind."""
    return {kind: c.new_full((c.shape[1],), 1 / c.shape[1]) for kind, c in columns.items()}


def _shifted(origin: Vectors, at: Vectors) -> dict[Kind, Tensor]:
    return {kind: origin[kind] + value for kind, value in at.items()}
