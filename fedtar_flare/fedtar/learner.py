"""Local learning at one site: train on one visit step, validation loss with its gradient, scores of the test patients.

Knows nothing of federation: it runs in a notebook. The shared part (LoRA factors) goes in and out as tensors by name;
the patient part, its optimiser and the demographic mixture stay inside and are saved by :meth:`SiteLearner.private`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from fedtar_flare.data.cohort import Cohort, Sample, Split
from fedtar_flare.errors import DataError
from fedtar_flare.fedtar.config import LoRAConfig, PatientConfig, TrainingConfig
from fedtar_flare.fedtar.demographics import DemographicMixture
from fedtar_flare.fedtar.patient_lora import PatientLoRA, PatientLoRAConfig
from fedtar_flare.fedtar.profiles import memberships
from fedtar_flare.imaging.batch import ImageBatch, collate
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.models.adapters.lora import (
    adapter_config,
    add_shared_lora,
    load_shared_state,
    shared_parameters,
    shared_state,
)
from fedtar_flare.models.build import build_model, build_tokenizer, require_trained
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.weights import fingerprint
from fedtar_flare.progress import Progress

logger = logging.getLogger(__name__)
Tensors = Mapping[str, torch.Tensor]
EVALUATION_BATCH = 16


@dataclass(frozen=True)
class Trained:
    """What one training task gave.

    Args:
        update: w_k - w_{t-1} by tensor name, float32.
        samples: n_k, training visits of this site at this step.
        loss: mean token loss over the local updates.
        first_loss, last_loss: of the first and the last local update.
    """

    update: dict[str, torch.Tensor]
    samples: int
    loss: float
    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class Validated:
    """Validation loss (mean over reports of the per-report token mean), its gradient in w, number of reports."""

    loss: float
    gradient: dict[str, torch.Tensor]
    reports: int


class SiteLearner:
    """One site's model with its shared and its private part.

    Args:
        model: which report generator.
        lora: the shared part.
        patient: the patient-adaptive part.
        training: local training.
        cohort: the site's patients, prepared (:func:`.imaging.pipeline.prepare_cohort`).
        mixture: the demographic mixture fitted at this site; None when the patient part is off.
        median_age: of the training patients when it was fitted.
        time_steps: T.
        seed: of the shared and patient parts' initial values, the same at every site.
        device: ``cpu`` or ``cuda[:i]``.
        autocast: whether to compute in bfloat16 autocast.
        checkpoint: called between batches; raises to stop (an aborted job).
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        lora: LoRAConfig,
        patient: PatientConfig,
        training: TrainingConfig,
        cohort: Cohort,
        mixture: DemographicMixture | None,
        median_age: float | None = None,
        time_steps: int,
        seed: int,
        device: str = "cpu",
        autocast: bool = False,
        checkpoint: Callable[[], None] = lambda: None,
    ):
        self.cohort = cohort
        self.training = training
        self.device = torch.device(device)
        self._autocast = autocast
        self.checkpoint = checkpoint
        self._mixture = mixture
        self._median_age = median_age
        self._config = model
        self._profile_fields = patient.profile
        self._micro_batch = min(training.micro_batch or training.batch_size, training.batch_size)
        self.tokenizer = build_tokenizer(model)
        generator = build_model(model)
        self.fingerprint = fingerprint(generator)
        exchanged = [n for n, _ in generator.named_parameters() if any(re.fullmatch(p, n) for p in lora.exchange)]
        require_trained(generator, model, exchanged)
        self.model = add_shared_lora(
            generator,
            targets=model.lora_targets,
            rank=lora.rank,
            alpha=lora.alpha,
            seed=seed,
            extra=lora.exchange,
        ).to(self.device)
        self.patient: PatientLoRA | None = None
        if patient.enabled:
            config = PatientLoRAConfig(
                rank=lora.rank,
                scale=patient.scale,
                components=patient.components,
                embedding_dim=patient.embedding_dim,
                time_conditioned=patient.time_conditioned,
                time_steps=time_steps,
                seed=seed,
            )
            self.patient = PatientLoRA(self.model, config).to(self.device)
            self._patient_optimizer = torch.optim.AdamW(
                self.patient.parameters(), lr=training.lr_patient, weight_decay=training.weight_decay
            )

    # ------------------------------------------------------------------ state
    def shared(self) -> dict[str, torch.Tensor]:
        """The shared part by name, float32 on the CPU."""
        return shared_state(self.model)

    def load_shared(self, weights: Tensors) -> None:
        """Load the shared part; raises :class:`ExchangeError` naming a tensor that does not fit."""
        load_shared_state(self.model, dict(weights))

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's configuration of the shared part, free of any path of the site."""
        return adapter_config(self.model)

    def describe(self) -> dict[str, Any]:
        """Name and sizes of the model, for the record."""
        base = sum(p.numel() for n, p in self.model.get_base_model().named_parameters() if ".lora_" not in n)
        patient = sum(p.numel() for p in self.patient.parameters()) if self.patient is not None else 0
        return {
            "preset": self._config.preset,
            "base_model": f"fedtar_flare preset '{self._config.preset}'",
            "encoder_name": self._config.encoder_name,
            "decoder_name": self._config.decoder_name,
            "license": "Apache-2.0" if self._config.weights == "small" else None,
            "parameters": base,
            "patient_parameters": patient,
            "fingerprint": self.fingerprint,
            "config": asdict(self._config),
        }

    def private(self) -> dict[str, torch.Tensor]:
        """The patient part and its optimiser: what persists at the site between tasks."""
        if self.patient is None:
            return {}
        state = {f"patient/{name}": value for name, value in self.patient.state_dict().items()}
        for name, parameter in self.patient.named_parameters():
            for key, value in self._patient_optimizer.state.get(parameter, {}).items():
                state[f"adamw/{key}/{name}"] = value
        return state

    def load_private(self, state: Tensors) -> None:
        """Load what :meth:`private` gave."""
        if self.patient is None:
            return
        prefix = "patient/"
        self.patient.load_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})
        self._patient_optimizer.state.clear()
        parameters = dict(self.patient.named_parameters())
        for key, value in state.items():
            if key.startswith("adamw/"):
                _, field, name = key.split("/", 2)
                value = value.clone() if field == "step" else value.to(self.device).clone()
                self._patient_optimizer.state[parameters[name]][field] = value

    # ------------------------------------------------------------------ training
    def train(
        self, time_step: int | None, seed: int, on_update: Callable[[int, float], None] = lambda number, loss: None
    ) -> Trained:
        """Algorithm 1 of FedTAR: local updates of the shared and the patient part on the visits of one time step.

        Args:
            time_step: t; None takes the visits of all steps together (the pooled baselines).
            seed: of the order of the samples.
            on_update: called after each local update with its number from 1 and its loss.

        Raises:
            DataError: when the site has no training visit at this step (ask :attr:`cohort` first).
        """
        samples = self.cohort.samples("train", time_step)
        if not samples:
            raise DataError(f"no training visit at step {time_step}", reason="no-training-visit")
        start = self.shared()
        shared = shared_parameters(self.model)
        optimizer = torch.optim.AdamW(
            shared, lr=self.training.lr_shared, weight_decay=self.training.weight_decay
        )  # fresh: its start point is not where the last task ended
        private = list(self.patient.parameters()) if self.patient is not None else []
        losses: list[float] = []
        for chosen in _batches(len(samples), self.training.batch_size, self.training.local_steps, seed):
            self.checkpoint()
            losses.append(self._accumulate([samples[i] for i in chosen], f"{seed}/{len(losses)}"))
            for parameters in (shared, private):
                if parameters and self.training.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(parameters, self.training.max_grad_norm)
            optimizer.step()
            if self.patient is not None:
                self._patient_optimizer.step()
            on_update(len(losses), losses[-1])
        self._clear_gradients()
        end = self.shared()
        update = {name: end[name] - start[name] for name in start}
        return Trained(update, len(samples), sum(losses) / len(losses), losses[0], losses[-1])

    def _accumulate(self, samples: Sequence[Sample], training_seed: str | None = None) -> float:
        """Gradient of the mean report loss of one batch, in micro-batches that fit in memory. Returns the loss.

        With ``training_seed`` the images are those of training, augmented where the settings say so.
        """
        while True:
            self._clear_gradients()
            try:
                total = 0.0
                for part in _parts(samples, self._micro_batch):
                    loss = self._report_losses(part, training_seed=training_seed).sum() / len(samples)
                    loss.backward()
                    total += loss.item()
                return total
            except torch.cuda.OutOfMemoryError:
                self._halve_micro_batch()

    def _halve_micro_batch(self) -> None:
        if self._micro_batch == 1:
            raise DataError(
                "the GPU's memory does not hold one report; take a smaller model or input, or write device: cpu in "
                "the site file",
                reason="out-of-memory",
            )
        self._micro_batch = max(1, self._micro_batch // 2)
        torch.cuda.empty_cache()
        logger.warning("out of GPU memory: going on with micro-batches of %d reports (same result)", self._micro_batch)

    def _clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        if self.patient is not None:
            self.patient.zero_grad(set_to_none=True)

    # ------------------------------------------------------------------ validation and scores
    def validate(self) -> Validated | None:
        """Loss and gradient in w over the validation patients' visits, patient part on; None without such a patient."""
        samples = self.cohort.samples("validation")
        if not samples:
            return None
        loss = self._accumulate(samples)
        names = shared_state(self.model).keys()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in shared_parameters(self.model)]
        gradient = {n: g.detach().float().cpu().clone() for n, g in zip(names, gradients, strict=True)}
        self._clear_gradients()
        return Validated(loss, gradient, len(samples))

    def evaluate(
        self,
        min_cell: int,
        split: Split = "test",
        personal: bool = True,
        on_texts: Callable[[Sequence[Sample], Sequence[str]], None] = lambda samples, texts: None,
    ) -> dict[str, Any]:
        """Scores of generated reports per time step and over all, of the given split's patients.

        Args:
            min_cell: a cell with fewer reports holds only its n.
            split: whose visits.
            personal: whether the patient part is on.
            on_texts: gets the samples and what was written for them; both stay at the site.

        Returns:
            ``{"steps": {"1": cell, ...}, "all": cell}``; a cell has n, bleu_1..bleu_4, rouge_l, cider, token_loss, and
            finding_f1 where the truth is known.
        """
        samples = self.cohort.samples(split)
        losses: list[float] = []
        texts: list[str] = []
        progress = Progress("scoring report", len(samples), logger.info)
        with torch.no_grad():
            for part in _parts(samples, EVALUATION_BATCH):
                self.checkpoint()
                losses += self._report_losses(part, personal).tolist()
                texts += self.generate(part, personal)
                progress(len(texts))
        on_texts(samples, texts)
        steps = range(1, self.cohort.time_steps + 1)
        at = {str(t): [i for i, sample in enumerate(samples) if sample.time_step == t] for t in steps}
        cell = lambda chosen: _score(samples, texts, losses, chosen, min_cell)  # noqa: E731
        # a step that is blanked is left out of "all" too: else its scores could be had by subtraction
        shown = [i for chosen in at.values() if len(chosen) >= min_cell for i in chosen]
        return {"steps": {t: cell(chosen) for t, chosen in at.items()}, "all": cell(shown)}

    @torch.no_grad()
    def generate(self, samples: Sequence[Sample], personal: bool = True) -> list[str]:
        """Reports written by beam search for these samples."""
        with self._context(samples, personal):
            ids = cast(Any, self.model.get_base_model()).generate(self._images(samples))
        return [self.tokenizer.decode(row) for row in ids.tolist()]

    def _report_losses(
        self, samples: Sequence[Sample], personal: bool = True, training_seed: str | None = None
    ) -> torch.Tensor:
        """Mean token loss of each report, shape (B,), float32."""
        input_ids, labels = self.tokenizer.batch([sample.visit.report for sample in samples])
        with self._context(samples, personal):
            images = self._images(samples, training_seed)
            return self.model.get_base_model()(images, input_ids.to(self.device), labels.to(self.device))

    def _images(self, samples: Sequence[Sample], training_seed: str | None = None) -> ImageBatch:
        prepared = images_of(samples)
        if training_seed is not None and self.training.augment:
            from fedtar_flare.imaging.augment import augment, sample_seed

            seeds = [sample_seed(0, training_seed, s.visit.patient_id, s.visit.visit_id) for s in samples]
            prepared = [replace(one, image=augment(one.image, seed)) for one, seed in zip(prepared, seeds, strict=True)]
        return collate(prepared).to(self.device)

    def _context(self, samples: Sequence[Sample], personal: bool) -> AbstractContextManager[Any]:
        stack = _Both(
            torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext(),
            self._adapt(samples) if personal and self.patient is not None else nullcontext(),
        )
        return stack

    def _adapt(self, samples: Sequence[Sample]) -> AbstractContextManager[Any]:
        assert self.patient is not None and self._mixture is not None
        q = memberships(samples, self._mixture, self.cohort.key, self._median_age, self._profile_fields)
        steps = torch.tensor([sample.time_step for sample in samples])
        return self.patient.adapt(q, steps)


class _Both:
    """Two context managers as one."""

    def __init__(self, first: AbstractContextManager[Any], second: AbstractContextManager[Any]):
        self._managers = (first, second)

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(*error)


def _batches(samples: int, size: int, count: int, seed: int) -> Iterator[list[int]]:
    """``count`` batches of indices, running through shuffled epochs; the last batch of an epoch may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(count):
        if not order:
            order = torch.randperm(samples, generator=generator).tolist()
        yield order[:size]
        order = order[size:]


def _parts(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def _score(
    samples: Sequence[Sample], texts: Sequence[str], losses: Sequence[float], chosen: Sequence[int], min_cell: int
) -> dict[str, Any]:
    from fedtar_flare.metrics.language import language_scores

    cell: dict[str, Any] = {"n": len(chosen)}
    if not chosen or len(chosen) < min_cell:
        return cell
    cell |= language_scores([samples[i].visit.report for i in chosen], [texts[i] for i in chosen])
    cell["token_loss"] = sum(losses[i] for i in chosen) / len(chosen)
    known = [i for i in chosen if samples[i].visit.findings is not None]
    if known:
        from fedtar_flare.metrics.clinical import finding_f1
        from fedtar_flare.synthetic.vocabulary import findings_in

        truth = [samples[i].visit.findings or frozenset() for i in known]
        cell["finding_f1"] = finding_f1(truth, [findings_in(texts[i]) for i in known])["finding_f1"]
    return cell
