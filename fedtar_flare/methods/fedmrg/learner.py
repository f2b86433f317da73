"""FedMRG at one site: each local update has two halves, in each of which one adapter learns from the other.

::

    L1 = L_LM(generic)     + L_CE + a L_HCL + b KD(generic, specialised)     moves Theta and G
    L2 = L_LM(specialised) + L_CE + a L_HCL + b KD(specialised, generic)     moves Theta and S

Theta is the encoder with its pooling and map, and the diagnosis branch. Both halves share the AdamW of Theta and G,
which is new in each task; that of S persists.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.data.minimum_cell import round_loss, round_share, winsorised_mean
from fedtar_flare.imaging.batch import ImageBatch, collate
from fedtar_flare.imaging.transform_list import built_in
from fedtar_flare.learning.diagnosis import diagnosis_losses, extend
from fedtar_flare.learning.inputs import augmented
from fedtar_flare.learning.labels import labeler
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.site_model import EVALUATION_BATCH
from fedtar_flare.learning.training import Trained, adamw, load_optimizer_state, optimizer_state, parts
from fedtar_flare.methods.fedmrg.bank import FEATURES, SiteBank, membership_auc
from fedtar_flare.methods.fedmrg.config import PROMPTS, FedMRGConfig
from fedtar_flare.methods.fedmrg.dual_adapter import (
    GENERIC,
    SPECIALISED,
    add_specialised,
    copy_broadcast,
    generic_model,
    mixed_model,
    specialised_model,
)
from fedtar_flare.methods.fedmrg.losses import BatchContrast, contrast_losses, distill_losses, features
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.report_generator import ReportGenerator, report_loss

HALVES = ("generic", "specialised")
PREFIX = "specialised/"
"""Prefix of the specialised factors in the site's private state."""


class FedMRGLearner(ReportLearner):
    """Trains the generic and the specialised adapter against each other (Che et al., Algorithm 1)."""

    adapter = GENERIC
    equal_layers = "decoder.*"  # the contrast reads images of other visits too
    shares_batches = True  # each rank contrasts its share of a batch with the whole of it

    def __init__(self, *, fedmrg: FedMRGConfig, model: ModelConfig, seed: int, **others: Any):
        self._fedmrg, self._seed = fedmrg, seed
        super().__init__(model=model, seed=seed, **others)
        add_specialised(self.model, model.lora_targets, seed)
        self.model.to(self.device)
        self._specialised = shared_parameters(self.model, SPECIALISED)
        rate, decay = self.training.lr, self.training.weight_decay
        self.personal_optimizer = adamw(self.personal_parameters(), lr=rate, weight_decay=decay)
        self.bank = SiteBank(int(self.generator.encoder.width))
        self._half = HALVES[0]
        self._parts: dict[str, dict[Visit, float]] = {}
        self._pairs: dict[str, list[tuple[str, float]]] = {}

    # ------------------------------------------------------------------ the model
    @property
    def _extension(self) -> dict[str, Any]:
        return self._fedmrg.extension(self._config.slices, self._seed)

    def extend(self, generator: ReportGenerator) -> None:
        extend(generator, self._extension)

    def describe(self) -> dict[str, Any]:
        size = sum(parameter.numel() for parameter in self.personal_parameters())
        about = {"extension": self._extension, "specialised_parameters": size, "feature_width": self.bank.width}
        return super().describe() | about

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Load the bank too, which comes down with the weights unless it is empty."""
        self.bank.receive(weights.get(FEATURES))
        super().load_shared({name: value for name, value in weights.items() if name != FEATURES})

    @property
    def has_personal_part(self) -> bool:
        return True

    @property
    def personal_part_acts(self) -> bool:
        """Whether the specialised adapter has been trained."""
        return any(bool(p.any()) for name, p in self._specialised.items() if ".lora_B." in name)

    def context(self, samples: Sequence[Sample], personal: bool) -> AbstractContextManager[Any]:
        """Both adapters (Eq. 6), or only the generic one."""
        both = personal and self.personal_part_acts
        return mixed_model(self.model, self._fedmrg.mix) if both else generic_model(self.model)

    def _validation_losses(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        """Validate the generic model: it travels, and the best round is chosen by it."""
        return self.report_losses(samples, images, personal=False)

    # ------------------------------------------------------------------ training
    def personal_parameters(self) -> Sequence[nn.Parameter]:
        return tuple(self._specialised.values())

    def shared_optimizer(self, parameters: Sequence[nn.Parameter], epochs: float) -> torch.optim.Optimizer:
        """G and the branch at ``training.lr``, the rest of Theta at ``fedmrg.lr_encoder``."""
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in shared_parameters(self.model, self.adapter).items():
            added = name.startswith(("base_model.", "diagnosis."))
            rate = self.training.lr if added else self._fedmrg.lr_encoder
            groups.setdefault(self.rate * rate, []).append(parameter)
        by_rate = [{"params": members, "lr": rate} for rate, members in groups.items()]
        return adamw(by_rate, weight_decay=self.training.weight_decay)

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        """From Q = G; the reported loss is the generic model's token loss."""
        copy_broadcast(self.model)
        self._pairs = {}
        trained = super().train(*args, **kwargs)
        means = {
            name: round_loss(winsorised_mean(pairs, self.min_cell), trained.loss_visits, self.min_cell)
            for name, pairs in sorted(self._pairs.items())
        }
        return replace(trained, parts={"loss_parts": means} | ({"bank": self.bank.use} if self.bank.use else {}))

    def local_update(
        self, samples: Sequence[Sample], seed: str, optimizer: torch.optim.Optimizer, start: Mapping[str, Tensor]
    ) -> float | None:
        """Both halves; where the second is not finite, the first half's step remains."""
        self._parts = {}
        for half in HALVES if self._fedmrg.specialised else HALVES[:1]:
            self._half = half
            if super().local_update(samples, seed, optimizer, start) is None:
                return None
        by_part = {name: [(v.patient_id, loss) for v, loss in losses.items()] for name, losses in self._parts.items()}
        of_ranks = self.ranks.gather(by_part)
        for name, pairs in chain.from_iterable(rank.items() for rank in of_ranks):
            self._pairs.setdefault(name, []).extend(pairs)
        patients, losses = zip(*chain(*(rank.get("language_generic", ()) for rank in of_ranks)), strict=True)
        self.batch_losses = [([*patients], torch.tensor(losses))]
        return fmean(losses)

    def training_losses(self, samples: Sequence[Sample], images: ImageBatch, seed: str) -> Tensor:
        """Loss of each report in the current half, (B,); the teacher and its inputs have no gradient."""
        base, settings = self.generator, self._fedmrg
        ids, labels = (part.to(self.device) for part in self.tokenizer.batch([s.visit.report for s in samples]))
        label = labeler(settings.labeler, PROMPTS[settings.prompts]["prompt_classes"]).label
        classes = torch.tensor([label(s.visit.report) for s in samples], dtype=torch.long, device=self.device)
        with self._autocasting():
            encoded = self.encoded(samples, images)
            tokens = encoded.tokens
            memory, mask = base.memory(images, encoded)
            branch = base.diagnosis
            seen = None if branch is None else branch(tokens, images.slice_mask)
            prompts = None if branch is None else branch.embed(classes)
            student, teacher = generic_model, specialised_model
            if self._half == HALVES[1]:
                student, teacher = teacher, student
            with student(self.model):
                logits, states = base.decode(memory, mask, ids, prompts)
            losses = report_loss(logits, labels)
            by_part = {f"language_{self._half}": losses}
            weight = settings.l2g_weight if self._half == HALVES[0] else settings.g2l_weight
            if settings.specialised and weight:
                with torch.no_grad(), teacher(self.model):
                    target, teaching = base.decode(memory, mask, ids, prompts)
                kd = distill_losses(states, logits, teaching, target, labels, settings.distillation != "logits")
                by_part[f"distillation_{self._half}"] = kd
                losses = losses + weight * kd
        if seen is not None:
            by_part["diagnosis"] = diagnosis_losses(seen, classes)
            losses = losses + by_part["diagnosis"]
        if settings.contrast_weight and any(p.requires_grad for p in base.encoder.parameters()):
            by_part["contrast"] = self._contrast(samples, features(tokens, images.slice_mask))
            losses = losses + settings.contrast_weight * by_part["contrast"]
        for name, values in by_part.items():
            part = self._parts.setdefault(name, {})
            part |= {s.visit: value for s, value in zip(samples, values.tolist(), strict=True)}
        return losses

    def _accumulate(self, samples: Sequence[Sample], training_seed: str | None = None) -> Tensor:
        """The contrast is of the whole batch, in whatever parts."""
        if training_seed is not None:
            losses = partial(contrast_losses, bank=self.bank.rows, temperature=self._fedmrg.temperature)
            self._contrast = BatchContrast(samples, partial(self._see, training_seed), losses, self._micro_batch)
        return super()._accumulate(samples, training_seed)

    def _see(self, seed: str, samples: Sequence[Sample], second: bool) -> Tensor:
        """Unit features (B, C) of an update's images, or of their second view, which is changed at random."""
        if second:
            changes = built_in(self._config.image_size)
            images = collate(augmented(self.prepared(samples), samples, f"{seed}/view", changes)).to(self.device)
        else:
            images = self._training_images(samples, seed)
        return self._features(images)

    def _features(self, images: ImageBatch) -> Tensor:
        with self._autocasting():
            return features(self.generator.tokens(images), images.slice_mask)

    # ------------------------------------------------------------------ the bank
    @torch.no_grad()
    def features_of(self, samples: Sequence[Sample]) -> Tensor:
        """Unit features (B, C) of the samples' images, without random changes, by the encoder as it is; on the CPU."""
        return torch.cat([self._features(self.images(p, prior=False)).cpu() for p in parts(samples, EVALUATION_BATCH)])

    def share_rows(self, rows: Sequence[Sequence[Sample]], round_: int, min_cell: int) -> Tensor | None:
        """Unit rows (M, C) for the bank, by the encoder that came down, which all have; None without any group."""
        self.bank.begin(round_)
        if not rows:
            return None
        inside = self.features_of([sample for row in rows for sample in row])
        shared = self.bank.share(inside, len(rows[0]), round_)
        outside = {s.visit.patient_id: s for split in ("validation", "test") for s in self.cohort.samples(split)}
        if min(len(inside), len(outside)) >= min_cell:
            value = membership_auc(shared, inside, self.features_of([*outside.values()]))
            self.bank.use["membership_auc"] = round_share(value, min(len(inside), len(outside)), min_cell)
        return shared

    # ------------------------------------------------------------------ private state
    def private(self) -> dict[str, Tensor]:
        assert self.personal_optimizer is not None
        factors = {f"{PREFIX}{name}": value.detach() for name, value in self._specialised.items()}
        return factors | self.bank.state() | optimizer_state(self.personal_optimizer, self._specialised)

    def load_private(self, state: Mapping[str, Tensor]) -> None:
        assert self.personal_optimizer is not None
        with torch.no_grad():
            for name, parameter in self._specialised.items():
                parameter.copy_(state[f"{PREFIX}{name}"])
        self.bank.load(state)
        load_optimizer_state(self.personal_optimizer, self._specialised, state)
