"""From a cohort's samples to demographic profiles and their soft clusters (FedTAR, Eq. 2 and 3).

A client process assigns in every task but fits once per run, and importing scikit-learn costs seconds: only the fit
uses it, and the responsibilities are computed here, exactly, in numpy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.data.splits import identity_hash
from fedtar_flare.methods.fedtar.config import PROFILES, PatientConfig

UNKNOWN = 0.5
"""Stands for sex, and for age / 100 where no training patient of the site has a known age."""
REG_COVAR = TOLERANCE = 1e-6
"""Of scikit-learn's fit: small and strict, since profiles lie within [0, 1.3]."""


def profile_vector(
    identity: float, age: float | None, sex: str | None, median_age: float | None, wanted: Sequence[str] = PROFILES[0]
) -> np.ndarray:
    """``v_p = [hash(id), age / 100, sex]`` (Eq. 2), float64, or those of its fields that are ``wanted``.

    ``identity`` is the keyed hash of the identifier, in [0, 1]. An unknown age is ``median_age``, that of the site's
    training patients, if any is known. Sex ``F`` is 0, ``M`` 1, anything else 0.5. Raises DataError
    ``age-out-of-range`` outside 0 to 130 years.
    """
    age = median_age if age is None else age
    if age is not None and not 0 <= age <= 130:
        raise DataError(f"age {age} is not within 0 to 130 years", reason="age-out-of-range")
    values = {
        "hash": identity,
        "age": UNKNOWN if age is None else age / 100,
        "sex": {"F": 0.0, "M": 1.0}.get(sex or "", UNKNOWN),
    }
    return np.array([values[field] for field in wanted])


@dataclass(frozen=True, eq=False)
class DemographicMixture:
    """A Gaussian mixture with diagonal covariances over profiles; stays at the site.

    ``weights`` (K,), ``means`` and ``variances`` (K, P) are of the fitted components, K <= ``components``, which is the
    length of q: it is padded with zeros; with none fitted q is the profile. ``converged`` is False when the fit stopped
    before its tolerance was met, ``short`` True when there were fewer distinct profiles than components to fit.
    """

    weights: np.ndarray
    means: np.ndarray
    variances: np.ndarray
    components: int
    converged: bool = True
    short: bool = False

    @property
    def note(self) -> str:
        """What the data did not allow; empty when there is nothing to say."""
        notes = []
        if self.short:
            k = len(self.weights)
            notes.append(f"{k} distinct profiles allow {k} of {self.components} components; the rest of q is zero")
        if not self.converged:
            notes.append("the fit of the demographic mixture stopped before its tolerance was met")
        return "; ".join(notes)

    @classmethod
    def fit(
        cls, profiles: np.ndarray, *, components: int = 16, fitted: int | None = None, seed: int = 0
    ) -> DemographicMixture:
        """Fit profiles (N, P), float64, by expectation maximisation (scikit-learn's, diagonal covariances; Eq. 3).

        There is one row per training patient, at least one. The same profiles, in any order, and the same seed give the
        same mixture; components are ordered by their means. ``fitted`` is the K that is wanted (None: ``components``);
        with fewer distinct profiles, it is as many as those.
        """
        profiles = profiles[_by_column(profiles)]  # the fit depends on the order of rows; the patients have none
        distinct = len(np.unique(profiles, axis=0))
        wanted = components if fitted is None else fitted
        short = distinct < wanted
        if distinct == 1:  # scikit-learn wants two rows, but a site may have one patient
            return cls(np.ones(1), profiles[:1], np.full_like(profiles[:1], REG_COVAR), components, short=short)
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture

        model = GaussianMixture(
            min(wanted, distinct),
            covariance_type="diag",
            reg_covar=REG_COVAR,
            tol=TOLERANCE,
            max_iter=500,
            random_state=seed % 2**32,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # kept in ``converged``
            model.fit(profiles)
        order = _by_column(model.means_)
        fit = model.weights_[order], model.means_[order], model.covariances_[order]
        return cls(*fit, components, bool(model.converged_), short)

    def responsibilities(self, profiles: np.ndarray) -> np.ndarray:
        """Posterior probability of each component (Eq. 3) for profiles (N, P): float64 (N, K), rows sum to one."""
        # squares of differences, not scikit-learn's expanded product: exact for narrow components too
        difference = profiles[:, None, :] - self.means[None]
        log_density = -0.5 * (difference**2 / self.variances + np.log(2 * np.pi * self.variances)).sum(2)
        joint = log_density + np.log(np.maximum(self.weights, np.finfo(float).tiny))
        joint -= joint.max(1, keepdims=True)  # far from every component the nearest one still wins, without underflow
        q = np.exp(joint)
        return q / q.sum(1, keepdims=True)

    def assign(self, profiles: np.ndarray) -> np.ndarray:
        """``q_p``: the responsibilities padded with zeros, float32 (N, components), or the profiles themselves."""
        if not len(self.weights):
            return profiles.astype(np.float32)
        q = self.responsibilities(profiles)
        padded = np.zeros((len(q), self.components), dtype=np.float32)
        padded[:, : q.shape[1]] = q
        return padded

    def state(self) -> dict[str, np.ndarray]:
        """Plain arrays, for the site state."""
        return {field.name: np.atleast_1d(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, np.ndarray]) -> DemographicMixture:
        """From :meth:`state`."""
        single = int(state["components"][0]), bool(state["converged"][0]), bool(state["short"][0])
        return cls(state["weights"], state["means"], state["variances"], *single)


def _by_column(rows: np.ndarray) -> np.ndarray:
    return np.lexsort(rows.T[::-1])


def fit_mixture(cohort: Cohort, config: PatientConfig, seed: int) -> DemographicMixture:
    """Fit the mixture on one row per training patient, at the age of the first visit; DataError where there is none.

    Without ``config.mixture`` none is fitted, and q is the profile.
    """
    rows = {s.visit.patient_id: s for s in reversed(cohort.samples("train"))}  # the first visit wins
    if not rows:
        raise DataError(f"site {cohort.site} has no training patient", reason="no-training-patient")
    if not config.mixture:
        none = np.zeros((0, config.q_length))
        return DemographicMixture(none[:, 0], none, none, config.q_length)
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
