"""How one site learns, without federation: train on one visit step, and validate."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cohort import Sample, shown_visits
from fedtar_flare.data.minimum_cell import winsorised_mean
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.learning.config import TrainingConfig
from fedtar_flare.learning.patient_privacy import add_private_gradients, poisson_batches
from fedtar_flare.learning.site_model import SiteModel
from fedtar_flare.learning.training import Trained, Validated, adamw, batches, parts, retry_smaller_batch
from fedtar_flare.models.adapters.lora import shared_parameters, swapped_weights
from fedtar_flare.models.adapters.visit_shares import VisitShares
from fedtar_flare.models.report_generator import report_loss
from fedtar_flare.models.tokenizer import IGNORED
from fedtar_flare.protocol.exchange import factor

__all__ = ["ReportLearner", "Trained"]

logger = logging.getLogger(__name__)
clock = time.monotonic


class ReportLearner(SiteModel):
    """A :class:`SiteModel` that learns; by itself it is local training for FedAvg.

    A method overrides hooks. :attr:`personal_optimizer` steps the personal parameters, whose norm is limited by itself.

    Parameters
    ----------
    training, **others
        Arguments of :class:`SiteModel`.
    has_patients : bool
        Whether visits are real: no patient's gradient weighs more than another's, and DP-SGD draws anew in every task.
    """

    personal_optimizer: torch.optim.Optimizer | None = None
    batch_losses: list[tuple[list[str], Tensor]]
    """Patients and losses (B,) of the last batch, micro-batch by micro-batch."""
    shares_batches: ClassVar[bool] = False
    """Whether several processes may share a batch though the class sums it in its own way."""
    equal_layers: ClassVar[str] = "*"
    """Glob of the LoRA layers whose input has a batch's visits in their order: no patient weighs more than another."""
    loss_updates: ClassVar[int | None] = None
    """How many local updates, from the first one, are behind the loss of :class:`Trained`; None: all."""

    def __init__(self, *, training: TrainingConfig, has_patients: bool = False, **others: Any):
        super().__init__(training=training, **others)
        self.has_patients = has_patients
        equal = has_patients and self.equal_layers and training.noise_multiplier is None
        self.shares = VisitShares(self.model, self.adapter, self.equal_layers) if equal else None
        self.batch_losses = []
        self._ahead: dict[tuple[str, tuple[int, ...]], Future[ImageBatch]] = {}
        self._micro_batch = min(training.micro_batch or training.batch_size, training.batch_size)
        if training.gradient_checkpointing:
            self.generator.recompute_layers()

    # ------------------------------------------------------------------ hooks
    def training_losses(self, samples: Sequence[Sample], images: ImageBatch, seed: str) -> Tensor:
        """Compute the losses that a local update is made of.

        Parameters
        ----------
        samples, images : sequence of Sample and ImageBatch
            B samples and their images.
        seed : str
            Of this update, for what is random in it.

        Returns
        -------
        Tensor
            Shape (B,).
        """
        return self.report_losses(samples, images)

    def local_update(
        self, samples: Sequence[Sample], seed: str, optimizer: torch.optim.Optimizer, start: Mapping[str, Tensor]
    ) -> float | None:
        """Make one update of the shared part and of the personal part.

        Parameters
        ----------
        samples, seed : sequence of Sample and str
            The batch, and the seed of this update.
        optimizer, start : torch.optim.Optimizer and dict of str to Tensor
            Of the shared part; and ``w_{t-1}``, as :meth:`shared` gave it before the first update.

        Returns
        -------
        float or None
            The batch's loss; None where it or a gradient is not finite: the update is then left out for both parts.
        """
        loss = self._accumulate(samples, seed)
        self.after_backward(start)
        limit = self.training.max_grad_norm or math.inf
        learnt = (list(self.shared_parameters.values()), list(self.personal_parameters()))
        norms = [nn.utils.clip_grad_norm_(parameters, limit) for parameters in learnt]
        # the only time in an update that the processor waits for a GPU
        numbers: list[float] = torch.stack([value.to(loss) for value in (loss, *norms)]).tolist()
        if not all(map(math.isfinite, numbers)):
            return None
        optimizer.step()
        if self.personal_optimizer is not None:
            self.personal_optimizer.step()
        return numbers[0]

    def after_backward(self, start: Mapping[str, Tensor]) -> None:
        """Change the gradients of a batch before they are clipped. Per-patient DP-SGD does not cover such a change.

        Parameters
        ----------
        start : dict of str to Tensor, ``w_{t-1}``
        """

    def shared_optimizer(self, parameters: Sequence[nn.Parameter], epochs: float) -> torch.optim.Optimizer:
        """Make the optimiser of the shared part, fresh in every task: its start point is not where the last task ended.

        Parameters
        ----------
        parameters : sequence of nn.Parameter
        epochs : float
            How often the task goes through its visits: reports read / visits.

        Returns
        -------
        torch.optim.Optimizer, by default AdamW
        """
        return adamw(parameters, lr=self.rate * self.training.lr, weight_decay=self.training.weight_decay)

    def personal_parameters(self) -> Sequence[nn.Parameter]:
        """List what is trained besides the adapter and stays at the site.

        Returns
        -------
        sequence of nn.Parameter, by default none
        """
        return ()

    def private(self) -> dict[str, Tensor]:
        """Copy what persists at the site between tasks.

        Returns
        -------
        dict of str to Tensor, by default nothing
        """
        return {}

    def losses_and_states(
        self, samples: Sequence[Sample], images: ImageBatch, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the report losses and the decoder's last hidden states, for a loss on representations.

        Parameters
        ----------
        samples, images : sequence of Sample and ImageBatch
            B samples and their images.
        weights : dict of str to Tensor, optional
            Shared weights to compute them with, as :meth:`shared` gives them, without a gradient and before the pass
            that has one. None: the model as it is.

        Returns
        -------
        losses, states, written : Tensor
            (B,), (B, L, E), and (B, L), bool, which is True at the tokens of the reports.
        """
        if weights is not None:
            with torch.no_grad(), swapped_weights(self.model, weights, self.adapter):
                return self.losses_and_states(samples, images)
        self.generator.require_parts("a loss on the decoder's states")
        ids, labels = (part.to(self.device) for part in self.tokenizer.batch([s.visit.report for s in samples]))
        with self._autocasting(), self.context(samples, True):
            logits, states = self.generator.predict(images, ids, self.encoded(samples, images))
        return report_loss(logits, labels), states, labels != IGNORED

    # ------------------------------------------------------------------ training
    def train(
        self,
        steps: int | Collection[int] | None,
        seed: int,
        on_update: Callable[[int], object] = lambda number: None,
        updates: int | None = None,
        least: int = 1,
    ) -> Trained:
        """Train the shared and the personal part on the visits of a time step (FedTAR, Algorithm 1, local updates).

        An update whose loss or gradient is not finite is skipped, for both parts alike.

        Parameters
        ----------
        steps : int, collection of int or None
            The time step t, or several together; None takes the visits of all steps.
        seed : int
            Of the order of the samples.
        on_update : callable
            Called after each update that was made with its number, from 1, skipped ones counted.
        updates, least : int
            How many updates to make (None: as ``training`` says), and how many even if ``training.seconds`` is up.

        Returns
        -------
        Trained
            The update ``w_k - w_{t-1}``, and what may be said of it.

        Raises
        ------
        DataError
            ``no-training-visit`` at this step; ``non-finite-gradient`` when every update was skipped.
        """
        samples = self.cohort.samples("train", steps, self.min_cell)
        if not samples:
            raise DataError("no training visit at the time steps of this task", reason="no-training-visit")
        start = self.shared()
        shown = max(1, shown_visits(self.cohort, steps, self.min_cell))  # what follows from it shows in the update
        count = updates or self.training.updates_of(shown)
        epochs = count * self.training.batch_size / shown
        optimizer = self.shared_optimizer(list(self.shared_parameters.values()), epochs)
        for group in self.personal_optimizer.param_groups if self.personal_optimizer else ():
            group["lr"] = self.rate * group.setdefault("initial_lr", group["lr"])
        # 1. The batches: shuffled epochs, or patients drawn at random for DP-SGD.
        planned = list(batches(len(samples), self.training.batch_size, count, seed, self.min_cell))
        batches_: Iterable[list[int]] = planned
        if self.training.noise_multiplier is not None:
            self._random = None if self.has_patients else torch.Generator().manual_seed(seed)
            names = [sample.visit.patient_id for sample in samples]
            rate = self.training.draw_rate(len(samples))
            planned, batches_ = [], poisson_batches(names, rate, count, self._random)
        # 2. The updates; the next one's images are read while one is made.
        losses: list[float] = []
        report_losses: list[tuple[list[str], Tensor]] = []
        visits: set[int] = set()
        visits_of_loss: set[int] = set()
        self._ahead = {}  # a task that failed may have left some
        begin, tried, updates_made = clock(), 0, 0
        with ThreadPoolExecutor(1) as reader:
            for number, batch in enumerate(batches_, start=1):
                if number > max(1, least) and not self._fits(number, clock() - begin):
                    break
                tried = number
                self.checkpoint()
                for following in planned[number : number + 1]:  # its first part
                    share = self.ranks.share([samples[i] for i in following])[: self._micro_batch]
                    if share:
                        ahead = reader.submit(self.images, share, f"{seed}/{number}")
                        self._ahead[f"{seed}/{number}", tuple(map(id, share))] = ahead
                loss = self.local_update([samples[i] for i in batch], f"{seed}/{number - 1}", optimizer, start)
                if loss is None:
                    logger.warning("local update %d of %d skipped: its loss or gradient is not finite", number, count)
                    continue
                visits.update(batch)
                if self.loss_updates is None or len(losses) < self.loss_updates:
                    losses.append(loss)
                    report_losses += self.batch_losses
                    visits_of_loss.update(batch)
                updates_made += 1
                on_update(number)
        self._ahead = {}
        self._clear_gradients()
        if not losses:
            problem = f"none of the {tried} local updates had a finite loss and gradient: too high a learning rate, or "
            raise DataError(f"{problem}damaged weights that came down", reason="non-finite-gradient")
        # 3. The update w_k - w_{t-1}, and whose visits are behind it and its loss; planted ones are nobody's.
        end = self.shared()
        self.ranks.require_equal(end | self.private())
        real = {i for i in visits if not samples[i].planted}
        return Trained(
            {name: end[name] - start[name] for name in self.shared_parameters},
            samples=len(samples),
            loss=self._reported_loss(report_losses, sum(losses) / len(losses)),
            updates=tried,
            skipped_updates=tried - updates_made,
            patients=len({samples[i].visit.patient_id for i in real}),
            loss_patients=len({samples[i].visit.patient_id for i in real & visits_of_loss}),
            loss_visits=len(real & visits_of_loss),
        )

    def _validation_losses(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        return self.report_losses(samples, images)

    def _training_images(self, samples: Sequence[Sample], seed: str) -> ImageBatch:
        """Images of a part of an update, which may have been read during the update before."""
        ahead = self._ahead.pop((seed, tuple(map(id, samples))), None)
        return self.images(samples, seed) if ahead is None else ahead.result()

    def _fits(self, number: int, spent: float) -> bool:
        """Whether an update likely ends within ``training.seconds``, by those before it; rank 0 decides."""
        limit = self.training.seconds
        return not limit or bool(self.ranks.gather(spent * number <= limit * (number - 1))[0])

    def _accumulate(self, samples: Sequence[Sample], training_seed: str | None = None) -> Tensor:
        """Loss (float64) and gradient of a batch's mean report loss over all ranks; DP-SGD clips and adds noise."""
        noise_multiplier = self.training.noise_multiplier
        if training_seed is None or noise_multiplier is None:
            return self._accumulate_plain(samples, training_seed, len(samples))
        patients: dict[str, list[Sample]] = {}
        for sample in samples:
            patients.setdefault(sample.visit.patient_id, []).append(sample)
        total = add_private_gradients(
            [*self.shared_parameters.values(), *self.personal_parameters()],
            [partial(self._accumulate_plain, visits, training_seed, 1) for visits in patients.values()],
            clip=self.training.max_grad_norm,
            noise_multiplier=noise_multiplier,
            reports=self.training.batch_size,
            generator=self._random,
        )
        return total.to(self.device) / max(1, len(samples))

    def _accumulate_plain(self, samples: Sequence[Sample], training_seed: str | None, count: int) -> Tensor:
        """Sum of report losses over ``count``, and its gradient."""
        share = self.ranks.share(samples)
        shares = None if training_seed is None else self.shares
        if shares is not None:
            shares.begin([sample.visit.patient_id for sample in samples])

        def run(size: int) -> Tensor:
            self._micro_batch = size
            self._clear_gradients()
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            self.batch_losses = []
            for part in parts(share, size):
                with nullcontext() if shares is None else shares.equal([s.visit.patient_id for s in part]):
                    if training_seed is None:
                        losses = self._validation_losses(part, self.images(part))
                    else:
                        losses = self.training_losses(part, self._training_images(part, training_seed), training_seed)
                    self.batch_losses.append(([sample.visit.patient_id for sample in part], losses.detach()))
                    loss = losses.sum() / count
                    loss.backward()
                total += loss.detach()
            return total

        learnt = (*self._parameters, *self.personal_parameters())
        total = self.ranks.summed(retry_smaller_batch(self._micro_batch, run), learnt)
        if shares is not None:
            shares.finish(self.min_cell)
        return total

    def _clear_gradients(self) -> None:
        for parameter in (*self._parameters, *self.personal_parameters()):
            parameter.grad = None

    @cached_property
    def _parameters(self) -> tuple[nn.Parameter, ...]:
        tally = () if self.shares is None else (self.shares.tally,)
        return (*self.model.parameters(), *tally)  # to walk through all modules takes as long as a small layer

    @cached_property
    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """What is trained and travels, by the name under which it does; with ``lora.mean`` 'ffa' without A."""
        shared = shared_parameters(self.model, self.adapter)
        return {name: p for name, p in shared.items() if factor(name) != "A"} if self.lora.mean == "ffa" else shared

    def validate(self) -> Validated | None:
        """Compute loss and gradient in w over the validation patients' visits, with the personal part.

        Returns
        -------
        Validated, or None without a validation patient
        """
        samples = self.cohort.samples("validation", least=self.min_cell)
        if not samples:
            return None
        loss = float(self._accumulate(samples))
        gradient = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().float().cpu().clone()
            for name, p in self.shared_parameters.items()
        }
        self._clear_gradients()
        return Validated(self._reported_loss(self.batch_losses, loss), gradient, len(samples))

    def _reported_loss(self, report_losses: Sequence[tuple[list[str], Tensor]], mean: float) -> float:
        """The mean loss of the reports of all ranks, winsorised so that no report by itself shows in it."""
        if self.min_cell == 1:
            return mean
        pairs: list[tuple[str, float]] = []
        for patients, losses in report_losses:
            pairs += zip(patients, losses.tolist(), strict=True)
        pairs = list(chain.from_iterable(self.ranks.gather(pairs)))
        return winsorised_mean(pairs, self.min_cell) if pairs else mean  # DP-SGD may draw nobody
