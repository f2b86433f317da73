"""Patients, visits and the cohort of one site.

Physical time orders everything: visits by acquisition date, never by an identifier. A patient with fewer than T
visits, a site without anybody at some step, and irregular gaps are normal, never an error.
"""

from __future__ import annotations

import hmac
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from fedtar_flare.data.splits import SPLITS, Split, split_of
from fedtar_flare.data.timeline import Timeline
from fedtar_flare.errors import DataError

Sex = Literal["F", "M"]
Modality = Literal["ct", "radiograph"]
MAX_AGE = 130.0


@dataclass(frozen=True, slots=True)
class Visit:
    """One study of one patient.

    Args:
        patient_id, visit_id: the site's own; they never leave it.
        acquired: acquisition date and time; one with a time zone is kept in UTC, without the zone, so that all compare.
        image: DICOM folder, file or zip, NIfTI, PNG, JPEG or DICOM radiograph.
        report: the report's text.
        modality: ``ct`` or ``radiograph``.
        age: years at this visit, None when unknown.
        findings: the known truth (synthetic cohort), else None.

    Raises:
        DataError: ``empty-report``, ``age-out-of-range`` or ``no-date``.
    """

    patient_id: str
    visit_id: str
    acquired: datetime
    image: Path
    report: str
    modality: Modality
    age: float | None = None
    findings: frozenset[str] | None = None

    def __post_init__(self) -> None:
        where = f"patient {self.patient_id}, visit {self.visit_id}"
        if not isinstance(self.acquired, datetime):
            raise DataError(
                f"{where}: no acquisition date; a visit cannot be put in order without one", reason="no-date"
            )
        if self.acquired.tzinfo is not None:
            object.__setattr__(self, "acquired", self.acquired.astimezone(UTC).replace(tzinfo=None))
        if not self.report.strip():
            raise DataError(f"{where}: the report is empty", reason="empty-report")
        if self.modality not in ("ct", "radiograph"):
            raise DataError(f"{where}: modality '{self.modality}' is not ct or radiograph", reason="unknown-modality")
        if self.age is not None and not (math.isfinite(self.age) and 0 <= self.age <= MAX_AGE):
            raise DataError(
                f"{where}: age {self.age:g} is not within 0 to {MAX_AGE:g} years", reason="age-out-of-range"
            )


@dataclass(frozen=True, slots=True)
class Patient:
    """A patient with visits in the order of their acquisition.

    Visits at the same moment have no order in time: theirs follows the text of the report, then the image's path.

    Args:
        patient_id: the site's own.
        sex: ``F``, ``M`` or None (unknown or other).
        visits: those that can be used, in any order.
        unreadable: visits whose image cannot be read. Nothing is learned from them, but they keep their place in time.

    Raises:
        DataError: ``no-visit``, ``duplicate-visit`` (same moment and same image), or ``mixed-patients``.
    """

    patient_id: str
    sex: Sex | None
    visits: tuple[Visit, ...]
    unreadable: tuple[Visit, ...] = ()

    def __post_init__(self) -> None:
        if not self.visits:
            raise DataError(f"patient {self.patient_id} has no visit", reason="no-visit")
        if self.sex not in ("F", "M", None):
            raise DataError(f"patient {self.patient_id}: sex '{self.sex}' is not F, M or unknown", reason="unknown-sex")
        if any(visit.patient_id != self.patient_id for visit in (*self.visits, *self.unreadable)):
            raise DataError(f"patient {self.patient_id} holds a visit of another patient", reason="mixed-patients")
        twice = [key for key, n in Counter((v.acquired, v.image) for v in self.visits).items() if n > 1]
        if twice:
            raise DataError(
                f"patient {self.patient_id}: two visits on {twice[0][0]} with the same image {twice[0][1]}",
                reason="duplicate-visit",
            )
        object.__setattr__(self, "visits", tuple(sorted(self.visits, key=order_in_time)))

    def places(self) -> list[int]:
        """For each visit, how many visits came before it, unreadable ones included."""
        before = [order_in_time(visit) for visit in self.unreadable]
        return [i + sum(other < order_in_time(visit) for other in before) for i, visit in enumerate(self.visits)]


def order_in_time(visit: Visit) -> tuple[datetime, str, str]:
    """What a patient's visits are sorted by."""
    return visit.acquired, visit.report, str(visit.image)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model learns from: a visit, the one before it where asked for, and its place in time.

    Args:
        visit: the visit.
        prior: the patient's last visit before it whose image can be read; None for a first visit or with
            ``prior="none"``.
        sex: the patient's.
        time_step: t in 1..T.
        split: of the patient.
        prepared: file with the model input of the visit; None before :func:`.imaging.pipeline.prepare_cohort`.
    """

    visit: Visit
    prior: Visit | None
    sex: Sex | None
    time_step: int
    split: Split
    prepared: Path | None = None


class Cohort:
    """All patients of one site, split by patient and aligned to time steps.

    Args:
        site: its name.
        patients: no id twice.
        key: secret bytes of the site for the keyed hashes.
        timeline: how visits become time steps.
        rejected: reason to number of studies that were left out when the data was read.
        prepared: visit to the file with its model input (see :func:`.imaging.pipeline.prepare_cohort`).

    Raises:
        DataError: ``duplicate-patient``, ``mixed-modality`` or ``no-patient``.
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
        self.modality: Modality = modalities.pop()
        # ordered by keyed hash: the same whatever order the source gives, and blind to the identifier
        order = {p.patient_id: hmac.digest(key, b"order:" + p.patient_id.encode(), "sha256") for p in patients}
        self.patients: tuple[Patient, ...] = tuple(sorted(patients, key=lambda p: order[p.patient_id]))
        self._samples = [sample for patient in self.patients for sample in self._samples_of(patient, prepared or {})]

    def _samples_of(self, patient: Patient, prepared: Mapping[Visit, Path]) -> Iterator[Sample]:
        split = split_of(patient.patient_id, self.key)
        prior = None
        for visit, place in zip(patient.visits, patient.places(), strict=True):
            step = self.timeline.step_of(place, visit.acquired)
            yield Sample(visit, prior, patient.sex, step, split, prepared.get(visit))
            prior = visit if self.timeline.prior == "report" else None

    @property
    def time_steps(self) -> int:
        """T."""
        return self.timeline.time_steps

    @property
    def visits(self) -> list[Visit]:
        """All visits that can be used, patient by patient."""
        return [visit for patient in self.patients for visit in patient.visits]

    def samples(self, split: Split, time_step: int | None = None) -> list[Sample]:
        """Samples of one split (and one step), by patient in hash order, then by date; the same in every process."""
        return [s for s in self._samples if s.split == split and time_step in (None, s.time_step)]

    def leaving_out(
        self, reason_of: Callable[[Visit], str | None], prepared: Mapping[Visit, Path] | None = None
    ) -> Cohort:
        """The cohort without the visits for which ``reason_of`` gives a reason; they are counted in ``rejected``.

        A visit that is left out keeps its place in time, so that a study which becomes unreadable during a run moves
        none of the patient's later visits to another step. The prior of the next visit is the last one that is left.

        Args:
            reason_of: why a visit is left out; None: it stays.
            prepared: of the visits that stay, see the class.

        Raises:
            DataError: ``no-patient`` when nobody is left.
        """
        rejected = Counter(self.rejected)
        patients = []
        for patient in self.patients:
            reasons = {visit: reason for visit in patient.visits if (reason := reason_of(visit))}
            rejected.update(reasons.values())
            if visits := tuple(visit for visit in patient.visits if visit not in reasons):
                patients.append(replace(patient, visits=visits, unreadable=(*patient.unreadable, *reasons)))
        return Cohort(self.site, patients, key=self.key, timeline=self.timeline, rejected=rejected, prepared=prepared)

    def counts(self) -> dict[Split, list[int]]:
        """Visits per split and step: lists of length T."""
        seen = Counter((s.split, s.time_step) for s in self._samples)
        return {split: [seen[split, t] for t in range(1, self.time_steps + 1)] for split in SPLITS}
