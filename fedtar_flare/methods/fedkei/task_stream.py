"""Tasks of classification in sequence: which disease is new at which step, and each image's label there.

At step t an image is positive where it has the new disease. It is negative where it has not, and either belongs to the
base (the images of the start) or has the disease of an earlier step: old images serve again. All others, and those that
may or may not have the new disease, are left out of the step. A patient's split is the same at all steps.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.data.minimum_cell import enough, shown_count

Order = Literal["synchronous", "reversed", "shuffled"]
"""Order of the tasks at a site: as listed, the other way round, or by a permutation that differs between sites."""

NOTHING = "none"
"""Name, in a base, of images without any label."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


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
            raise ConfigError(
                f"task '{text:.80}' must be a name of letters, digits, '.', '_' and '-' (at most 64), or "
                "name=label|label"
            )
        return cls(name.strip(), frozenset(labels))


@dataclass(frozen=True)
class Labeled:
    """Samples of one split at one step, and whether each has the new disease (1) or not (0)."""

    samples: tuple[Sample, ...]
    labels: tuple[int, ...]

    def patients(self, label: int | None = None) -> set[str]:
        """The patients who have a sample of this label; None: of any."""
        pairs = zip(self.samples, self.labels, strict=True)
        return {sample.visit.patient_id for sample, value in pairs if label in (None, value)}

    def enough(self, least: int) -> bool:
        """Whether both classes have enough patients."""
        return all(enough(self.patients(c), least) for c in (0, 1))

    def counts(self, least: int) -> list[int]:
        """Negatives and positives as they may leave the site."""
        return [shown_count(self.labels.count(c), self.patients(c), least) for c in (0, 1)]


class TaskStream:
    """The tasks of one site, in the site's order; steps are counted from 1.

    ``tasks`` are as :meth:`DiseaseTask.parse` reads them, ``order``, ``site`` and ``seed`` as in :func:`order_of`.
    Images with a label of ``base`` (:data:`NOTHING`: no label) are negatives from the first step on. ``from_report``
    gives the certain and the uncertain labels of a report where the source gives none; without it, such images are left
    out. Raises ConfigError for no task, a name given twice, or a label of two tasks, or of a task and the base.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        base: Sequence[str] = (NOTHING,),
        order: Order = "synchronous",
        site: str = "",
        seed: int = 0,
        from_report: Callable[[str], tuple[frozenset[str], frozenset[str]]] | None = None,
    ):
        self._from_report = from_report
        listed = [DiseaseTask.parse(text) for text in tasks]
        if not listed:
            raise ConfigError("tasks: at least one disease must be named")
        for what, names in (
            ("task", [task.name for task in listed]),
            ("label", [*base, *(label for task in listed for label in task.labels)]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError(f"tasks: {what} '{twice[0]:.80}' is there twice")
        self._healthy = NOTHING in base
        self._base = frozenset(base) - {NOTHING}
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

    def labeled(self, samples: Iterable[Sample], step: int) -> Labeled:
        """The samples that take part in a step, in their order."""
        taken, labels = [], []
        for sample in samples:
            if (label := self.label_of(sample.visit, step)) is not None:
                taken.append(sample)
                labels.append(label)
        return Labeled(tuple(taken), tuple(labels))


def order_of(count: int, order: Order, site: str = "", seed: int = 0) -> tuple[int, ...]:
    """Indices 0..count-1 of the listed tasks, in the order in which a site meets them.

    ``shuffled`` depends on site and seed alone, the same in every process.
    """
    if order == "shuffled":
        return tuple(sorted(range(count), key=lambda i: hashlib.sha256(f"{seed}/{site}/{i}".encode()).digest()))
    return tuple(range(count))[:: -1 if order == "reversed" else 1]
