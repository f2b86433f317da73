"""A site's report generator with an adapter that travels: its images, its losses, the reports it writes, its scores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedtar_flare.core.text import Progress
from fedtar_flare.data.cohort import Cohort, Sample, Split, Visit
from fedtar_flare.imaging.batch import ImageBatch, PriorBatch, collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.imaging.transform_list import Spec, deterministic, random_for_training
from fedtar_flare.learning.comparison import ComparisonBranch
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.learning.device import choose_device
from fedtar_flare.learning.evaluation import Evaluated, report_rows, site_scores
from fedtar_flare.learning.findings import ReadFindings, read_findings
from fedtar_flare.learning.inputs import (
    PRIOR_DROPOUT,
    STORED_BYTES,
    FrozenStages,
    augmented,
    earlier,
    prior_batch,
    shown_kinds,
    writing_order,
)
from fedtar_flare.learning.ranks import ALONE, Ranks
from fedtar_flare.learning.report_labeler import ReportLabeler
from fedtar_flare.learning.training import retry_smaller_batch
from fedtar_flare.models.adapters.lora import (
    adapter_config,
    add_lora,
    extra_parameters,
    initial_weights,
    load_shared_state,
    shared_state,
)
from fedtar_flare.models.adapters.peft_file import DEFAULT_ADAPTER
from fedtar_flare.models.build import build_model, build_tokenizer, require_trained
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.report_generator import Encoded, ReportGenerator
from fedtar_flare.models.weights import fingerprint
from fedtar_flare.protocol.exchange import lowered

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)
EVALUATION_BATCH = 32


class SiteModel:
    """A report generator with the adapter that travels and what a site keeps to itself: losses, reports, scores.

    Learners are site models that train; ``fedtar generate`` builds the same class from what a run left, its adapter
    ``restored``. ``seed`` is of the adapter's initial values, the same at every site; ``checkpoint`` is called between
    batches, to stop an aborted job.
    """

    adapter: ClassVar[str] = DEFAULT_ADAPTER
    knows_patients: ClassVar[bool] = False
    """Whether :meth:`context` depends on the patient as well as the image."""
    writes = False
    """Whether reports are being written or scored, not trained on or validated."""
    prior_dropout: float = PRIOR_DROPOUT
    """Share of training visits whose visit before is hidden."""
    rate: float = 1.0
    """By what a task multiplies its learning rates (:meth:`TrainingConfig.rate_of`)."""
    newest_step: int | None = None
    """The last time step that has been learnt from, where visits arrive step by step; None: all have."""
    min_cell: int = 1
    """Fewest distinct patients of a split at a time step whose visits are learned from and validated on."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        lora: LoRAConfig,
        training: TrainingConfig,
        cohort: Cohort,
        seed: int,
        device: str = "cpu",
        precision: str = "float32",
        checkpoint: Callable[[], None] = lambda: None,
        local_paths: Mapping[str, Path | None] | None = None,
        restored: Callable[[ReportGenerator], PeftModel] | None = None,
        lora_rank: int | None = None,
        ranks: Ranks = ALONE,
        transforms: Sequence[Spec] = (),
        image_change: Callable[[Prepared], Prepared] | None = None,
        report_labeler: ReportLabeler | None = None,
        scores: Collection[str] = (),
    ):
        self.lora, self.lora_rank = lora, lora_rank or lora.rank
        self.ranks, self.transforms = ranks, transforms
        self.changes = random_for_training(transforms, augment=training.augment, image_size=model.image_size)
        """What changes training images at random."""
        self.image_change, self.report_labeler, self.scores = image_change, report_labeler, scores
        self.cohort, self.training = cohort, training
        self.checkpoint = checkpoint
        self._config = model
        self._evaluation_batch = EVALUATION_BATCH
        self._reading: list[Encoded] | None = None
        local = model.with_local_paths(local_paths or {})
        self.tokenizer = build_tokenizer(local)
        generator = build_model(local)
        size = sum(parameter.numel() for parameter in generator.parameters())
        device, self._autocast = choose_device(device, precision, size)
        self.device = torch.device(device)
        self.fingerprint = fingerprint(generator)
        if restored is None:
            self.extend(generator)
            require_trained(generator, model, extra_parameters(generator, lora.exchange))
            self.model = self.adapt(generator, lora, seed).to(self.device)
        else:
            self.model = restored(generator).to(self.device)
        self.generator = generator
        self._frozen = FrozenStages(generator, STORED_BYTES if restored is None else 0)

    # ------------------------------------------------------------------ hooks
    def extend(self, generator: ReportGenerator) -> None:
        """Add modules to the base model, before it gets its adapter; they are no part of its fingerprint."""

    def adapt(self, generator: ReportGenerator, lora: LoRAConfig, seed: int) -> PeftModel:
        """Give the base model the adapter that travels, and what travels whole."""
        return add_lora(
            generator,
            targets=self._config.lora_targets,
            rank=lora.rank,
            alpha=lora.alpha,
            seed=seed,
            extra=lora.exchange,
            adapter=self.adapter,
            site_rank=self.lora_rank,
        )

    @property
    def precision(self) -> str:
        """``bfloat16`` where autocast computes in it, else ``float32``."""
        return "bfloat16" if self._autocast else "float32"

    @property
    def has_personal_part(self) -> bool:
        """Whether more than the adapter acts at this site; evaluation is then done with and without it."""
        return False

    @property
    def personal_part_acts(self) -> bool:
        """Whether the personal part, as it is, changes anything; one that is untrained need not be scored apart."""
        return self.has_personal_part

    def context(self, samples: Sequence[Sample], personal: bool) -> AbstractContextManager[Any]:
        """Open what must be in force around a forward pass or beam search, such as the patients' own adapters."""
        return nullcontext()

    def report_losses(
        self, samples: Sequence[Sample], images: ImageBatch, personal: bool = True, prompts: Tensor | None = None
    ) -> Tensor:
        """Mean token loss of each report, (B,), float32; ``prompts`` (B, D, E) take the place of the head's."""
        input_ids, labels = self.tokenizer.batch([sample.visit.report for sample in samples])
        with self._autocasting(), self.context(samples, personal):
            ids, labels = input_ids.to(self.device), labels.to(self.device)
            return self.generator(images, ids, labels, seen=self.encoded(samples, images), prompts=prompts)

    def describe(self) -> dict[str, Any]:
        """Describe the model for the record."""
        return {
            "preset": self._config.preset,
            "base_model": f"fedtar_flare preset '{self._config.preset}'",
            "encoder_name": self._config.encoder_name,
            "decoder_name": self._config.decoder_name,
            "license": "Apache-2.0" if self._config.weights == "small" else None,
            "parameters": sum(p.numel() for n, p in self.model.named_parameters() if ".lora_" not in n),
            "fingerprint": self.fingerprint,
            "prior": self.cohort.timeline.prior,
            **({"priors": priors} if (priors := self.cohort.timeline.priors) > 1 else {}),
            **({"transforms": list(map(dict, fixed))} if (fixed := deterministic(self.transforms)) else {}),
            "config": self._config.to_dict(),
        }

    # ------------------------------------------------------------------ what travels
    def shared(self) -> dict[str, Tensor]:
        """Copy the shared part."""
        return shared_state(self.model, self.adapter)

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Load the shared part."""
        at_rank = weights if self.lora_rank == self.lora.rank else lowered(weights, self.lora_rank)
        load_shared_state(self.model, at_rank, self.adapter)

    def exchanged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give the shared part at the job's rank, which may be above the site's own."""
        return self.shared() if self.lora_rank == self.lora.rank else dict(weights) or initial_weights(self.model)

    def load_private(self, state: Mapping[str, Tensor]) -> None:
        """Load what the site keeps between tasks."""

    def load_for_writing(self, state: Mapping[str, Tensor]) -> None:
        """Load the part of the private state that acts when reports are written."""
        self.load_private(state)

    def adapter_config(self) -> dict[str, Any]:
        """Give PEFT's configuration of the shared part."""
        return adapter_config(self.model, self.adapter)

    # ------------------------------------------------------------------ images, reports, scores
    def images(self, samples: Sequence[Sample], training_seed: str | None = None, prior: bool = True) -> ImageBatch:
        """Collate the samples' images, with what the model is shown of the visits before."""
        batch = collate(self.prepared(samples, training_seed)).to(self.device)
        if prior:
            batch.prior = self.prior(samples, training_seed)
        return batch

    def prepared(self, samples: Sequence[Sample], training_seed: str | None = None) -> list[Prepared]:
        """Read the samples' images from the cache, as this site's machine shows them; for training, changed."""
        prepared = images_of(samples)
        if self.image_change is not None:
            prepared = list(map(self.image_change, prepared))
        if training_seed is not None and self.changes:
            prepared = augmented(prepared, samples, training_seed, self.changes)
        return prepared

    def prior(
        self,
        samples: Sequence[Sample],
        training_seed: str | None = None,
        texts: Mapping[Visit, str] | None = None,
        skipped: int = 1,
    ) -> PriorBatch | None:
        """Collate what the model is shown of the visits before."""
        chance = 0.0 if training_seed is None else self.prior_dropout
        kinds = shown_kinds(samples, self.cohort.timeline.prior_kinds, chance, training_seed or "")
        read = partial(self.prepared, training_seed=training_seed)
        batch = prior_batch(samples, kinds, self.tokenizer, read, texts)
        if batch is not None and skipped < self.cohort.timeline.priors:
            before = [sample.before or replace(sample, prior=None) for sample in samples]
            batch.earlier = self.prior(before, training_seed, texts, skipped + 1)
        return None if batch is None else batch.to(self.device)

    def encoded(self, samples: Sequence[Sample], images: ImageBatch) -> Encoded:
        """Encode images and those of the visits before; frozen stages run once a study."""
        if self._reading:
            return self._reading[0]
        prior, as_prepared = images.prior, not self.changes and self.image_change is None
        read = self._frozen.tokens if as_prepared else self._read
        with torch.no_grad():
            shown = None if prior is None else prior.images
            before = None if shown is None else read(list(map(earlier, samples)), shown)
        seen = Encoded(read(samples, images), images.slice_mask, prior, before)
        if self._reading is not None:
            self._reading.append(seen)
        return seen

    def _read(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        return self.generator.tokens(images)

    @contextmanager
    def _reading_once(self) -> Iterator[None]:
        """The encoder reads the images once: inside, neither they nor what acts on them may change."""
        self._reading = []
        try:
            yield
        finally:
            self._reading = None

    @torch.no_grad()
    def generate(self, samples: Sequence[Sample], images: ImageBatch, personal: bool = True) -> list[str]:
        """Write drafts by beam search."""
        with self._autocasting(), self.context(samples, personal):
            ids = self.generator.generate(
                images,
                seen=self.encoded(samples, images),
                context=lambda rows: self.context([samples[i] for i in rows], personal),
            )
        return [self.tokenizer.decode(row) for row in ids.tolist()]

    def write(self, sample: Sample, images: ImageBatch) -> tuple[str, ReadFindings]:
        """Write the draft of one study, with what the site keeps to itself, and give the findings read for it."""
        with self._writing(), self._reading_once():
            text = self.generate([sample], images)[0]
            return text, self.read_findings(sample, images, text)

    @torch.no_grad()
    def read_findings(self, sample: Sample, images: ImageBatch, text: str) -> ReadFindings:
        """Read the findings of one visit, whose draft is ``text``; None without a branch that compares visits."""
        branch = self.generator.diagnosis
        if not isinstance(branch, ComparisonBranch):
            return None
        with self._writing(), self._autocasting(), self.context([sample], personal=True):
            return read_findings(branch, self.encoded([sample], images), text)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self.writes = True
        try:
            yield
        finally:
            self.writes = False

    def evaluate(
        self,
        min_cell: int,
        split: Split | None = "test",
        steps: int | Collection[int] | None = None,
        generic: bool = True,
    ) -> Evaluated:
        """Write drafts, each rank its share, and score them, with and, where ``generic``, without the personal part."""
        scored, generic = self.cohort.samples(split, steps), generic and self.has_personal_part
        twice = generic and self.personal_part_acts
        kinds = (True, False) if twice else (True,)
        loss_of, text_of = ({p: dict[Visit, Any]() for p in (True, False)} for _ in range(2))
        generated, last = self.cohort.timeline.prior_generated, max((s.time_step for s in scored), default=0)
        samples = self.cohort.samples(split, range(1, last + 1)) if generated else scored  # with those that come before
        progress = Progress("scoring report", len(samples), logger.info)

        def score(left: Sequence[int], size: int) -> Sequence[int]:
            self._evaluation_batch = size
            # few reports are written together with the part before: a step of the search takes little less for them
            chosen, rest = (left[:size], left[size:]) if len(left) >= 1.5 * size else (left, ())
            part = [samples[i] for i in chosen]
            visits = [sample.visit for sample in part]
            images = self.images(part, prior=not generated)
            for personal in kinds:
                self.checkpoint()
                if generated:
                    images.prior = self.prior(part, texts=text_of[personal])
                with self._reading_once():
                    loss_of[personal] |= zip(visits, self.report_losses(part, images, personal).tolist(), strict=True)
                    text_of[personal] |= zip(visits, self.generate(part, images, personal), strict=True)
            progress(len(text_of[True]))
            return rest

        # 1. Losses and drafts of this process's share, in parts that fit in memory; then all processes' together.
        for turn in writing_order(samples) if generated else [range(len(samples))]:
            # reports of a length end together
            left = mine = self.ranks.share(sorted(turn, key=lambda i: len(samples[i].visit.report)))
            with torch.no_grad(), self._writing():
                while left:
                    left = retry_smaller_batch(self._evaluation_batch, partial(score, left))
            written = [[(i, *(of[p][samples[i].visit] for of in (loss_of, text_of))) for i in mine] for p in kinds]
            for of_rank in self.ranks.gather(written):
                for p, done in zip(kinds, of_rank, strict=True):
                    loss_of[p] |= {samples[i].visit: loss for i, loss, _ in done}
                    text_of[p] |= {samples[i].visit: text for i, _, text in done}
        # 2. Scores; a personal part that does not act scores as none.
        passes = (True, False) if generic else (True,)
        if not twice:
            loss_of[False], text_of[False] = loss_of[True], text_of[True]
        losses, texts = ({p: [of[p][s.visit] for s in scored] for p in passes} for of in (loss_of, text_of))
        labelled, steps = None, self.cohort.time_steps
        if self.report_labeler is not None and not self.ranks.rank:
            references = [sample.visit.report for sample in scored]
            labelled = self.report_labeler.label(references, chain(*texts.values()), self.checkpoint)
        how = (steps, min_cell, labelled, self.scores)
        scores = {p: site_scores(scored, texts[p], losses[p], *how) for p in passes}
        rows = [row for p in passes for row in report_rows(scored, texts[p], losses[p], personal=p, labels=labelled)]
        return Evaluated(scores[True], scores.get(False), rows, scored, text_of[True])

    def _autocasting(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)
