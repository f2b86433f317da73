"""FedKEI at one site, without FLARE: PROBE and ADAPT.

::

    PROBE   inner epoch from alpha0; v = gradient of the mean loss over the training split at C alpha'; G
    ADAPT   alpha (inner epoch from alpha0, other batches); theta = C alpha; E epochs of SGD, AUC on the test split at
            e = 0..E

ADAPT needs nothing of PROBE. Batches depend on the learner's seed, the task and the phase alone, so two plans that start
from equal centres end at equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedtar_flare.fedkei.hypergradient import Hypergradient
from fedtar_flare.fedkei.mixing import Kind, Origin
from fedtar_flare.fedkei.objectives import Local
from fedtar_flare.fedkei.plans import AlphaMode
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.settings import Settings


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


class Examples(Protocol):
    """One split of a task at a site."""

    @property
    def labels(self) -> Tensor:
        """(n,) int64, 1: the new disease."""

    def batch(self, indices: Sequence[int]) -> ImageBatch:
        """These examples' images."""


@dataclass(frozen=True)
class ArrayExamples:
    """Examples in memory: uint8 images (n, 3, H, W), or (n, S, 3, H, W) of S slices each."""

    images: Tensor
    labels: Tensor

    def batch(self, indices: Sequence[int]) -> ImageBatch:
        images = self.images[list(indices)]
        images = images[:, None] if images.dim() == 4 else images
        shape = images.shape[:2]
        return ImageBatch(images, torch.zeros(shape), torch.ones(shape, dtype=torch.bool))


@dataclass(frozen=True)
class TaskData:
    """A site's examples of one task. Only ``train`` must have both classes."""

    train: Examples
    validation: Examples
    test: Examples


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


class TaskLearner:
    """One site's model and how it learns a task.

    Args:
        seed: of this site's batches.
        origin: as in the server's :class:`MixingSettings`.
        checkpoint: called between batches; may raise to stop.
        places: local paths of what the classifier takes by name.

    Raises:
        ConfigError: as :func:`build_classifier`.
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
        raise NotImplementedError

    def start(self) -> dict[str, Tensor]:
        """w0 by wire name, float32 on the CPU; sorted. All sites of a job have the same bits."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Short hash of the frozen encoder, for the handshake."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Name and sizes of the model, for the record."""
        raise NotImplementedError

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's configuration of the adapter, without any path of the site."""
        raise NotImplementedError

    def probe(
        self, centres: Mapping[str, Tensor], data: TaskData, task: int, *, direct: bool = False
    ) -> Probe:
        """G of these centres (Eq. 9); ``direct``: Variant C's, whatever the settings say.

        Raises:
            DataError: ``one-class`` in the training split; ``non-finite-gradient``.
            ExchangeError: the centres do not fit the model.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    def scores(self, theta: Mapping[str, Tensor], examples: Examples) -> Tensor:
        """Scores (n,) of the new disease in 0..1 of a module, float64; on the CPU."""
        raise NotImplementedError
