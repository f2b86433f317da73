"""Patients, visits and the cohort of one site, in the order of acquisition dates, never of an identifier.

A patient with fewer than T visits, a step without anybody at a site, and irregular gaps are normal, never an error.
"""

import copy
import hmac
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.minimum_cell import PLANTED, full_cells, round_to_cell, shown_count
from fedtar_flare.data.splits import SPLITS, Split, split_of
from fedtar_flare.data.timeline import Timeline

Sex = Literal["F", "M"]
Modality = Literal["ct", "radiograph", "photograph"]
MAX_AGE = 130.0
EXCLUDED = "excluded"
"""Reason of studies whose patient is on the site's list of those who withdrew."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One study of one patient; patient and visit ids are the site's own and never leave it.

    The report may be empty where the labels are known. Raises :class:`DataError` ``empty-report``,
    ``contradicting-labels``, ``unknown-modality`` or ``age-out-of-range``.
    """

    patient_id: str
    visit_id: str
    acquired: datetime  # a time with a zone is converted to UTC without one, so that all compare
    image: Path  # DICOM folder, file or zip, NIfTI, PNG or JPEG, DICOM radiograph
    report: str
    modality: Modality
    age: float | None = None  # years at this visit
    findings: frozenset[str] | None = None  # the known truth of a synthetic cohort
    changes: frozenset[tuple[str, str]] | None = None  # the same: finding and direction since the visit before
    labels: frozenset[str] | None = None  # what the image shows, for classification; empty: nothing, None: not known
    uncertain: frozenset[str] = frozenset()  # of which nobody is sure
    lateral: Path | None = None  # another radiograph of the study, the lateral view

    def __post_init__(self) -> None:
        where = f"patient {self.patient_id}, visit {self.visit_id}"
        if self.acquired.tzinfo is not None:
            object.__setattr__(self, "acquired", self.acquired.astimezone(UTC).replace(tzinfo=None))
        if not self.report.strip() and self.labels is None:
            raise DataError(f"{where}: the report is empty", reason="empty-report")
        if self.labels is not None and self.labels & self.uncertain:
            raise DataError(f"{where}: a label is given as sure and as unsure", reason="contradicting-labels")
        if self.modality not in get_args(Modality):
            known = ", ".join(get_args(Modality))
            raise DataError(f"{where}: modality '{self.modality}' is not one of {known}", reason="unknown-modality")
        if self.age is not None and not (math.isfinite(self.age) and 0 <= self.age <= MAX_AGE):
            text = f"{where}: age {self.age:g} is not within 0 to {MAX_AGE:g} years"
            raise DataError(text, reason="age-out-of-range")


@dataclass(frozen=True, slots=True)
class Patient:
    """A patient with visits in order of acquisition; ties are broken by the report's text, then the image's path.

    Raises :class:`DataError` ``no-visit``, ``mixed-patients`` or ``duplicate-visit`` (same moment and image).
    """

    patient_id: str
    sex: Sex | None  # None: unknown or other
    visits: tuple[Visit, ...]  # sorted here
    unreadable: tuple[Visit, ...] = ()  # no readable image: not learned from, but they keep their place in time

    def __post_init__(self) -> None:
        if not self.visits:
            raise DataError(f"patient {self.patient_id} has no visit", reason="no-visit")
        if any(visit.patient_id != self.patient_id for visit in (*self.visits, *self.unreadable)):
            raise DataError(f"patient {self.patient_id} holds a visit of another patient", reason="mixed-patients")
        twice = [key for key, n in Counter((v.acquired, v.image) for v in self.visits).items() if n > 1]
        if twice:
            text = f"patient {self.patient_id}: two visits on {twice[0][0]} with the same image {twice[0][1]}"
            raise DataError(text, reason="duplicate-visit")
        object.__setattr__(self, "visits", tuple(sorted(self.visits, key=order_in_time)))

    def places(self) -> list[int]:
        """For each visit, how many visits came before it, unreadable ones included."""
        before = [order_in_time(visit) for visit in self.unreadable]
        return [i + sum(other < order_in_time(visit) for other in before) for i, visit in enumerate(self.visits)]


def order_in_time(visit: Visit) -> tuple[datetime, str, str]:
    """The sort key of a patient's visits."""
    return visit.acquired, visit.report, str(visit.image)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model learns from: a visit, the one before it where asked for, and its place in time."""

    visit: Visit
    prior: Visit | None  # the last visit at an earlier moment with a readable image; None without, or if not asked for
    sex: Sex | None
    time_step: int  # 1..T
    split: Split
    prepared: Path | None = None  # its model input, once :func:`.imaging.pipeline.prepare_cohort` has run
    prior_prepared: Path | None = None  # that of the visit before
    before: "Sample | None" = None  # the visit before as a sample, where the timeline asks for more than one

    @property
    def planted(self) -> bool:
        """Whether the patient is made up."""
        return self.visit.patient_id.startswith(PLANTED)

    @property
    def days_since_prior(self) -> float | None:
        """Days from the visit before to this one, above 0; None where there is none."""
        return None if self.prior is None else (self.visit.acquired - self.prior.acquired).total_seconds() / 86_400


class Cohort:
    """All patients of one site, split by patient and aligned to time steps.

    ``key`` is the site's secret for the keyed hashes, ``rejected`` counts by reason the studies left out when the data
    was read, and ``prepared`` names the files with model input (:func:`.imaging.pipeline.prepare_cohort`). ``linked``
    are groups of patients who share a picture, each group in one split: the first of training, validation and test that
    one of them is in; ``splits`` those that the source states by patient. Raises :class:`DataError`
    ``duplicate-patient``, ``mixed-modality`` or ``no-patient``.
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
        twice = [pid for pid, n in Counter(p.patient_id for p in patients).items() if n > 1]
        if twice:
            raise DataError(f"patient {twice[0]} is there twice", reason="duplicate-patient")
        modalities = {visit.modality for patient in patients for visit in patient.visits}
        if len(modalities) > 1:
            raise DataError(f"site {site} mixes CT and radiographs; make one cohort of each", reason="mixed-modality")
        self.site = site
        self.key = key
        self.timeline = timeline
        self.rejected = dict(rejected or {})
        self._left_out: dict[str, set[str]] = {}  # by reason: patients with visits left out since they were read
        self.modality: Modality = modalities.pop()
        # ordered by keyed hash: independent of the source's order and blind to the identifier
        order = {p.patient_id: hmac.digest(key, b"order:" + p.patient_id.encode(), "sha256") for p in patients}
        self.patients: tuple[Patient, ...] = tuple(sorted(patients, key=lambda p: order[p.patient_id]))
        self.linked = tuple(linked)
        self.splits = dict(splits or {})
        for group in self.linked:  # nobody moves from training into a test
            first = min(map(self._split, group), key=SPLITS.index)
            self.splits |= dict.fromkeys(group, first)
        self._samples = [sample for patient in self.patients for sample in self._samples_of(patient, prepared or {})]

    def _split(self, patient_id: str) -> Split:
        return self.splits.get(patient_id) or split_of(patient_id, self.key)

    def _samples_of(self, patient: Patient, prepared: Mapping[Visit, Path]) -> Iterator[Sample]:
        split = self._split(patient.patient_id)
        earlier: list[Sample] = []
        for visit, place in zip(patient.visits, patient.places(), strict=True):
            step = self.timeline.step_of(place, visit.acquired)
            prior = None
            if self.timeline.prior_kinds:  # of two visits at one moment, neither came before the other
                prior = next((one for one in reversed(earlier) if one.visit.acquired < visit.acquired), None)
            last = (None, None) if prior is None else (prior.visit, prior.prepared)
            more = prior if self.timeline.priors > 1 else None
            earlier.append(Sample(visit, last[0], patient.sex, step, split, prepared.get(visit), last[1], more))
            yield earlier[-1]

    @property
    def time_steps(self) -> int:
        """T."""
        return self.timeline.time_steps

    @property
    def visits(self) -> list[Visit]:
        """All usable visits, patient by patient."""
        return [visit for patient in self.patients for visit in patient.visits]

    def samples(self, split: Split | None, steps: int | Collection[int] | None = None, least: int = 1) -> list[Sample]:
        """Samples of one split (and step, or several; None: all) by patient in hash order, then by date.

        Only of cells (a split at a step) with at least ``least`` distinct patients.
        """
        full = self._cells(least)
        among = range(1, self.time_steps + 1) if steps is None else [steps] if isinstance(steps, int) else steps
        wanted = (s for s in self._samples if split in (None, s.split) and s.time_step in among)
        return [s for s in wanted if (s.split, s.time_step) in full]

    def leaving_out(
        self,
        reason_of: Callable[[Visit], str | None],
        prepared: Mapping[Visit, Path] | None = None,
        linked: Sequence[Collection[str]] | None = None,
    ) -> "Cohort":
        """The cohort without the visits for which ``reason_of`` gives a reason; they are counted in ``rejected``.

        A visit left out keeps its place in time, so that later visits stay at their step; the next visit's prior is the
        last one remaining. ``linked`` replaces the cohort's own. Raises :class:`DataError` ``no-patient`` when nobody
        is left.
        """
        rejected, left_out = Counter(self.rejected), {reason: set(ids) for reason, ids in self._left_out.items()}
        patients = []
        for patient in self.patients:
            reasons = {visit: reason for visit in patient.visits if (reason := reason_of(visit))}
            rejected.update(reasons.values())
            for reason in reasons.values():
                left_out.setdefault(reason, set()).add(patient.patient_id)
            if visits := tuple(visit for visit in patient.visits if visit not in reasons):
                patients.append(replace(patient, visits=visits, unreadable=(*patient.unreadable, *reasons)))
        less = Cohort(
            self.site,
            patients,
            key=self.key,
            timeline=self.timeline,
            rejected=rejected,
            prepared=prepared,
            linked=self.linked if linked is None else linked,
            splits=self.splits,
        )
        less._left_out = left_out
        return less

    def until(self, step: int, replay_share: float = 1.0) -> "Cohort":
        """A copy with what a site has when a time step is the newest: the samples until then.

        It validates on the newest step alone, and trains on this share of the earlier visits, drawn by keyed hash.
        """

        def kept(sample: Sample) -> bool:
            if sample.time_step == step or sample.split == "test":
                return sample.time_step <= step
            of = f"replay:{sample.visit.patient_id}/{sample.visit.visit_id}"
            drawn = hmac.digest(self.key, of.encode(), "sha256")
            share = int.from_bytes(drawn[:6], "big") / 2**48
            return sample.time_step < step and sample.split == "train" and share < replay_share

        there = copy.copy(self)
        there._samples = [sample for sample in self._samples if kept(sample)]
        return there

    def joined_with(self, others: "Sequence[Cohort]") -> "Cohort":
        """A copy that also has the samples of other sites' cohorts, as they split and aligned them; for simulations."""
        return self.also_with([sample for cohort in others for sample in cohort._samples])

    def also_with(self, samples: Sequence[Sample]) -> "Cohort":
        """A copy that also has these samples."""
        joined = copy.copy(self)
        joined._samples = [*self._samples, *samples]
        return joined

    def training_on(self, patients: Collection[str]) -> "Cohort":
        """A copy that trains on these patients and tests on all others."""
        there = copy.copy(self)
        there._samples = [
            replace(s, split="train" if s.visit.patient_id in patients else "test") for s in self._samples
        ]
        return there

    def counts(self, least: int = 1) -> dict[Split, list[int]]:
        """Visits per split and step, lists of length T, as they may leave the site (:mod:`.minimum_cell`)."""
        full = self._cells(least)
        seen = Counter((s.split, s.time_step) for s in self._samples)
        cells = {split: [(split, t) for t in range(1, self.time_steps + 1)] for split in SPLITS}
        return {split: [round_to_cell(seen[c], least) if c in full else 0 for c in row] for split, row in cells.items()}

    def digest(self) -> str:
        """Changes with every visit that comes or goes, is counted in another cell, or has another report or label."""
        visits = sorted(
            repr((v.patient_id, v.visit_id, s.split, s.time_step, v.report, sorted(v.labels or ())))
            for s in self._samples
            for v in (s.visit,)
        )
        return hmac.digest(self.key, "\n".join(visits).encode(), "sha256").hex()

    def left_out(self, least: int) -> dict[str, int]:
        """Reason to number of studies left out, as it may leave the site: never who was excluded (a withdrawal).

        Where ``least`` is above 1, only studies of a reason whose patients are known and at least that many.
        """
        shown = {reason: n for reason, n in self.rejected.items() if reason != EXCLUDED}
        if least == 1:
            return shown
        known = {reason: shown_count(n, self._left_out.get(reason, ()), least) for reason, n in shown.items()}
        return {reason: n for reason, n in known.items() if n}

    def _cells(self, least: int) -> set[tuple[Split, int]]:
        """Split and step of the cells with at least ``least`` distinct patients."""
        return full_cells((((s.split, s.time_step), s.visit.patient_id) for s in self._samples), least)
