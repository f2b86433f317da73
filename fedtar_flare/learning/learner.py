"""How one site learns, without federation: train on one visit step, and validate."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.data.minimum_cell import winsorised_mean
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.learning.config import TrainingConfig
from fedtar_flare.learning.patient_privacy import add_private_gradients, generator_of, poisson_batches
from fedtar_flare.learning.site_model import SiteModel
from fedtar_flare.learning.training import Trained, Validated, adamw, batches, parts, retry_smaller_batch
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.protocol.lora_ranks import factor

logger = logging.getLogger(__name__)
Read = list[tuple[list[str], Tensor]]
clock = time.monotonic


class ReportLearner(SiteModel):
    """A :class:`SiteModel` that learns; by itself it is local training for FedAvg.

    The hooks are what a method overrides; all have a default. :attr:`personal_optimizer` steps the personal parameters,
    whose gradient norm is limited by itself.
    """

    personal_optimizer: torch.optim.Optimizer | None = None
    rate: float = 1.0
    """By what a task multiplies its learning rates (:meth:`TrainingConfig.rate_of`)."""
    read: Read
    """Patients and losses (B,) of the reports of the last batch, part by part."""
    updates_told: ClassVar[int | None] = None
    """Of how many local updates, from the first one, :class:`Trained` gives the mean loss; None: of all."""

    def __init__(self, *, training: TrainingConfig, fresh_noise: bool = False, **others: Any):
        super().__init__(training=training, **others)
        self.fresh_noise = fresh_noise
        self.read = []
        self._ahead: dict[tuple[str, tuple[int, ...]], Future[ImageBatch]] = {}
        self._micro_batch = min(training.micro_batch or training.batch_size, training.batch_size)
        if training.gradient_checkpointing:
            self.generator.recompute_layers()

    def with_task(self, cohort: Cohort, *, rate: float = 1.0, **others: Any) -> Self:
        """As :meth:`SiteModel.with_task`, with the factor ``rate`` of the task's learning rates."""
        self.rate = rate
        return super().with_task(cohort, **others)

    @classmethod
    def shares_batches(cls) -> bool:
        """Whether processes may share its batches: not where it sums a batch in its own way, unless it says so."""
        return cls._accumulate is ReportLearner._accumulate

    @classmethod
    def may_be_private(cls) -> bool:
        """Whether per-patient DP-SGD covers its updates: not where it makes them in its own way."""
        own = ("_accumulate", "local_update", "after_backward")
        return all(getattr(cls, name) is getattr(ReportLearner, name) for name in own)

    def draw_rate(self, visits: int) -> float:
        """Probability of each patient of being in an update, of so many visits."""
        return min(1.0, self.training.batch_size / visits)

    # ------------------------------------------------------------------ hooks
    def training_losses(self, samples: Sequence[Sample], images: ImageBatch, seed: str) -> Tensor:
        """Losses that a local update is made of, shape (B,); ``seed`` is of this update, for what is random in it."""
        return self.report_losses(samples, images)

    def local_update(
        self, samples: Sequence[Sample], seed: str, optimizer: torch.optim.Optimizer, start: Mapping[str, Tensor]
    ) -> float | None:
        """One update of the shared part (by ``optimizer``) and of the personal part on a batch; its loss.

        None where its loss or gradient is not finite: it is then left out for both.
        """
        loss = self._accumulate(samples, seed)
        self.after_backward(start)
        parts = (list(self.shared_parameters.values()), list(self.personal_parameters()))
        limit = self.training.max_grad_norm or math.inf
        norms = [nn.utils.clip_grad_norm_(parameters, limit) for parameters in parts]
        numbers = torch.stack([value.to(loss) for value in (loss, *norms)])
        found, *lengths = numbers.tolist()  # the only time in an update that the processor waits for a GPU
        if not all(map(math.isfinite, (found, *lengths))):
            return None
        optimizer.step()
        if self.personal_optimizer is not None:
            self.personal_optimizer.step()
        return found

    def after_backward(self, start: Mapping[str, Tensor]) -> None:
        """Change the gradients of a batch before they are clipped; ``start`` is w_{t-1}, as :meth:`shared` gave it."""

    def shared_optimizer(self, parameters: Sequence[nn.Parameter], epochs: float) -> torch.optim.Optimizer:
        """Fresh in every task, since its start point is not where the last task ended.

        ``epochs`` is how often the task goes through its visits: reports read / visits.
        """
        rate = self.rate * self.training.lr
        return adamw(parameters, lr=rate, weight_decay=self.training.weight_decay)

    def personal_parameters(self) -> Sequence[nn.Parameter]:
        """What is trained besides the adapter and stays at the site."""
        return ()

    def private(self) -> dict[str, Tensor]:
        """What persists at the site between tasks."""
        return {}

    # ------------------------------------------------------------------ training
    def train(
        self,
        steps: int | Collection[int] | None,
        seed: int,
        on_update: Callable[[int, float], None] = lambda number, loss: None,
        updates: int | None = None,
        least: int = 1,
    ) -> Trained:
        """Local updates of the shared and the personal part on the visits of a time step.

        An update whose loss or gradient is not finite is skipped, for the shared and the personal part alike.

        Parameters
        ----------
        steps : int, collection of int or None
            The time step t, or several together; None takes the visits of all steps.
        seed : int
            Of the order of the samples.
        on_update : callable
            Called after each update that was made with its number (from 1, skipped ones counted) and loss.
        updates : int, optional
            How many; None: as ``training`` says.
        least : int
            How many are made even if ``training.seconds`` is up.

        Raises
        ------
        DataError
            ``no-training-visit`` at this step; ``non-finite-gradient`` when every update was skipped.
        """
        samples = self.cohort.samples("train", steps, self.min_cell)
        if not samples:
            raise DataError("no training visit at the time steps of this task", reason="no-training-visit")
        start = self.shared()
        count = updates or self.training.updates_of(len(samples))
        epochs = count * self.training.batch_size / len(samples)
        optimizer = self.shared_optimizer(list(self.shared_parameters.values()), epochs)
        for group in self.personal_optimizer.param_groups if self.personal_optimizer else ():
            group["lr"] = self.rate * group.setdefault("initial_lr", group["lr"])
        losses: list[float] = []
        read: list[Read] = []
        seen: list[list[int]] = []
        planned = list(batches(len(samples), self.training.batch_size, count, seed))
        drawn: Iterable[list[int]] = planned
        if self.training.noise_multiplier is not None:
            self._random = generator_of(seed, self.fresh_noise)
            names = [sample.visit.patient_id for sample in samples]
            planned, drawn = [], poisson_batches(names, self.draw_rate(len(samples)), count, self._random)
        self._ahead = {}  # of a task that failed
        begin, made = clock(), 0
        with ThreadPoolExecutor(1) as reader:
            for number, chosen in enumerate(drawn, start=1):
                if number > max(1, least) and not self._fits(number, clock() - begin):
                    break
                made = number
                self.checkpoint()
                for following in planned[number : number + 1]:
                    self._read_ahead(reader, [samples[i] for i in following], f"{seed}/{number}")
                loss = self.local_update([samples[i] for i in chosen], f"{seed}/{number - 1}", optimizer, start)
                if loss is None:
                    logger.warning("local update %d of %d skipped: its loss or gradient is not finite", number, count)
                    continue
                losses.append(loss)
                read.append(self.read)
                seen.append(chosen)
                on_update(number, loss)
        self._ahead = {}
        self._clear_gradients()
        if not losses:
            raise DataError(
                f"none of the {made} local updates had a finite loss and gradient; the learning rate is too high or "
                "the weights that came down are damaged",
                reason="non-finite-gradient",
            )
        end = self.shared()
        self.ranks.require_equal(end | self.private())
        update = {name: end[name] - start[name] for name in self.shared_parameters}
        told = losses[: self.updates_told]
        learnt, behind = (set(chain(*part)) for part in (seen, seen[: self.updates_told]))
        return Trained(
            update,
            samples=len(samples),
            loss=self._told_loss([*chain(*read[: len(told)])], sum(told) / len(told)),
            updates=made,
            skipped_updates=made - len(losses),
            patients=len({samples[i].visit.patient_id for i in learnt if not samples[i].planted}),
            loss_patients=len({samples[i].visit.patient_id for i in behind if not samples[i].planted}),
            loss_visits=sum(not samples[i].planted for i in behind),
        )

    def _read_ahead(self, reader: ThreadPoolExecutor, samples: Sequence[Sample], seed: str) -> None:
        """Let ``reader`` read the images of the next update's first part while this update is made."""
        for first in [*parts(self.ranks.share(samples), self._micro_batch)][:1]:
            self._ahead[seed, tuple(map(id, first))] = reader.submit(self.images, first, seed)

    def training_images(self, samples: Sequence[Sample], seed: str) -> ImageBatch:
        """The :meth:`images` of a part of an update, which may have been read during the update before."""
        ahead = self._ahead.pop((seed, tuple(map(id, samples))), None)
        return self.images(samples, seed) if ahead is None else ahead.result()

    def _fits(self, number: int, spent: float) -> bool:
        """Whether update ``number`` is likely to end within ``training.seconds``, the updates before it having taken
        ``spent``; the first of several processes says so for all.
        """
        limit = self.training.seconds
        return not limit or bool(self.ranks.gather(spent * number <= limit * (number - 1))[0])

    def _accumulate(self, samples: Sequence[Sample], training_seed: str | None = None) -> Tensor:
        """Loss (float64) and gradient of a batch's mean report loss over all ranks, in parts that fit in memory."""
        if training_seed is not None and self.training.noise_multiplier is not None:
            return self._accumulate_private(samples, training_seed, self.training.noise_multiplier)
        return self._accumulate_plain(samples, training_seed, len(samples))

    def _accumulate_private(self, samples: Sequence[Sample], seed: str, noise_multiplier: float) -> Tensor:
        """As :meth:`_accumulate`, with each patient's gradient clipped and noise on their sum."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        of_patient: dict[str, list[Sample]] = {}
        for sample in samples:
            of_patient.setdefault(sample.visit.patient_id, []).append(sample)

        def backward(visits: Sequence[Sample]) -> None:
            total.add_(self._accumulate_plain(visits, seed, 1))

        add_private_gradients(
            [*self.shared_parameters.values(), *self.personal_parameters()],
            [partial(backward, visits) for visits in of_patient.values()],
            clip=self.training.max_grad_norm,
            noise_multiplier=noise_multiplier,
            reports=self.training.batch_size,
            generator=self._random,
        )
        return total / max(1, len(samples))

    def _accumulate_plain(self, samples: Sequence[Sample], training_seed: str | None, count: int) -> Tensor:
        """Sum of report losses over ``count``, and its gradient."""
        share = self.ranks.share(samples)

        def run(size: int) -> Tensor:
            self._micro_batch = size
            self._clear_gradients()
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            self.read = []
            for part in parts(share, size):
                if training_seed is None:
                    losses = self.report_losses(part, self.images(part))
                else:
                    losses = self.training_losses(part, self.training_images(part, training_seed), training_seed)
                self.read.append(([sample.visit.patient_id for sample in part], losses.detach()))
                loss = losses.sum() / count
                loss.backward()
                total += loss.detach()
            return total

        return self.ranks.summed(
            retry_smaller_batch(self._micro_batch, run), (*self._parameters, *self.personal_parameters())
        )

    def _clear_gradients(self) -> None:
        for parameter in (*self._parameters, *self.personal_parameters()):
            parameter.grad = None

    @cached_property
    def _parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(self.model.parameters())  # to walk through all modules takes as long as a small layer

    @cached_property
    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """What is trained and travels, by the name under which it does; with ``lora.mean`` 'ffa' without A."""
        found = shared_parameters(self.model, self.adapter)
        return {name: p for name, p in found.items() if factor(name) != "A"} if self.lora.mean == "ffa" else found

    def validate(self) -> Validated | None:
        """Loss and gradient in w over the validation patients' visits, with the personal part; None without any."""
        samples = self.cohort.samples("validation", least=self.min_cell)
        if not samples:
            return None
        loss = float(self._accumulate(samples))
        gradient = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().float().cpu().clone()
            for name, p in self.shared_parameters.items()
        }
        self._clear_gradients()
        return Validated(self._told_loss(self.read, loss), gradient, len(samples))

    def _told_loss(self, read: Read, mean: float) -> float:
        """The ``mean`` of what was read at all ranks, so that no report by itself shows in it."""
        if self.min_cell == 1:
            return mean
        own = [pair for patients, losses in read for pair in zip(patients, losses.tolist(), strict=True)]
        pairs = [*chain(*self.ranks.gather(own))]
        return winsorised_mean(pairs, self.min_cell) if pairs else mean  # DP-SGD may draw nobody
