"""What a site's two tasks give, and the clock that times their phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from fedtar_flare.methods.fedkei.mixing import Kind


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
        importance: the module's Fisher information by name, which is sent too (FedCurv); else empty.
        curve: AUC on the test split at e = 0..E; None where it has one class.
        losses: mean training loss of each tuning epoch.
        mixture_loss, start_loss: mean validation loss of the mixture and of w0; None without validation examples.
        final_loss: mean validation loss of theta after tuning.
        fell_back: whether tuning began from w0 after all (safeguard).
        alpha: by kind; stays at the site.
        scores: (E + 1, n) float64, of the new disease, of each test example at e = 0..E; stay at the site.
        membership: AUC of telling the training images from the test images by the module's probability of their label;
            None without test images.
        seconds: by phase: ``alpha``, ``safeguard``, ``tuning``, ``evaluation``.
        at_epoch: seconds of start and tuning, without evaluation, until e = 0..E.
    """

    difference: dict[str, Tensor]
    importance: dict[str, Tensor]
    curve: tuple[float | None, ...]
    losses: tuple[float, ...]
    mixture_loss: float | None
    start_loss: float | None
    final_loss: float | None
    fell_back: bool
    alpha: dict[Kind, tuple[float, ...]]
    scores: Tensor
    samples: int
    skipped_updates: int
    membership: float | None
    seconds: dict[str, float]
    at_epoch: tuple[float, ...]

    @property
    def gap(self) -> float | None:
        """By how much tuning lowered the validation loss of what it began from; None without one."""
        began = self.start_loss if self.fell_back else self.mixture_loss
        return None if began is None or self.final_loss is None else began - self.final_loss


@dataclass
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began
