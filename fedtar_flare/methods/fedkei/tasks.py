"""Tasks of classification in sequence: the new disease of each step, images' labels, a site's examples and results.

At step t an image is positive where it has the new disease. It is negative where it has not, and either belongs to the
base (the images of the start) or has the disease of an earlier step: old images serve again. All others, and those that
may or may not have the new disease, are left out of the step. A patient's split is the same at all steps.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fedtar_flare.core.draws import derived_seed, orders
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import SPLITS, keyed_unit
from fedtar_flare.data.cohort import Cohort, Sample, Visit
from fedtar_flare.data.minimum_cell import enough, full_cells, round_to_cell, shown_count
from fedtar_flare.imaging.batch import ImageBatch, collate
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.methods.fedkei.mixing import Kind

Order = Literal["synchronous", "reversed", "shuffled"]
"""Order of the tasks at a site: as listed, the other way round, or by a permutation that differs between sites."""
NO_LABEL = "none"
"""Name, in a base, of images without any label."""
SITS_OUT = 0.2
"""Share of a hospital's training patients that no task uses."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


# ---------------------------------------------------------------------- the sequence
@dataclass(frozen=True)
class DiseaseTask:
    """One task: the name of the new disease, and the labels that count as it."""

    name: str
    labels: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> "DiseaseTask":
        """From ``name``, or ``name=label|label`` where the labels are others; raises :class:`ConfigError`.

        >>> DiseaseTask.parse("effusion").labels, sorted(DiseaseTask.parse("keratosis=AK|BKL").labels)
        (frozenset({'effusion'}), ['AK', 'BKL'])
        """
        name, separator, listed = text.partition("=")
        labels = [label.strip() for label in listed.split("|")] if separator else [name.strip()]
        if not _NAME.fullmatch(name.strip()) or not all(labels):
            allowed = "a name of letters, digits, '.', '_' and '-' (at most 64), or name=label|label"
            raise ConfigError(f"task '{text:.80}' must be {allowed}")
        return cls(name.strip(), frozenset(labels))


class TaskStream:
    """The tasks of one site, in the site's order; steps are counted from 1.

    Images with a label of ``base`` (:data:`NO_LABEL`: no label) are negatives from the first step on; ``from_report``
    labels a report where the source gives no labels.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        base: Sequence[str] = (NO_LABEL,),
        order: Order = "synchronous",
        site: str = "",
        seed: int = 0,
        from_report: Callable[[str], tuple[frozenset[str], frozenset[str]]] | None = None,
    ):
        self._from_report = from_report and lru_cache(maxsize=None)(from_report)  # asked for every step
        listed = [DiseaseTask.parse(text) for text in tasks]
        if not listed:
            raise ConfigError("tasks: at least one disease must be named")
        labels = [*base, *(label for task in listed for label in task.labels)]
        for kind, names in (("task", [task.name for task in listed]), ("label", labels)):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError(f"tasks: {kind} '{twice[0]:.80}' is there twice")
        self._healthy = NO_LABEL in base
        self._base = frozenset(base) - {NO_LABEL}
        self.order = order_of(len(listed), order, site, seed)
        self._tasks = [listed[i] for i in self.order]

    def __len__(self) -> int:
        """T."""
        return len(self._tasks)

    def task(self, step: int) -> DiseaseTask:
        """The task of a step."""
        return self._tasks[step - 1]

    def label_of(self, visit: Visit, step: int) -> int | None:
        """Label at a step: 1, 0, or None for an image that is left out (also one of unknown labels)."""
        labels, uncertain = visit.labels, visit.uncertain
        if labels is None and self._from_report is not None and visit.report:
            labels, uncertain = self._from_report(visit.report)
        if labels is None:
            return None
        new = self.task(step).labels
        if labels & new:
            return 1
        if uncertain & new:
            return None
        known = self._base.union(*(task.labels for task in self._tasks[: step - 1]))
        healthy = self._healthy and not labels and not uncertain
        return 0 if healthy or labels & known else None

    def examples(self, samples: Iterable[Sample], step: int, least: int = 1) -> "Examples":
        """The samples that take part in a step, in their order.

        Plain sums of gradients of two steps tell by subtraction those whose labels differ between them: so images whose
        labels at all steps are those of fewer than ``least`` patients take part in none.
        """
        rows = [(s, tuple(self.label_of(s.visit, n + 1) for n in range(len(self)))) for s in samples]
        full = full_cells(((labels, s.visit.patient_id) for s, labels in rows), least)
        taken = ((s, labels[step - 1]) for s, labels in rows if labels in full)
        return Examples([(s, label) for s, label in taken if label is not None])


def order_of(count: int, order: Order, site: str = "", seed: int = 0) -> tuple[int, ...]:
    """Indices 0..count-1 of the listed tasks, in the order in which a site meets them."""
    if order == "shuffled":
        return tuple(sorted(range(count), key=lambda i: hashlib.sha256(f"{seed}/{site}/{i}".encode()).digest()))
    return tuple(range(count))[:: -1 if order == "reversed" else 1]


# ---------------------------------------------------------------------- the examples of a step
class Examples:
    """One split of a task at a site: labels (n,), int64, 1: the new disease; ids of patients (n,); prepared images."""

    def __init__(self, labelled: Sequence[tuple[Sample, int]]):
        self._samples = [sample for sample, _ in labelled]
        self.patients = [sample.visit.patient_id for sample in self._samples]
        self.labels: Tensor = torch.tensor([label for _, label in labelled], dtype=torch.int64)

    def batch(self, indices: Sequence[int]) -> ImageBatch:
        """The images of these examples."""
        return collate(images_of([self._samples[i] for i in indices]))

    def patients_of(self, label: int) -> set[str]:
        """The patients who have an example of this label."""
        return {patient for patient, value in zip(self.patients, self.labels.tolist(), strict=True) if value == label}

    def enough(self, least: int) -> bool:
        """Whether both classes have enough patients."""
        return all(enough(self.patients_of(label), least) for label in (0, 1))

    def counts(self, least: int) -> list[int]:
        """Negatives and positives as they may leave the site."""
        return [shown_count(int((self.labels == c).sum()), self.patients_of(c), least) for c in (0, 1)]


@dataclass(frozen=True)
class TaskData:
    """A site's examples of one task. Only ``train`` must have both classes."""

    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True)
class LocalTask(TaskData):
    """A task at a site: its examples, its name and number in the job's list (from 1), and the smallest cell."""

    name: str
    number: int
    least: int

    @classmethod
    def of(cls, cohort: Cohort, stream: TaskStream, step: int, least: int) -> "LocalTask":
        """The task at a step of the site's stream; without validation images where too few patients have any."""
        splits = {str(split): stream.examples(cohort.samples(split), step, least) for split in SPLITS}
        if not enough(set(splits["validation"].patients), least):
            splits["validation"] = Examples(())
        return cls(**splits, name=stream.task(step).name, number=stream.order[step - 1] + 1, least=least)

    @property
    def shortage(self) -> str:
        """Why the task cannot be learnt, in words that may leave the site; empty where it can be."""
        if self.train.enough(self.least):
            return ""
        few = "no training image" if self.least == 1 else f"under {self.least} patients with a training image"
        return f"{few} with, or without, the task's disease"

    @property
    def samples(self) -> int:
        """Training images, rounded as they may be reported."""
        return round_to_cell(len(self.train.labels), self.least)

    @property
    def scored(self) -> int:
        """Test images, rounded as they may be reported; 0 where a class has too few patients for an AUC."""
        return round_to_cell(len(self.test.labels), self.least) if self.test.enough(self.least) else 0

    def counts(self) -> dict[str, list[int]]:
        """Negatives and positives by split, rounded as they may be reported."""
        splits: dict[str, Examples] = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: examples.counts(self.least) for split, examples in splits.items()}


@dataclass(frozen=True)
class Adapted:
    """Result of ADAPT; alpha and the scores stay at the site.

    At e = 0..E ``curve`` is the AUC of the test split, None where it has one class, ``scores`` (E + 1, n) those of its
    images, and ``at_epoch`` the seconds of start and tuning, without evaluation. Losses are means over validation
    examples of the mixture, of w0 and of theta.
    """

    difference: dict[str, Tensor]
    importance: dict[str, Tensor]
    curve: list[float | None]
    losses: list[float]
    skipped_updates: int
    mixture_loss: float | None
    start_loss: float | None
    final_loss: float | None
    alpha: dict[Kind, list[float]]
    scores: Tensor
    membership: float | None
    seconds: dict[str, float]
    at_epoch: list[float]


def without_some(cohort: Cohort) -> Cohort:
    """A cohort without a share of its training patients, drawn by the site's key anew once any visit is another.

    Otherwise sums before and after a patient's withdrawal would differ in that patient's gradient alone.
    """
    digest = cohort.digest()

    def stays(sample: Sample) -> bool:
        return sample.split != "train" or keyed_unit(f"{digest}/{sample.visit.patient_id}", cohort.key) >= SITS_OUT

    return cohort.with_samples(list(filter(stays, cohort.samples(None))))


def shuffled(indices: Sequence[int], size: int, seed: int, *key: object) -> list[list[int]]:
    """The batches of one epoch, in an order drawn by the seed and the key; the last may be smaller."""
    order = next(orders(len(indices), derived_seed(seed, *key)))
    return [[indices[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
