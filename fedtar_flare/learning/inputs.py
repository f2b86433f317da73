"""What the model reads of a batch: changed images, the visits before, and what the encoder's frozen stages give."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.imaging.batch import ImageBatch, PriorBatch, augment, collate, sample_seed
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.transform_list import Spec
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.models.tokenizer import IGNORED, ReportTokenizer

REPORT, IMAGE = "report", "image"
PRIOR_DROPOUT = 0.25
"""Chance that a training sample is shown nothing of its previous visit, and the same for report and image each."""
STORED_BYTES = 256 << 20
"""Most memory for outputs of frozen stages."""


def augmented(
    prepared: Sequence[Prepared], samples: Sequence[Sample], seed: str, transforms: Sequence[Spec]
) -> list[Prepared]:
    """Change the samples' images at random, as ``data.transforms`` says, by the visit and the seed alone."""
    visits = [(sample.visit.patient_id, sample.visit.visit_id) for sample in samples]
    images = zip(prepared, visits, strict=True)
    return [replace(p, image=augment(p.image, sample_seed(0, seed, *visit), transforms)) for p, visit in images]


# ---------------------------------------------------------------------- the visit before
def shown_kinds(
    samples: Sequence[Sample], kinds: Collection[str], chance: float = 0.0, seed: str = ""
) -> list[frozenset[str]]:
    """What each sample shows of the visit before: each of ``kinds``, and all together, is dropped with this chance."""
    rows = []
    for sample in samples:
        shown = frozenset(kinds if sample.prior is not None else ())
        if shown and chance:
            number = sample_seed(0, "prior", seed, sample.visit.patient_id, sample.visit.visit_id)
            everything, *each = np.random.default_rng(number).random(1 + len(shown))
            if len(shown) > 1:  # a kind without others is dropped with everything alone
                shown = frozenset([kind for kind, draw in zip(sorted(shown), each, strict=True) if draw >= chance])
            shown = shown if everything >= chance else frozenset()
        rows.append(shown)
    return rows


def prior_batch(
    samples: Sequence[Sample],
    kinds: Sequence[frozenset[str]],
    tokenizer: ReportTokenizer,
    read: Callable[[Sequence[Sample]], Sequence[Prepared]],
    texts: Mapping[Visit, str] | None = None,
) -> PriorBatch | None:
    """What each sample shows of the visit before, by its ``kinds``; ``texts`` replace reports, ``read`` images."""
    if not any(kinds):
        return None
    rows = list(zip(samples, kinds, strict=True))
    images = [earlier(sample) if IMAGE in shown else None for sample, shown in rows]
    read_before = [sample.prior if REPORT in shown else None for sample, shown in rows]
    reports = [None if visit is None else visit.report if texts is None else texts.get(visit) for visit in read_before]
    batch = PriorBatch(torch.tensor([sample.days_since_prior or 0.0 for sample in samples]))
    if with_image := [image for image in images if image is not None]:
        prepared = read(with_image)
        # a row without an image is empty and masked
        left, first = iter(prepared), prepared[0]
        empty = Prepared(np.zeros_like(first.image[:1]), np.zeros_like(first.position_mm[:1]))
        batch.images = collate([empty if image is None else next(left) for image in images])
        batch.images.slice_mask &= torch.tensor([image is not None for image in images])[:, None]
    if any(report is not None for report in reports):
        show_reports(batch, reports, tokenizer)
    return batch


def earlier(sample: Sample) -> Sample:
    """The visit before as a sample of its own; the sample itself where there is none."""
    if sample.prior is None:
        return sample
    return replace(sample, visit=sample.prior, prepared=sample.prior_prepared, prior=None, prior_prepared=None)


def show_reports(batch: PriorBatch, texts: Sequence[str | None], tokenizer: ReportTokenizer) -> None:
    """Put the reports before into the batch, as texts and as tokens; a row without a report is masked."""
    ids, labels = tokenizer.batch([text or "" for text in texts])
    shown = torch.tensor([text is not None for text in texts])
    batch.reports = tuple(texts)
    batch.input_ids, batch.text_mask = ids, (labels != IGNORED) & shown[:, None]


def writing_order(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples in groups to be written one after the other: a visit comes after the visit before it."""
    index = {sample.visit: i for i, sample in enumerate(samples)}
    turn: dict[int, int] = {}
    for i in sorted(index.values(), key=lambda i: samples[i].visit.acquired):
        before = samples[i].prior
        turn[i] = 0 if before is None or before not in index else turn[index[before]] + 1
    return [[i for i in range(len(samples)) if turn[i] == n] for n in range(max(turn.values(), default=-1) + 1)]


# ---------------------------------------------------------------------- frozen stages
class FrozenStages:
    """The encoder's first stages without any parameter that learns (``requires_grad``); each image passes through once.

    Their outputs are held in memory, at most ``limit`` bytes. Each study passes alone: its batch changes no bit of it.
    """

    def __init__(self, generator: ReportGenerator, limit: int = STORED_BYTES):
        stages = generator.stage_modules()
        frozen = takewhile(lambda stage: not any(p.requires_grad for p in stage.parameters()), stages)
        self.depth = len(list(frozen))
        """How many stages are frozen; the last ones learn."""
        self._generator, self._limit = generator, limit
        self._stored: dict[tuple[Visit, Path | None], Tensor] = {}  # a changed image has another prepared file
        self._bytes = 0

    def tokens(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        """Tokens (B, S, N, C) of the samples' prepared images; padded slices are zero after the frozen stages."""
        shown = images.slice_mask.any(1).tolist()
        if not self.depth or not any(shown):
            return self._generator.tokens(images)
        encoder = self._generator.encoder
        below = [self._below(sample, images, i) if shown[i] else None for i, sample in enumerate(samples)]
        nothing = next(rows for rows in below if rows is not None)[:0]
        rows = torch.nn.utils.rnn.pad_sequence([nothing if b is None else b for b in below], batch_first=True)
        tokens: Tensor = encoder.run(rows.flatten(0, 1), first=self.depth)
        return tokens.unflatten(0, rows.shape[:2])

    @torch.no_grad()
    def _below(self, sample: Sample, images: ImageBatch, row: int) -> Tensor:
        """Output of the frozen stages for one study, (S, ...), without padding."""
        key = sample.visit, sample.prepared
        if (stored := self._stored.get(key)) is not None:
            return stored
        encoder, slices = self._generator.encoder, images.images[row][images.slice_mask[row]]
        output: Tensor = encoder.run(encoder.normalised(slices), last=self.depth)
        if self._bytes + output.nbytes <= self._limit:
            self._stored[key] = output
            self._bytes += output.nbytes
        return output
