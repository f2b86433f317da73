"""Patients, visits and the cohort of one site, in the order of acquisition dates, never of an identifier.

A patient with fewer than T visits, a step without anybody at a site, and irregular gaps are normal, never an error.
"""

import copy
import hmac
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time
from functools import cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Literal, get_args

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cells import SPLITS, Split, Timeline, split_of
from fedtar_flare.data.minimum_cell import PLANTED, full_cells, round_to_cell, shown_count

__all__ = ["Cohort", "EXCLUDED", "Modality", "Patient", "Sample", "Sex", "Visit"]

Sex = Literal["F", "M"]
Modality = Literal["ct", "radiograph", "photograph"]
MAX_AGE = 130.0
EXCLUDED = "excluded"  # reason of studies whose patient is on the site's list of those who withdrew


@dataclass(frozen=True, slots=True)
class Visit:
    """One study of one patient; a report may be empty only where labels are known.

    Parameters
    ----------
    patient_id, visit_id : str
        The site's ids, which never leave it.
    """

    patient_id: str
    visit_id: str
    acquired: datetime
    """Moment of acquisition by the clocks of its place; a time zone is dropped, so that all compare."""
    image: Path
    """CT: a DICOM folder, file or zip, or NIfTI; else PNG, JPEG or a DICOM radiograph."""
    report: str
    """Text of the reference report."""
    modality: Modality
    """``ct``, ``radiograph`` or ``photograph``."""
    age: float | None = None
    """Years at this visit, 0 to 130; None: unknown."""
    findings: frozenset[str] | None = None
    """Ids of the findings that a synthetic image shows; None for real data."""
    changes: frozenset[tuple[str, str]] | None = None
    """Finding and direction of its change since the visit before, for synthetic data; None for real data."""
    labels: frozenset[str] | None = None
    """Labels of the image for classification; empty: it shows none, None: not known."""
    uncertain: frozenset[str] = frozenset()
    """Labels that may or may not apply; disjoint from ``labels``."""
    lateral: Path | None = None
    """The study's lateral radiograph."""

    def __post_init__(self) -> None:
        if self.acquired.tzinfo is not None:
            object.__setattr__(self, "acquired", self.acquired.replace(tzinfo=None))
        if not self.report.strip() and self.labels is None:
            text, reason = "the report is empty", "empty-report"
        elif self.labels is not None and self.labels & self.uncertain:
            text, reason = "a label is given as sure and as unsure", "contradicting-labels"
        elif self.modality not in get_args(Modality):
            text = f"modality '{self.modality}' is not one of {', '.join(get_args(Modality))}"
            reason = "unknown-modality"
        elif self.age is not None and not (math.isfinite(self.age) and 0 <= self.age <= MAX_AGE):
            text, reason = f"age {self.age:g} is not within 0 to {MAX_AGE:g} years", "age-out-of-range"
        else:
            return
        raise DataError(f"patient {self.patient_id}, visit {self.visit_id}: {text}", reason=reason)


def order_in_time(visit: Visit) -> tuple[datetime, str, str]:
    """The sort key of a patient's visits: by moment, then by the report's text, then by the image's path."""
    return visit.acquired, visit.report, str(visit.image)


@dataclass(frozen=True, slots=True)
class Patient:
    """A patient and all visits at one site, of which no two have the same moment and image."""

    patient_id: str
    """The site's."""
    sex: Sex | None
    """None: unknown or other."""
    visits: tuple[Visit, ...]
    """At least one; sorted here by moment (ties: by the report's text, then the image's path)."""
    unreadable: tuple[Visit, ...] = ()
    """Visits without a readable image: nothing is learned from them, but they keep their place in time."""

    def __post_init__(self) -> None:
        if not self.visits:
            raise DataError(f"patient {self.patient_id} has no visit", reason="no-visit")
        if {self.patient_id} != set(map(attrgetter("patient_id"), (*self.visits, *self.unreadable))):
            raise DataError(f"patient {self.patient_id} holds a visit of another patient", reason="mixed-patients")
        if len(set(map(attrgetter("acquired", "image"), self.visits))) < len(self.visits):
            raise DataError(f"patient {self.patient_id}: two visits of one moment and image", reason="duplicate-visit")
        object.__setattr__(self, "visits", tuple(sorted(self.visits, key=order_in_time)))


@dataclass(frozen=True, slots=True)
class Sample:
    """One example to learn from: a visit, its time step and, where the timeline includes it, the visit before."""

    visit: Visit
    """The visit whose report is learned."""
    prior: Visit | None
    """The last visit that came before, with a readable image; None without one, or where it is not included."""
    sex: Sex | None
    """The patient's."""
    time_step: int
    """1 to T."""
    split: Split
    """The patient's."""
    prepared: Path | None = None
    """File of the model input, once the visit is prepared."""
    prior_prepared: Path | None = None
    """That of the prior visit."""
    before: "Sample | None" = None
    """The prior visit as a sample, where the timeline includes more than one earlier visit."""

    @property
    def planted(self) -> bool:
        """Whether the patient is a canary that the site has made up."""
        return self.visit.patient_id.startswith(PLANTED)

    @property
    def days_since_prior(self) -> float | None:
        """Days from the prior visit to this one, above 0; None without a prior visit."""
        return None if self.prior is None else (self.visit.acquired - self.prior.acquired).total_seconds() / 86_400


class Cohort:
    """All patients of one site, split by patient and aligned to time steps; at least one patient, of one modality.

    Parameters
    ----------
    site, key : str, bytes
        The site's name, and its secret for keyed hashes, at least 16 bytes.
    patients : sequence of Patient
        Each id once.
    timeline : Timeline
        How visits become time steps.
    rejected, prepared : mapping, optional
        Number of studies left out when the data was read, by reason; file of the model input by visit.
    linked : sequence of collections of str, default ()
        Groups of patient ids that share a picture. Each group is in one split: the first of training, validation and
        test that one of its patients is in, so that nobody moves from training into a test.
    splits : mapping of str to Split, optional
        Split by patient id, as the source states it; the others' follows from the keyed hash of the id.

    Attributes
    ----------
    patients, visits : tuple of Patient, list of Visit
        In the order of a keyed hash: independent of the source's order, and blind to the identifier.
    modality, time_steps : Modality, int
        Of all visits; number T.
    """

    def __init__(
        self,
        site: str,
        patients: Sequence[Patient],
        *,
        key: bytes,
        timeline: Timeline,
        rejected: Mapping[str, int] | None = None,
        prepared: Mapping[Visit, Path] | None = None,
        linked: Sequence[Collection[str]] = (),
        splits: Mapping[str, Split] | None = None,
    ):
        if not patients:
            raise DataError(f"site {site} has no patient that can be used", reason="no-patient")
        by_hash = {}
        for patient in patients:
            by_hash[hmac.digest(key, b"order:" + patient.patient_id.encode(), "sha256")] = patient
        if len(by_hash) < len(patients):
            raise DataError(f"site {site} has two patients of one id", reason="duplicate-patient")
        self.site, self.key, self.timeline = site, key, timeline
        self.time_steps = timeline.time_steps
        self.rejected = dict(rejected or {})
        self.patients = tuple(map(by_hash.__getitem__, sorted(by_hash)))
        self.visits = list(chain.from_iterable(map(attrgetter("visits"), self.patients)))
        self.modality: Modality = self.visits[0].modality
        if len(set(map(attrgetter("modality"), self.visits))) > 1:
            raise DataError(f"site {site} mixes CT and radiographs; make one cohort of each", reason="mixed-modality")
        self.linked = tuple(linked)
        self.splits = dict(splits or {})
        for group in self.linked:
            self.splits |= dict.fromkeys(group, min(map(self._split_of, group), key=SPLITS.index))
        self._left_out: dict[str, set[str]] = {}  # reason to the patients whose visits were left out after reading
        self._prepared = prepared or {}

    def _split_of(self, patient_id: str) -> Split:
        return self.splits.get(patient_id) or split_of(patient_id, self.key)

    @cached_property
    def _samples(self) -> list[Sample]:
        """Every visit as a sample; made when they are first needed, which a cohort to be prepared never does."""
        samples: list[Sample] = []
        with_prior, several = bool(self.timeline.prior_kinds), self.timeline.priors > 1
        for patient in self.patients:
            split = self._split_of(patient.patient_id)
            unreadable = sorted(map(order_in_time, patient.unreadable))
            earlier: list[Sample] = []
            for i, visit in enumerate(patient.visits):
                # a visit that became unreadable keeps its place, so that it moves no later visit to another step
                step = self.timeline.step_of(i + bisect_left(unreadable, order_in_time(visit)), visit.acquired)
                before, today = None, datetime.combine(visit.acquired, time.min)
                if with_prior:  # of two visits at one moment neither came before; midnight is a time that is not known
                    before = next((s for s in reversed(earlier) if today != s.visit.acquired < visit.acquired), None)
                prior, image = (before.visit, before.prepared) if before else (None, None)
                prepared, chain = self._prepared.get(visit), before if several else None
                earlier.append(Sample(visit, prior, patient.sex, step, split, prepared, image, chain))
            samples += earlier
        return samples

    def samples(self, split: Split | None, steps: int | Collection[int] | None = None, least: int = 1) -> list[Sample]:
        """Samples by patient in hash order, then by date.

        Parameters
        ----------
        split : Split or None
            None: any.
        steps : int or collection of int, optional
            Time step or steps; None: any.
        least : int, default 1
            Fewest distinct patients of a cell (a split at a time step); smaller cells are left out.

        Returns
        -------
        list of Sample
        """
        cells = map(attrgetter("split", "time_step"), self._samples)
        full = full_cells(zip(cells, map(attrgetter("visit.patient_id"), self._samples), strict=True), least)
        wanted = (steps,) if isinstance(steps, int) else steps
        return [
            s
            for s in self._samples
            if split in (None, s.split) and (wanted is None or s.time_step in wanted) and (s.split, s.time_step) in full
        ]

    def leaving_out(
        self,
        reason_of: Callable[[Visit], str | None],
        prepared: Mapping[Visit, Path] | None = None,
        linked: Sequence[Collection[str]] | None = None,
    ) -> "Cohort":
        """The cohort without some visits, which ``rejected`` then counts.

        Later visits stay at their step; the next visit's prior is the last one remaining.

        Parameters
        ----------
        reason_of : callable
            Gives the reason why a visit is left out; None for a visit that stays.
        prepared, linked : optional
            As for :class:`Cohort`; without ``linked``, the groups stay.

        Returns
        -------
        Cohort
            Without the patients of whom no visit is left.
        """
        rejected, left_out = Counter(self.rejected), defaultdict(set, copy.deepcopy(self._left_out))
        patients = []
        for patient in self.patients:
            usable, unusable = [], []
            for visit in patient.visits:
                if reason := reason_of(visit):
                    unusable.append(visit)
                    rejected[reason] += 1
                    left_out[reason].add(patient.patient_id)
                else:
                    usable.append(visit)
            if usable:
                unreadable = (*patient.unreadable, *unusable)
                patients.append(replace(patient, visits=tuple(usable), unreadable=unreadable) if unusable else patient)
        smaller = Cohort(
            self.site,
            patients,
            key=self.key,
            timeline=self.timeline,
            rejected=rejected,
            prepared=prepared,
            linked=self.linked if linked is None else linked,
            splits=self.splits,
        )
        smaller._left_out = left_out
        return smaller

    def until(self, step: int, replay_share: float = 1.0) -> "Cohort":
        """A copy with what a site has at the time when a step is the newest.

        Parameters
        ----------
        step : int
            The newest time step. Validation uses its visits alone; later ones are gone.
        replay_share : float, default 1
            Share in [0, 1] of the earlier training visits that remain, drawn by keyed hash.

        Returns
        -------
        Cohort
        """
        arrived = []
        for sample in self._samples:
            earlier = sample.time_step < step
            stays = sample.time_step == step or (earlier and sample.split != "validation")
            if earlier and sample.split == "train":
                visit = f"replay:{sample.visit.patient_id}/{sample.visit.visit_id}"
                drawn = hmac.digest(self.key, visit.encode(), "sha256")
                stays = int.from_bytes(drawn[:6], "big") / 2**48 < replay_share
            if stays:
                arrived.append(sample)
        return self.with_samples(arrived)

    def with_samples(self, samples: Sequence[Sample]) -> "Cohort":
        """A copy that has these samples.

        Parameters
        ----------
        samples : sequence of Sample
            With canaries, or other sites' samples, as these sites split and aligned them.

        Returns
        -------
        Cohort
        """
        other = copy.copy(self)
        other._samples = list(samples)
        return other

    def counts(self, least: int = 1) -> dict[Split, list[int]]:
        """Numbers of visits as they may leave the site.

        Parameters
        ----------
        least : int, default 1
            The site's minimum cell; a cell of fewer distinct patients counts 0.

        Returns
        -------
        dict of Split to list of int
            By time step, rounded down to multiples of ``least``; length T.
        """
        visits = Counter(map(attrgetter("split", "time_step"), self.samples(None, least=least)))
        counts: dict[Split, list[int]] = {}
        for split in SPLITS:
            counts[split] = [round_to_cell(visits[split, step], least) for step in range(1, self.time_steps + 1)]
        return counts

    def digest(self) -> str:
        """A keyed hash of the content.

        Returns
        -------
        str
            Another one once a visit comes or goes, moves to another cell, or changes report or labels.
        """
        rows = []
        for sample in self._samples:
            visit, cell = sample.visit, (sample.split, sample.time_step)
            rows.append(repr((visit.patient_id, visit.visit_id, *cell, visit.report, sorted(visit.labels or ()))))
        return hmac.digest(self.key, "\n".join(sorted(rows)).encode(), "sha256").hex()

    def left_out(self, least: int) -> dict[str, int]:
        """Numbers of studies left out as they may leave the site, without withdrawn patients (:data:`EXCLUDED`).

        Parameters
        ----------
        least : int
            The site's minimum cell. Above 1, only reasons with at least that many known patients are reported.

        Returns
        -------
        dict of str to int
            By reason.
        """
        counts = {reason: n for reason, n in self.rejected.items() if reason != EXCLUDED}
        if least == 1:
            return counts
        shown = {reason: shown_count(n, self._left_out.get(reason, ()), least) for reason, n in counts.items()}
        return {reason: n for reason, n in shown.items() if n}


def shown_visits(cohort: Cohort, steps: int | Collection[int] | None, least: int) -> int:
    """Number of training visits of some time steps (None: all) as it may leave the site, at this minimum cell."""
    wanted = (steps,) if isinstance(steps, int) else steps
    counts = enumerate(cohort.counts(least)["train"], start=1)
    return sum(count for step, count in counts if wanted is None or step in wanted)
