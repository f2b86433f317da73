"""The visit before, for a batch of samples: what is shown of it, what training drops, and the order of writing."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.imaging.augment import sample_seed
from fedtar_flare.imaging.batch import ImageBatch, PriorBatch, collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.imaging.transform_list import Spec
from fedtar_flare.learning.training import augmented
from fedtar_flare.models.tokenizer import IGNORED, ReportTokenizer

REPORT, IMAGE = "report", "image"
PRIOR_DROPOUT = 0.25
"""Chance that a training sample is shown nothing of its previous visit, and the same for report and image each."""


def shown_kinds(
    samples: Sequence[Sample], kinds: Collection[str], chance: float = 0.0, seed: str = ""
) -> list[frozenset[str]]:
    """What each sample shows of the visit before: ``kinds``, none where there was no such visit.

    Each kind is dropped with this chance, and all together with the same, by the visit and ``seed`` alone.
    """
    rows = []
    for sample in samples:
        shown = frozenset(kinds if sample.prior is not None else ())
        if shown and chance:
            own = sample_seed(0, "prior", seed, sample.visit.patient_id, sample.visit.visit_id)
            everything, *each = np.random.default_rng(own).random(1 + len(shown))
            if len(shown) > 1:  # a kind without others is dropped with everything alone
                shown = frozenset([kind for kind, draw in zip(sorted(shown), each, strict=True) if draw >= chance])
            shown = shown if everything >= chance else frozenset()
        rows.append(shown)
    return rows


def prior_batch(
    samples: Sequence[Sample],
    kinds: Sequence[frozenset[str]],
    tokenizer: ReportTokenizer,
    *,
    texts: Mapping[Visit, str] | None = None,
    training_seed: str | None = None,
    transforms: Sequence[Spec] = (),
) -> PriorBatch | None:
    """What each sample shows of the visit before, by its ``kinds``; None where no sample shows anything.

    ``texts`` replace the references of the visits before. Random ``transforms`` change the images by ``training_seed``.
    """
    if not any(kinds):
        return None
    batch = PriorBatch(torch.tensor([sample.days_since_prior or 0.0 for sample in samples]))
    if any(IMAGE in own for own in kinds):
        before = [_visit_before(s) if IMAGE in own else None for s, own in zip(samples, kinds, strict=True)]
        batch.images = _images(before, training_seed, transforms)
    if any(REPORT in own for own in kinds):
        written = [_text(s, texts) if REPORT in own else None for s, own in zip(samples, kinds, strict=True)]
        show_reports(batch, written, tokenizer)
    return batch


def show_reports(batch: PriorBatch, texts: Sequence[str | None], tokenizer: ReportTokenizer) -> None:
    """Put the reports before into the batch, as texts and as tokens; a row without a report is masked."""
    ids, labels = tokenizer.batch([text or "" for text in texts])
    there = torch.tensor([text is not None for text in texts])
    batch.reports = tuple(texts)
    batch.input_ids, batch.text_mask = ids, (labels != IGNORED) & there[:, None]


def writing_order(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples in groups to be written one after the other: a visit comes after the visit before it."""
    at = {sample.visit: i for i, sample in enumerate(samples)}
    place: dict[int, int] = {}
    for i in sorted(at.values(), key=lambda i: samples[i].visit.acquired):
        before = samples[i].prior
        place[i] = 0 if before is None or before not in at else place[at[before]] + 1
    return [[i for i in range(len(samples)) if place[i] == turn] for turn in range(max(place.values(), default=-1) + 1)]


def _text(sample: Sample, texts: Mapping[Visit, str] | None) -> str:
    assert sample.prior is not None
    return sample.prior.report if texts is None else texts[sample.prior]


def _visit_before(sample: Sample) -> Sample:
    assert sample.prior is not None
    return replace(sample, visit=sample.prior, prepared=sample.prior_prepared, prior=None, prior_prepared=None)


def _images(before: Sequence[Sample | None], training_seed: str | None, transforms: Sequence[Spec]) -> ImageBatch:
    """Images of the visits before; a row without one is empty and masked."""
    there = [sample for sample in before if sample is not None]
    prepared = images_of(there)
    if training_seed is not None and transforms:
        prepared = augmented(prepared, there, training_seed, transforms)
    found = iter(prepared)
    empty = Prepared(np.zeros_like(prepared[0].image[:1]), np.zeros_like(prepared[0].position_mm[:1]))
    batch = collate([empty if sample is None else next(found) for sample in before])
    batch.slice_mask &= torch.tensor([sample is not None for sample in before])[:, None]
    return batch
