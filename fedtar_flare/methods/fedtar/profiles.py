"""From a cohort's samples to soft cluster assignments: joins :mod:`demographics` with the site's patients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.data.splits import identity_hash
from fedtar_flare.errors import DataError
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.demographics import DemographicMixture, profile_vector


def fit_mixture(cohort: Cohort, config: PatientConfig, seed: int) -> DemographicMixture:
    """Fit the mixture on one row per training patient, at the age of the first visit; DataError where there is none."""
    rows = {s.visit.patient_id: s for s in reversed(cohort.samples("train"))}  # the first visit wins
    if not rows:
        raise DataError(f"site {cohort.site} has no training patient", reason="no-training-patient")
    median = training_median_age(cohort)
    profiles = [_profile(sample, cohort.key, median, config.profile) for sample in rows.values()]
    fitted = config.components_for(len(rows))
    return DemographicMixture.fit(np.stack(profiles), components=config.components, fitted=fitted, seed=seed)


def memberships(
    samples: Sequence[Sample], mixture: DemographicMixture, key: bytes, median_age: float | None, fields: Sequence[str]
) -> torch.Tensor:
    """q of each of B samples at the age of its visit, float32 (B, components).

    ``median_age`` is :func:`training_median_age` at the time of the fit, so that a later visit moves nobody's q.
    """
    return torch.from_numpy(mixture.assign(np.stack([_profile(s, key, median_age, fields) for s in samples])))


def training_median_age(cohort: Cohort) -> float | None:
    """Median age of the training patients at their first visit with a known age; None when none is known."""
    ages = {s.visit.patient_id: s.visit.age for s in reversed(cohort.samples("train")) if s.visit.age is not None}
    return float(np.median(list(ages.values()))) if ages else None


def _profile(sample: Sample, key: bytes, median: float | None, fields: Sequence[str]) -> np.ndarray:
    return profile_vector(identity_hash(sample.visit.patient_id, key), sample.visit.age, sample.sex, median, fields)
