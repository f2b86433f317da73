"""Patients, visits and the cohort of one site.

Physical time orders everything: visits by acquisition date, never by an identifier. A patient with fewer than T
visits, a site without anybody at some step, and irregular gaps are normal, never an error.
"""

from __future__ import annotations

import hmac
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedtar_flare.data.splits import SPLITS, Split, split_of
from fedtar_flare.errors import ConfigError, DataError

Sex = Literal["F", "M"]
Modality = Literal["ct", "film"]
MAX_AGE = 130.0


@dataclass(frozen=True, slots=True)
class Visit:
    """One study of one patient.

    Args:
        patient_id, visit_id: the site's own; they never leave it.
        acquired: acquisition date and time; one with a time zone is kept in UTC, without the zone, so that all compare.
        image: DICOM folder, file or zip, NIfTI, PNG, JPEG or DICOM film.
        report: the report's text.
        modality: ``ct`` or ``film``.
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
        if self.modality not in ("ct", "film"):
            raise DataError(f"{where}: modality '{self.modality}' is not ct or film", reason="unknown-modality")
        if self.age is not None and not (math.isfinite(self.age) and 0 <= self.age <= MAX_AGE):
            raise DataError(
                f"{where}: age {self.age:g} is not within 0 to {MAX_AGE:g} years", reason="age-out-of-range"
            )


@dataclass(frozen=True, slots=True)
class Patient:
    """A patient with visits in the order of their acquisition.

    Args:
        patient_id: the site's own.
        sex: ``F``, ``M`` or None (unknown or other).
        visits: in any order; kept in the order of their date. Visits at the same moment keep the given order.

    Raises:
        DataError: ``no-visit``, ``duplicate-visit`` (same moment and same image), or ``mixed-patients``.
    """

    patient_id: str
    sex: Sex | None
    visits: tuple[Visit, ...]

    def __post_init__(self) -> None:
        if not self.visits:
            raise DataError(f"patient {self.patient_id} has no visit", reason="no-visit")
        if self.sex not in ("F", "M", None):
            raise DataError(f"patient {self.patient_id}: sex '{self.sex}' is not F, M or unknown", reason="unknown-sex")
        if any(visit.patient_id != self.patient_id for visit in self.visits):
            raise DataError(f"patient {self.patient_id} holds a visit of another patient", reason="mixed-patients")
        twice = [key for key, n in Counter((v.acquired, v.image) for v in self.visits).items() if n > 1]
        if twice:
            raise DataError(
                f"patient {self.patient_id}: two visits on {twice[0][0]} with the same image {twice[0][1]}",
                reason="duplicate-visit",
            )
        object.__setattr__(self, "visits", tuple(sorted(self.visits, key=lambda visit: visit.acquired)))


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model learns from: a visit, the one before it where asked for, and its place in time.

    Args:
        visit: the visit.
        prior: the patient's visit before; None for a first visit or with ``prior="none"``.
        sex: the patient's.
        time_step: t in 1..T.
        split: of the patient.
    """

    visit: Visit
    prior: Visit | None
    sex: Sex | None
    time_step: int
    split: Split


class Cohort:
    """All patients of one site, split by patient and aligned to time steps.

    Args:
        site: its name.
        patients: no id twice.
        key: secret bytes of the site for the keyed hashes.
        time_steps: T.
        alignment: ``visit``: a patient's t-th visit by date, visits beyond T belong to step T; ``period``: by the
            calendar bins that ``periods`` bound.
        periods: T - 1 rising dates between the bins, for ``period``.
        prior: ``none`` or ``report``.
        rejected: reason to number of studies that were left out when the data was read.

    Raises:
        ConfigError: for settings that do not fit.
        DataError: ``duplicate-patient``, ``mixed-modality`` or ``no-patient``.
    """

    def __init__(
        self,
        site: str,
        patients: Sequence[Patient],
        *,
        key: bytes,
        time_steps: int,
        alignment: str = "visit",
        periods: Sequence[datetime] | None = None,
        prior: str = "none",
        rejected: Mapping[str, int] | None = None,
    ):
        if time_steps < 1:
            raise ConfigError(f"time_steps must be at least 1, not {time_steps}")
        if alignment not in ("visit", "period"):
            raise ConfigError(f"alignment '{alignment}' is not 'visit' or 'period'")
        if prior not in ("none", "report"):
            raise ConfigError(f"prior '{prior}' is not 'none' or 'report'")
        periods = list(periods or ())
        self._settings: dict[str, Any] = {
            "key": key,
            "time_steps": time_steps,
            "alignment": alignment,
            "periods": periods,
            "prior": prior,
        }
        if alignment == "period" and (len(periods) != time_steps - 1 or periods != sorted(set(periods))):
            raise ConfigError(
                f"alignment 'period' needs {time_steps - 1} rising dates, the bounds between {time_steps} bins"
            )
        if not patients:
            raise DataError(f"site {site} has no patient that can be used", reason="no-patient")
        twice = [pid for pid, n in Counter(p.patient_id for p in patients).items() if n > 1]
        if twice:
            raise DataError(f"patient {twice[0]} is there twice", reason="duplicate-patient")
        modalities = {visit.modality for patient in patients for visit in patient.visits}
        if len(modalities) > 1:
            raise DataError(f"site {site} mixes CT and films; make one cohort of each", reason="mixed-modality")
        self.site = site
        self.key = key
        self.time_steps = time_steps
        self.rejected = dict(rejected or {})
        self.modality: Modality = modalities.pop()
        # ordered by keyed hash: the same whatever order the source gives, and blind to the identifier
        order = {p.patient_id: hmac.digest(key, b"order:" + p.patient_id.encode(), "sha256") for p in patients}
        self.patients: tuple[Patient, ...] = tuple(sorted(patients, key=lambda p: order[p.patient_id]))
        self._samples = [
            Sample(
                visit=visit,
                prior=patient.visits[i - 1] if prior == "report" and i else None,
                sex=patient.sex,
                time_step=min(i + 1, time_steps) if alignment == "visit" else bisect_right(periods, visit.acquired) + 1,
                split=split_of(patient.patient_id, key),
            )
            for patient in self.patients
            for i, visit in enumerate(patient.visits)
        ]

    def samples(self, split: Split, time_step: int | None = None) -> list[Sample]:
        """Samples of one split (and one step), by patient in hash order, then by date; the same in every process."""
        return [s for s in self._samples if s.split == split and time_step in (None, s.time_step)]

    def leaving_out(self, reason_of: Callable[[Visit], str | None]) -> Cohort:
        """The cohort without the visits for which ``reason_of`` gives a reason; they are counted in ``rejected``.

        Visits after one that is left out move to the step before it (``alignment="visit"``), as if it had never been.

        Raises:
            DataError: ``no-patient`` when nobody is left.
        """
        rejected = Counter(self.rejected)
        patients = []
        for patient in self.patients:
            reasons = [reason_of(visit) for visit in patient.visits]
            rejected.update(reason for reason in reasons if reason)
            visits = tuple(v for v, reason in zip(patient.visits, reasons, strict=True) if not reason)
            if visits:
                patients.append(Patient(patient.patient_id, patient.sex, visits))
        return Cohort(self.site, patients, rejected=rejected, **self._settings)

    def counts(self) -> dict[Split, list[int]]:
        """Visits per split and step: lists of length T."""
        seen = Counter((s.split, s.time_step) for s in self._samples)
        return {split: [seen[split, t] for t in range(1, self.time_steps + 1)] for split in SPLITS}
