"""From a cohort's samples to demographic profiles and their soft clusters (FedTAR, Eq. 2 and 3).

Importing scikit-learn costs seconds, so only the fit, once per run, uses it; the assignment of every task is numpy's.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cells import keyed_unit
from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.methods.fedtar.config import PROFILES, PatientConfig

logger = logging.getLogger(__name__)

UNKNOWN = 0.5
"""An unknown sex; and an unknown age / 100 where no training patient of the site has a known age."""
REG_COVAR = TOLERANCE = 1e-6
"""Of scikit-learn's fit: small and strict, since profiles lie within [0, 1.3]."""


def profiles(samples: Sequence[Sample], key: bytes, median_age: float | None, fields: Sequence[str]) -> np.ndarray:
    """``v_p = [hash(id), age / 100, sex]`` (FedTAR, Eq. 2) at each sample's visit: float64 (N, P), P named ``fields``.

    The hash, in [0, 1], is by the site's secret ``key``; ``median_age`` (years) stands for an unknown age.
    """
    rows = np.empty((len(samples), len(fields)))
    for row, sample in zip(rows, samples, strict=True):
        visit = sample.visit
        age = median_age if visit.age is None else visit.age
        values = {
            "hash": keyed_unit(f"profile:{visit.patient_id}", key),
            "age": UNKNOWN if age is None else age / 100,
            "sex": {"F": 0.0, "M": 1.0}.get(sample.sex or "", UNKNOWN),
        }
        row[:] = list(map(values.__getitem__, fields))
    return rows


@dataclass(frozen=True, eq=False)
class DemographicMixture:
    """A Gaussian mixture with diagonal covariances over the profiles of a site; it never leaves the site.

    ``weights`` (K,), ``means`` and ``variances`` (K, P) are float64, of the K fitted components; with none fitted q is
    the profile itself. q has the length ``components`` and is 0 after K. ``median_age`` (years) is that at the fit, so
    that a later visit changes no q.
    """

    weights: np.ndarray
    means: np.ndarray
    variances: np.ndarray
    components: int
    fields: tuple[str, ...] = PROFILES[0]
    median_age: float | None = None

    @classmethod
    def fit(cls, profiles: np.ndarray, *, components: int = 16, fitted: int | None = None, seed: int = 0) -> Self:
        """Fit profiles (N, P), one row per training patient, by expectation maximisation (scikit-learn's; Eq. 3).

        The same profiles, in any order, and the same seed give the same mixture; components are ordered by their means.
        ``fitted`` is K, by default ``components``; fewer are fitted where there are fewer distinct profiles.
        """
        profiles = profiles[_by_column(profiles)]  # the fit depends on the order of rows; the patients have none
        distinct = len(np.unique(profiles, axis=0))
        wanted = components if fitted is None else fitted
        if distinct < wanted:
            logger.warning("%d distinct profiles: so many components of %d, the rest of q is 0", distinct, components)
        if distinct == 1:  # scikit-learn wants two rows, but a site may have one patient
            return cls(np.ones(1), profiles[:1], np.full_like(profiles[:1], REG_COVAR), components)
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
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(profiles)
        if not model.converged_:
            logger.warning("the fit of the demographic mixture stopped before its tolerance was met")
        order = _by_column(model.means_)
        return cls(model.weights_[order], model.means_[order], model.covariances_[order], components)

    def assign(self, profiles: np.ndarray) -> np.ndarray:
        """``q_p`` (Eq. 3), float64 (N, components), of profiles (N, P): the probability of each component."""
        if not len(self.weights):
            return profiles
        # squares of differences, not scikit-learn's expanded product: exact for narrow components too
        difference = profiles[:, None, :] - self.means[None]
        log_density = -0.5 * (difference**2 / self.variances + np.log(2 * np.pi * self.variances)).sum(2)
        joint = log_density + np.log(np.maximum(self.weights, np.finfo(float).tiny))
        joint -= joint.max(1, keepdims=True)  # far from every component the nearest one still wins, without underflow
        q = np.exp(joint)
        padded = np.zeros((len(q), self.components))
        padded[:, : q.shape[1]] = q / q.sum(1, keepdims=True)
        return padded

    def memberships(self, samples: Sequence[Sample], key: bytes) -> Tensor:
        """q of each of B samples at the age of its visit, float32 (B, components); ``key`` is the site's secret."""
        return torch.from_numpy(self.assign(profiles(samples, key, self.median_age, self.fields))).float()

    def state(self) -> dict[str, Tensor]:
        """The fit as tensors, for the site's state; fields and median age stand beside it, as JSON."""
        names = ("weights", "means", "variances", "components")
        return {name: torch.from_numpy(np.atleast_1d(getattr(self, name))) for name in names}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], fields: Sequence[str] = PROFILES[0], median_age: float | None = None
    ) -> Self:
        """The mixture whose :meth:`state` this is."""
        weights, means, variances = (state[name].numpy() for name in ("weights", "means", "variances"))
        return cls(weights, means, variances, int(state["components"]), tuple(fields), median_age)


def fit_mixture(cohort: Cohort, config: PatientConfig, seed: int) -> DemographicMixture:
    """Fit the mixture on one profile per training patient, at the age of the first visit, if ``config`` wants one."""
    samples = list(reversed(cohort.samples("train")))
    first = list({s.visit.patient_id: s for s in samples}.values())  # the first visit comes last, and stays
    if not first:
        raise DataError(f"site {cohort.site} has no training patient", reason="no-training-patient")
    ages = {s.visit.patient_id: s.visit.age for s in samples if s.visit.age is not None}
    median = float(np.median(list(ages.values()))) if ages else None
    if config.mixture:
        fitted = config.components_for(len(first))
        rows = profiles(first, cohort.key, median, config.profile)
        mixture = DemographicMixture.fit(rows, components=config.components, fitted=fitted, seed=seed)
    else:
        none = np.zeros((0, config.q_length))
        mixture = DemographicMixture(none[:, 0], none, none, config.q_length)
    return replace(mixture, fields=config.profile, median_age=median)


def _by_column(rows: np.ndarray) -> np.ndarray:
    return np.lexsort(rows.T[::-1])
