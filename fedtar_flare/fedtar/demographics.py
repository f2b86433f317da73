"""Demographic profiles and their soft clusters (FedTAR, Eq. 2 and 3): numpy; scikit-learn only to fit.

A client process assigns in every task but fits once per run, and importing scikit-learn costs seconds, so the
responsibilities of the fitted mixture are computed here, exactly, in numpy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtar_flare.errors import ConfigError, DataError

PROFILES = (("hash", "age", "sex"), ("age", "sex"))
UNKNOWN_SEX = 0.5
UNKNOWN_AGE = 0.5
"""Stands for age / 100 where no training patient of the site has a known age."""


def profile_vector(
    identity: float, age: float | None, sex: str | None, median_age: float | None, fields: Sequence[str] = PROFILES[0]
) -> np.ndarray:
    """``v_p = [hash(id), age / 100, sex]`` (Eq. 2).

    Args:
        identity: keyed hash of the identifier in [0, 1].
        age: years at the visit; None takes the site's training median.
        sex: ``F`` is 0, ``M`` is 1, anything else 0.5.
        median_age: median age of the site's training patients, None when no age is known.
        fields: which of hash, age, sex, in this order.

    Returns:
        float64 vector of the fields.

    Raises:
        DataError: for an age outside 0 to 130 or an identity outside 0 to 1.
    """
    if not 0 <= identity <= 1:
        raise DataError(f"the identity hash {identity} is not within 0 to 1", reason="bad-profile")
    age = median_age if age is None else age
    if age is not None and not (math.isfinite(age) and 0 <= age <= 130):
        raise DataError(f"age {age} is not within 0 to 130 years", reason="age-out-of-range")
    values = {
        "hash": identity,
        "age": UNKNOWN_AGE if age is None else age / 100,
        "sex": {"F": 0.0, "M": 1.0}.get(sex or "", UNKNOWN_SEX),
    }
    if tuple(fields) not in PROFILES:
        raise ConfigError(f"profile {tuple(fields)} is not one of {PROFILES}")
    return np.array([values[field] for field in fields])


@dataclass(frozen=True)
class DemographicMixture:
    """A Gaussian mixture with diagonal covariances over profiles; stays at the site.

    Args:
        weights: (K,) of the fitted components, K <= ``components``, positive, sum one.
        means: (K, P).
        variances: (K, P), positive.
        components: length of q; q is padded with zeros beyond K.
        note: what the data did not allow, else empty.
    """

    weights: np.ndarray
    means: np.ndarray
    variances: np.ndarray
    components: int
    note: str = ""

    @classmethod
    def fit(
        cls, profiles: np.ndarray, *, components: int = 16, seed: int = 0, reg_covar: float = 1e-6, tol: float = 1e-6
    ) -> DemographicMixture:
        """Fit by expectation maximisation (scikit-learn's ``GaussianMixture``, diagonal covariances).

        Args:
            profiles: (N, P), one row per training patient.
            components: K wanted; with fewer distinct profiles, as many as those.
            seed: of the initialisation.
            reg_covar, tol: as scikit-learn's; small and strict, since profiles lie within [0, 1].

        Returns:
            the mixture, its components ordered by their means.

        Raises:
            DataError: no profile (``no-training-patient``) or a value that is not finite (``bad-profile``).
        """
        profiles = np.asarray(profiles, dtype=np.float64)
        if components < 1:
            raise ConfigError(f"components must be at least 1, not {components}")
        if profiles.ndim != 2 or not len(profiles):
            raise DataError("no training patient: the demographic mixture cannot be fitted", reason="no-training-patient")
        if not np.isfinite(profiles).all():
            raise DataError("a profile has a value that is not finite", reason="bad-profile")
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture

        distinct = len(np.unique(profiles, axis=0))
        k = min(components, distinct)
        if len(profiles) == 1:  # scikit-learn wants two rows; a single patient is one component at its profile
            weights, means, variances = np.ones(1), profiles.copy(), np.full_like(profiles, reg_covar)
        else:
            model = GaussianMixture(
                k, covariance_type="diag", reg_covar=reg_covar, tol=tol, max_iter=500, random_state=seed % 2**32
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                model.fit(profiles)
            weights, means, variances = model.weights_, model.means_, model.covariances_
        order = np.lexsort(means.T[::-1])
        note = ""
        if k < components:
            note = f"{distinct} distinct profiles allow {k} of {components} components; the rest of q is zero"
        return cls(weights[order], means[order], variances[order], components, note)

    def assign(self, profiles: np.ndarray) -> np.ndarray:
        """``q_p``, the responsibilities (Eq. 3), float32 (N, components); rows sum to one.

        Args:
            profiles: (N, P).

        Raises:
            DataError: when the width differs from the fitted profiles'.
        """
        profiles = np.asarray(profiles, dtype=np.float64)
        if profiles.ndim != 2 or profiles.shape[1] != self.means.shape[1]:
            raise DataError(
                f"profiles of shape {profiles.shape}: the mixture has {self.means.shape[1]} fields", reason="bad-profile"
            )
        difference = profiles[:, None, :] - self.means[None]
        log_density = -0.5 * (difference**2 / self.variances + np.log(2 * np.pi * self.variances)).sum(2)
        joint = log_density + np.log(np.maximum(self.weights, np.finfo(float).tiny))
        joint -= joint.max(1, keepdims=True)  # far from every component the nearest one still wins, without underflow
        q = np.exp(joint)
        q /= q.sum(1, keepdims=True)
        padded = np.zeros((len(profiles), self.components), dtype=np.float32)
        padded[:, : q.shape[1]] = q
        return padded

    def state(self) -> dict[str, np.ndarray]:
        """Plain arrays, for the site state."""
        return {
            "weights": np.ascontiguousarray(self.weights),
            "means": np.ascontiguousarray(self.means),
            "variances": np.ascontiguousarray(self.variances),
            "components": np.array([self.components]),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, np.ndarray]) -> DemographicMixture:
        """From :meth:`state`."""
        return cls(state["weights"], state["means"], state["variances"], int(state["components"][0]))
