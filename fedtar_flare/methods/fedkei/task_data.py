"""A task's images at one site: which samples are in it, whether they suffice, and what may be reported of them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtar_flare.data.cells import SPLITS, Split
from fedtar_flare.data.cohort import Cohort
from fedtar_flare.data.minimum_cell import enough, round_to_cell
from fedtar_flare.imaging.batch import ImageBatch, collate
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.methods.fedkei.task_stream import Labeled, TaskStream
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.models.volume_encoder import check_volumes


class Examples:
    """One split of a task at a site: labels (n,), int64, 1: the new disease; ids of patients (n,); prepared images."""

    def __init__(self, labeled: Labeled):
        self._samples = labeled.samples
        self.patients = [sample.visit.patient_id for sample in labeled.samples]
        self.labels: Tensor = torch.tensor(labeled.labels, dtype=torch.int64)

    def batch(self, indices: Sequence[int]) -> ImageBatch:
        """The images of these examples."""
        return collate(images_of([self._samples[i] for i in indices]))


@dataclass(frozen=True)
class TaskData:
    """A site's examples of one task. Only ``train`` must have both classes."""

    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True)
class SiteTask:
    """A task at a site: name and number in the job's list (from 1), images by split, and the smallest cell."""

    name: str
    number: int
    splits: Mapping[Split, Labeled]
    least: int

    @classmethod
    def of(cls, cohort: Cohort, stream: TaskStream, step: int, least: int) -> "SiteTask":
        """The task at a step of the site's stream."""
        splits = {split: stream.labeled(cohort.samples(split), step) for split in SPLITS}
        return cls(stream.task(step).name, stream.order[step - 1] + 1, splits, least)

    @property
    def shortage(self) -> str:
        """Why the task cannot be learnt, in words that may leave the site; empty where it can be."""
        if self.splits["train"].enough(self.least):
            return ""
        few = "no training image" if self.least == 1 else f"under {self.least} patients with a training image"
        return f"{few} with, or without, the task's disease"

    def examples(self) -> TaskData:
        """The learner's examples; without validation images where too few patients have any."""
        validation = self.splits["validation"]
        if not enough(validation.patients(), self.least):
            validation = Labeled((), ())
        return TaskData(*map(Examples, (self.splits["train"], validation, self.splits["test"])))

    @property
    def samples(self) -> int:
        """Training images, rounded as they may be reported."""
        return round_to_cell(len(self.splits["train"].labels), self.least)

    @property
    def scored(self) -> int:
        """Test images, rounded as they may be reported; 0 where a class has too few patients for an AUC."""
        test = self.splits["test"]
        return round_to_cell(len(test.labels), self.least) if test.enough(self.least) else 0

    def counts(self) -> dict[str, list[int]]:
        """Negatives and positives by split, rounded as they may be reported."""
        return {split: labeled.counts(self.least) for split, labeled in self.splits.items()}


def require_fitting(cohort: Cohort, classifier: ClassifierConfig) -> None:
    """Raise :class:`DataError` (``no-volume``) for images without depth where the encoder takes whole volumes."""
    if classifier.whole_volumes:
        check_volumes({visit.modality for visit in cohort.visits})


def keyed(*parts: object) -> torch.Generator:
    """A random generator seeded by these parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def shuffled(indices: Sequence[int], size: int, *key: object) -> list[list[int]]:
    """The batches of one epoch, in an order drawn by the key; the last may be smaller."""
    order = torch.randperm(len(indices), generator=keyed(*key)).tolist()
    return [[indices[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
