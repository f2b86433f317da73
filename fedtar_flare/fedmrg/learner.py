"""FedMRG at one site: each local update has two halves, in which one adapter learns from the other.

::

    L1 = L_LM(generic)     + L_CE + a L_HCL + b KD(generic, specialised)     moves Theta and G
    L2 = L_LM(specialised) + L_CE + a L_HCL + b KD(specialised, generic)     moves Theta and S

Theta is the encoder with its pooling and map, and the diagnosis branch. The AdamW of Theta and G is made afresh in each
task and shared by both halves; that of S is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedtar_flare.data.cohort import Sample, Split, Visit, told
from fedtar_flare.fedmrg.bank import FEATURES, ROUNDS, check_down, membership_auc, others
from fedtar_flare.fedmrg.config import FedMRGConfig
from fedtar_flare.fedmrg.contrast import contrast_losses, features, unit
from fedtar_flare.fedmrg.diagnosis import DiagnosisBranch, diagnosis_losses, extend
from fedtar_flare.fedmrg.distill import distill_losses
from fedtar_flare.fedmrg.dual_adapter import (
    GENERIC,
    add_specialised,
    copy_broadcast,
    generic_model,
    mixed_model,
    specialised_model,
    specialised_parameters,
)
from fedtar_flare.fedmrg.labels import POSITIVE, labeler
from fedtar_flare.imaging.augment import sample_seed
from fedtar_flare.imaging.batch import ImageBatch, collate
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.learning.evaluation import Evaluated
from fedtar_flare.learning.learner import EVALUATION_BATCH, ReportLearner
from fedtar_flare.learning.training import (
    Trained,
    Validated,
    augmented,
    load_optimizer_state,
    optimizer_state,
    parts,
)
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.report_generator import ReportGenerator, report_loss

PREFIX = "specialised/"
"""Of the specialised factors' names in the site's private state."""
SENT = "sent/"
"""Of the names of the rows that the site sent, by round, likewise."""
HALVES = ("generic", "specialised")
KEPT_BYTES = 2**28
"""Most memory for the tokens of images that a frozen encoder has seen."""


class FedMRGLearner(ReportLearner):
    """The two halves of every local update; arguments beside ``fedmrg`` as :class:`ReportLearner`.

    :attr:`bank` holds unit rows (M, C) of other hospitals' features for the contrast, :attr:`sent` by round the rows
    that this site sent, which are part of its state, :attr:`bank_use` what is told of both.
    """

    adapter = GENERIC

    def __init__(self, *, fedmrg: FedMRGConfig, model: ModelConfig, seed: int, **others: Any):
        self._fedmrg, self._seed = fedmrg, seed
        super().__init__(model=model, seed=seed, **others)
        add_specialised(self.model, model.lora_targets, seed)
        self.model.to(self.device)
        self.personal_optimizer = torch.optim.AdamW(
            self.personal_parameters(), lr=fedmrg.lr_specialised, weight_decay=self.training.weight_decay
        )
        self.bank = torch.zeros(0, self.feature_width)
        self.sent: dict[int, Tensor] = {}
        self.bank_use: dict[str, float] = {}
        self._personal = True
        self._half = HALVES[0]
        self._batch: Sequence[Sample] = ()
        self._cached: dict[Visit, tuple[Tensor, Tensor, Tensor]] = {}
        self._parts: dict[str, dict[Visit, float]] = {}
        self._seen: dict[Visit, Tensor] = {}

    # ------------------------------------------------------------------ what it is
    @property
    def _base(self) -> ReportGenerator:
        return cast(ReportGenerator, self.model.get_base_model())

    @property
    def _branch(self) -> DiagnosisBranch | None:
        return cast(DiagnosisBranch | None, self._base.diagnosis)

    @property
    def feature_width(self) -> int:
        """C, of a feature."""
        return int(self._base.encoder.width)

    @property
    def extension(self) -> dict[str, Any]:
        """What :func:`fedtar_flare.fedmrg.diagnosis.extend` needs to know."""
        return self._fedmrg.extension(self._config.slices, self._seed)

    def extend(self, generator: ReportGenerator) -> None:
        """The diagnosis branch."""
        extend(generator, self.extension)

    def describe(self) -> dict[str, Any]:
        own = sum(parameter.numel() for parameter in self.personal_parameters())
        mine = {"extension": self.extension, "specialised_parameters": own, "feature_width": self.feature_width}
        return super().describe() | mine

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Also takes the bank, which comes down with the weights of a training task unless it is empty."""
        rows = weights.get(FEATURES)
        if rows is not None:
            check_down(rows, self.feature_width)
        super().load_shared({name: value for name, value in weights.items() if name != FEATURES})
        self.bank = torch.zeros(0, self.feature_width) if rows is None else rows.clone()

    @property
    def has_personal_part(self) -> bool:
        """Whether the specialised adapter has been trained."""
        return any(bool(p.any()) for name, p in specialised_parameters(self.model).items() if ".lora_B." in name)

    def context(self, samples: Sequence[Sample], personal: bool) -> AbstractContextManager[Any]:
        """Both adapters (Eq. 6), or the generic one alone."""
        both = personal and self._personal and self.has_personal_part
        return mixed_model(self.model, self._fedmrg.mix) if both else generic_model(self.model)

    def validate(self) -> Validated | None:
        """Of the generic model: it is what travels, and what the best round is chosen by."""
        self._personal = False
        try:
            return super().validate()
        finally:
            self._personal = True

    def report_losses(
        self, samples: Sequence[Sample], images: ImageBatch, personal: bool = True, focus: float = 0.0
    ) -> Tensor:
        """As :meth:`ReportLearner.report_losses`; a frozen encoder sees no image twice."""
        ids, labels = (part.to(self.device) for part in self.tokenizer.batch([s.visit.report for s in samples]))
        with self._computing(samples, personal):
            return self._base(images, ids, labels, focus, tokens=self._tokens(samples, images))

    @torch.no_grad()
    def generate(self, samples: Sequence[Sample], images: ImageBatch, personal: bool = True) -> list[str]:
        """As :meth:`ReportLearner.generate`, likewise."""
        with self._computing(samples, personal):
            ids = self._base.generate(images, tokens=self._tokens(samples, images))
        return [self.tokenizer.decode(row) for row in ids.tolist()]

    def evaluate(self, min_cell: int, split: Split | None = "test") -> Evaluated:
        """An untrained specialised adapter changes nothing, so that its scores are the generic model's."""
        found = super().evaluate(min_cell, split)
        if found.scores_generic is not None:
            return found
        rows = [*found.rows, *({**row, "personal": False} for row in found.rows)]
        return replace(found, scores_generic=found.scores, rows=rows)

    # ------------------------------------------------------------------ training
    def personal_parameters(self) -> Sequence[nn.Parameter]:
        return tuple(specialised_parameters(self.model).values())

    def shared_optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """G at ``lr_shared``, branch at ``lr_branch``, its prompts at ``lr_prompts``, the rest at ``lr_encoder``."""
        settings = self._fedmrg
        rates = {
            "base_model.": self.training.lr_shared,
            "diagnosis.head.": settings.lr_branch,
            "diagnosis.embeddings": settings.lr_prompts,
        }
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in shared_parameters(self.model, self.adapter).items():
            rate = next((rate for start, rate in rates.items() if name.startswith(start)), settings.lr_encoder)
            groups.setdefault(self.rate * rate, []).append(parameter)
        return torch.optim.AdamW(
            [{"params": members, "lr": rate} for rate, members in groups.items()],
            weight_decay=self.training.weight_decay,
        )

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        """As :meth:`ReportLearner.train`, from Q = G; the losses that it names are the generic model's token losses."""
        copy_broadcast(self.model)
        self._sums: dict[str, list[float]] = {}
        trained = super().train(*args, **kwargs)
        parts = {"loss_parts": {name: fmean(v) for name, v in sorted(self._sums.items())}}
        return replace(trained, parts=parts | ({"bank": self.bank_use} if self.bank_use else {}))

    def local_update(
        self, samples: Sequence[Sample], seed: str, optimizer: torch.optim.Optimizer, start: Mapping[str, Tensor]
    ) -> float | None:
        """Both halves; a second half that is not finite leaves the first one's step."""
        self._batch, self._parts = samples, {}
        for self._half in HALVES:
            self._cached = {}
            if super().local_update(samples, seed, optimizer, start) is None:
                return None
        means = {name: fmean(values.values()) for name, values in self._parts.items()}
        for name, mean in means.items():
            self._sums.setdefault(name, []).append(mean)
        return means["language_generic"]

    def training_losses(self, samples: Sequence[Sample], images: ImageBatch, seed: str) -> Tensor:
        """Loss of each report in the running half, (B,); the teacher and what it reads have no gradient."""
        base, settings = self._base, self._fedmrg
        moves_theta = self._half == HALVES[0] or settings.encoder_updates == "both"
        ids, labels = (part.to(self.device) for part in self.tokenizer.batch([s.visit.report for s in samples]))
        classes = self._classes(samples)
        with self._autocasting():
            with torch.set_grad_enabled(moves_theta):
                tokens = self._tokens(samples, images)
                memory, mask = base.memory(images, tokens)
                seen, prompts = None, None
                if self._branch is not None:
                    seen = self._branch(tokens, images.slice_mask)
                    prompts = self._branch.prompts_of(self._told(samples, classes, seen.argmax(-1), seed))
            student, teacher = generic_model, specialised_model
            if self._half == HALVES[1]:
                student, teacher = teacher, student
            with student(self.model):
                logits, states = base.decode(memory, mask, ids, prompts)
            with torch.no_grad(), teacher(self.model):
                taught, teaching = base.decode(memory, mask, ids, prompts)
        found = {f"language_{self._half}": report_loss(logits, labels, self.training.focus)}
        found[f"distillation_{self._half}"] = distill_losses(states, logits, teaching, taught, labels, settings.kl)
        losses = found[f"language_{self._half}"] + settings.distill_weight * found[f"distillation_{self._half}"]
        if moves_theta and seen is not None:
            found["diagnosis"] = diagnosis_losses(seen, classes)
            losses = losses + found["diagnosis"]
        if moves_theta and settings.contrast_weight and self._encoder_learns:
            found["contrast"] = self._contrast(samples, features(tokens, images.slice_mask), seed)
            losses = losses + settings.contrast_weight * found["contrast"]
        for name, values in found.items():
            kept = self._parts.setdefault(name, {})
            kept |= {s.visit: value for s, value in zip(samples, values.tolist(), strict=True)}
        return losses

    @property
    def _encoder_learns(self) -> bool:
        return any(parameter.requires_grad for parameter in self._base.encoder.parameters())

    def _classes(self, samples: Sequence[Sample]) -> Tensor:
        """Classes (B, D) of the reports' findings."""
        label = labeler(self._fedmrg.labeler, self._fedmrg.prompt_classes).label
        return torch.tensor([label(s.visit.report) for s in samples], dtype=torch.long, device=self.device)

    def _told(self, samples: Sequence[Sample], truth: Tensor, predicted: Tensor, seed: str) -> Tensor:
        """Classes (B, D) that the prompts tell in training: of each report its own, or those that were predicted."""
        drawn = [sample_seed(0, f"prompt/{seed}", s.visit.patient_id, s.visit.visit_id) / 2**32 for s in samples]
        own = torch.tensor(drawn, device=truth.device) < self._fedmrg.prompt_truth
        return torch.where(own[:, None], truth, predicted)

    def _tokens(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        """The encoder's tokens of the samples; those of an encoder that does not learn are kept, up to a limit."""
        if self._encoder_learns or self.training.augment:
            return self._base.tokens(images)
        kept = [self._seen.get(sample.visit) for sample in samples]
        if all(row is not None and row.shape[0] == images.images.shape[1] for row in kept):
            return torch.stack(cast(list[Tensor], kept))
        tokens = self._base.tokens(images).detach()
        if (len(self._seen) + len(samples)) * tokens[0].nbytes <= KEPT_BYTES:
            self._seen |= {sample.visit: row for sample, row in zip(samples, tokens, strict=True)}
        return tokens

    @contextmanager
    def _autocasting(self) -> Iterator[None]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            yield

    # ------------------------------------------------------------------ contrast
    def _contrast(self, samples: Sequence[Sample], u: Tensor, seed: str) -> Tensor:
        """Contrast of each visit of a part of the batch against the whole of it, (B,).

        Where the batch does not fit in memory, the features of all of it are made without a graph, and each part adds
        ``<u, dL/du> + <v, dL/dv>``: the exact gradient, under the loss's own value.
        """
        view = self._view(samples, seed)
        with self._autocasting():
            v = features(self._base.tokens(view), view.slice_mask)
        if len(samples) == len(self._batch):
            return self._against(u, v, samples)
        if not self._cached:
            self._cached = self._gradients(seed)
        losses, du, dv = (torch.stack(rows) for rows in zip(*(self._cached[s.visit] for s in samples), strict=True))
        linear = (u * du).sum(1) + (v * dv).sum(1)
        return linear - linear.detach() + losses

    def _gradients(self, seed: str) -> dict[Visit, tuple[Tensor, Tensor, Tensor]]:
        """Loss of each visit of the batch, and the gradient of their sum in both of its features."""
        with torch.no_grad(), self._autocasting():
            both: tuple[list[Tensor], list[Tensor]] = ([], [])
            for part in parts(self._batch, self._micro_batch):
                for found, images in zip(both, (self.images(part, seed), self._view(part, seed)), strict=True):
                    found.append(features(self._base.tokens(images), images.slice_mask))
        u, v = (torch.cat(found).requires_grad_() for found in both)
        with torch.enable_grad():
            losses = self._against(u, v, self._batch)
            du, dv = torch.autograd.grad(losses.sum(), (u, v))
        rows = zip(losses.detach(), du, dv, strict=True)
        return {sample.visit: row for sample, row in zip(self._batch, rows, strict=True)}

    def _against(self, u: Tensor, v: Tensor, samples: Sequence[Sample]) -> Tensor:
        names = [sample.visit.patient_id for sample in samples]
        patients = torch.tensor([names.index(name) for name in names], device=u.device)
        settings = self._fedmrg
        return contrast_losses(
            u, v, patients, self.bank, temperature=settings.temperature, denominator=settings.denominator
        )

    def _view(self, samples: Sequence[Sample], seed: str) -> ImageBatch:
        """The second view: the visits' images, changed at random."""
        return collate(augmented(images_of(samples), samples, f"{seed}/view")).to(self.device)

    # ------------------------------------------------------------------ the bank
    @torch.no_grad()
    def features_of(self, samples: Sequence[Sample]) -> Tensor:
        """Unit features (B, C) of the samples' plain images by the encoder as it is, on the CPU."""
        found = []
        for part in parts(samples, EVALUATION_BATCH):
            images = self.images(part, prior=False)
            with self._autocasting():
                found.append(features(self._base.tokens(images), images.slice_mask).cpu())
        return torch.cat(found)

    def share_rows(self, rows: Sequence[Sequence[Sample]], round_: int, min_cell: int) -> Tensor | None:
        """The unit rows (M, C) of these groups of samples, kept as :attr:`sent`; None without any.

        They are made by the encoder that came down, which is one space for all sites and has no trace of this one. How
        well they give away who is in them is measured against the site's validation and test patients, where at least
        ``min_cell`` patients are on either side.
        """
        self.sent = {r: kept for r, kept in self.sent.items() if 0 < round_ - r <= ROUNDS}
        self.bank = others(self.bank, list(self.sent.values()))
        self.bank_use = {"sent": 0.0, "received": float(len(self.bank))}
        if not rows:
            return None
        inside = self.features_of([sample for row in rows for sample in row])
        many, group = len(rows), len(rows[0])
        shared = unit(inside.view(many, group, -1).mean(1))
        self.sent[round_] = shared
        self.bank_use |= {"sent": float(many), "patients_a_row": float(group)}
        outside = {s.visit.patient_id: s for split in ("validation", "test") for s in self.cohort.samples(split)}
        if min(len(inside), len(outside)) >= min_cell:
            self.bank_use["membership_auc"] = membership_auc(shared, inside, self.features_of(list(outside.values())))
        return shared

    # ------------------------------------------------------------------ diagnoses
    @torch.no_grad()
    def diagnoses(self, samples: Sequence[Sample], min_cell: int) -> dict[str, dict[str, float]]:
        """Of each finding that at least ``min_cell`` distinct patients have: how many reports state it (down to a
        multiple of ``min_cell``), and its prompt's recall and accuracy (shares).
        """
        branch, known = self._branch, labeler(self._fedmrg.labeler, self._fedmrg.prompt_classes)
        if branch is None or not samples:
            return {}
        predicted = []
        for part in parts(samples, EVALUATION_BATCH):
            images = self.images(part, prior=False)
            with self._autocasting():
                predicted.append(branch(self._tokens(part, images), images.slice_mask).argmax(-1).cpu())
        said, truth = torch.cat(predicted), self._classes(samples).cpu()
        found = {}
        for i, finding in enumerate(known.findings):
            there = truth[:, i] == POSITIVE
            having = {s.visit.patient_id for s, states in zip(samples, there.tolist(), strict=True) if states}
            if having and len(having) >= min_cell:
                found[finding.replace(" ", "_")] = {
                    "n": told(int(there.sum()), min_cell),
                    "recall": float((said[there, i] == POSITIVE).float().mean()),
                    "accuracy": float((said[:, i] == truth[:, i]).float().mean()),
                }
        return found

    # ------------------------------------------------------------------ what stays
    def private(self) -> dict[str, Tensor]:
        """The specialised adapter and its optimiser, and the rows sent in the last rounds."""
        assert self.personal_optimizer is not None
        own = specialised_parameters(self.model)
        state = {f"{PREFIX}{name}": value.detach() for name, value in own.items()}
        state |= {f"{SENT}{round_}": rows for round_, rows in self.sent.items()}
        return state | optimizer_state(self.personal_optimizer, own)

    def load_private(self, state: Mapping[str, Tensor]) -> None:
        assert self.personal_optimizer is not None
        own = specialised_parameters(self.model)
        load_specialised(self.model, state)
        self.sent = {int(name.removeprefix(SENT)): v.clone() for name, v in state.items() if name.startswith(SENT)}
        load_optimizer_state(self.personal_optimizer, own, state)


def load_specialised(model: Any, state: Mapping[str, Tensor]) -> None:
    """Load the specialised adapter of what :meth:`FedMRGLearner.private` gave, without its optimiser's state."""
    with torch.no_grad():
        for name, parameter in specialised_parameters(model).items():
            parameter.copy_(state[f"{PREFIX}{name}"])
