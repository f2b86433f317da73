"""Demographic profiles and their soft clusters (FedTAR, Eq. 2 and 3).

A client process assigns in every task but fits once per run, and importing scikit-learn costs seconds: only the fit
uses it, and the responsibilities are computed here, exactly, in numpy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from fedtar_flare.errors import ConfigError, DataError

PROFILES = (("hash", "age", "sex"), ("age", "sex"))
UNKNOWN_SEX = 0.5
UNKNOWN_AGE = 0.5
"""Stands for age / 100 where no training patient of the site has a known age."""


def profile_vector(
    identity: float, age: float | None, sex: str | None, median_age: float | None, fields: Sequence[str] = PROFILES[0]
) -> np.ndarray:
    """``v_p = [hash(id), age / 100, sex]`` (Eq. 2), float64, or those of its fields that ``fields`` names.

    Args:
        identity: keyed hash of the identifier in [0, 1].
        age: years at the visit; None takes ``median_age``.
        sex: ``F`` is 0, ``M`` is 1, anything else 0.5.
        median_age: of the site's training patients; None when no age is known.
        fields: one of :data:`PROFILES`, else ConfigError.

    Raises:
        DataError: an age outside 0 to 130 (``age-out-of-range``) or an identity outside 0 to 1 (``bad-profile``).
    """
    if tuple(fields) not in PROFILES:
        raise ConfigError(f"profile {tuple(fields)} is not one of {PROFILES}")
    if not 0 <= identity <= 1:
        raise DataError(f"the identity hash {identity} is not within 0 to 1", reason="bad-profile")
    age = median_age if age is None else age
    if age is not None and not 0 <= age <= 130:
        raise DataError(f"age {age} is not within 0 to 130 years", reason="age-out-of-range")
    values = {
        "hash": identity,
        "age": UNKNOWN_AGE if age is None else age / 100,
        "sex": {"F": 0.0, "M": 1.0}.get(sex or "", UNKNOWN_SEX),
    }
    return np.array([values[field] for field in fields])


@dataclass(frozen=True, eq=False)
class DemographicMixture:
    """A Gaussian mixture with diagonal covariances over profiles; stays at the site.

    Args:
        weights: (K,) of the fitted components, K <= ``components``, not negative, sum one.
        means: (K, P).
        variances: (K, P), positive.
        components: length of q; q is padded with zeros beyond K.
        converged: False when the fit stopped before its tolerance was met.

    Raises:
        DataError: the arrays do not make such a mixture (``bad-mixture``).
    """

    weights: np.ndarray
    means: np.ndarray
    variances: np.ndarray
    components: int
    converged: bool = True

    def __post_init__(self) -> None:
        for name in ("weights", "means", "variances"):
            value = np.array(getattr(self, name), dtype=np.float64)
            object.__setattr__(self, name, value)
            if not np.isfinite(value).all():
                raise DataError(f"the mixture's {name} are not all finite", reason="bad-mixture")
        k = len(np.atleast_1d(self.weights))
        if self.weights.shape != (k,) or self.means.ndim != 2 or len(self.means) != k or not 1 <= k <= self.components:
            raise DataError(
                f"weights of shape {self.weights.shape}, means of shape {self.means.shape} and {self.components} "
                "components do not make a mixture",
                reason="bad-mixture",
            )
        if self.variances.shape != self.means.shape or not (self.variances > 0).all():
            raise DataError("the mixture's variances must be positive, one for each mean", reason="bad-mixture")
        if not (self.weights >= 0).all() or abs(self.weights.sum() - 1) > 1e-6:
            raise DataError("the mixture's weights must not be negative and must sum to one", reason="bad-mixture")

    @property
    def note(self) -> str:
        """What the data did not allow; empty when there is nothing to say."""
        notes = []
        if len(self.weights) < self.components:
            k = len(self.weights)
            notes.append(f"{k} distinct profiles allow {k} of {self.components} components; the rest of q is zero")
        if not self.converged:
            notes.append("the fit of the demographic mixture stopped before its tolerance was met")
        return "; ".join(notes)

    @classmethod
    def fit(
        cls, profiles: np.ndarray, *, components: int = 16, seed: int = 0, reg_covar: float = 1e-6, tol: float = 1e-6
    ) -> DemographicMixture:
        """Fit by expectation maximisation (scikit-learn's ``GaussianMixture``, diagonal covariances).

        The same profiles, in any order, and the same seed give the same mixture. Components are ordered by their means.

        Args:
            profiles: (N, P), one row per training patient.
            components: K wanted; with fewer distinct profiles, as many as those.
            reg_covar, tol: as scikit-learn's; small and strict, since profiles lie within [0, 1.3].

        Raises:
            ConfigError: a setting that is not allowed.
            DataError: no profile (``no-training-patient``) or a value that is not finite (``bad-profile``).
        """
        if not isinstance(components, Integral) or components < 1:
            raise ConfigError(f"components must be a whole number from 1, not {components!r}")
        for name, value in (("reg_covar", reg_covar), ("tol", tol)):
            if not value > 0 or not np.isfinite(value):
                raise ConfigError(f"{name} must be positive, not {value}")
        profiles = np.asarray(profiles, dtype=np.float64)
        if profiles.ndim != 2 or not profiles.size:
            raise DataError(
                "no training patient: the demographic mixture cannot be fitted", reason="no-training-patient"
            )
        if not np.isfinite(profiles).all():
            raise DataError("a profile has a value that is not finite", reason="bad-profile")
        profiles = profiles[_by_column(profiles)]  # the fit depends on the order of rows; the patients have none
        distinct = len(np.unique(profiles, axis=0))
        if distinct == 1:  # scikit-learn wants two rows, but a site may have one patient
            return cls(np.ones(1), profiles[:1], np.full_like(profiles[:1], reg_covar), components)
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture

        model = GaussianMixture(
            min(components, distinct),
            covariance_type="diag",
            reg_covar=reg_covar,
            tol=tol,
            max_iter=500,
            random_state=seed % 2**32,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # kept in ``converged``
            model.fit(profiles)
        order = _by_column(model.means_)
        return cls(
            model.weights_[order], model.means_[order], model.covariances_[order], components, bool(model.converged_)
        )

    def responsibilities(self, profiles: np.ndarray) -> np.ndarray:
        """Posterior probability of each fitted component (Eq. 3) for profiles (N, P): float64 (N, K), rows sum to one.

        Raises DataError (``bad-profile``) for another width than the fitted profiles', or a value that is not finite.
        """
        profiles = np.asarray(profiles, dtype=np.float64)
        if profiles.ndim != 2 or profiles.shape[1] != self.means.shape[1]:
            raise DataError(
                f"profiles of shape {profiles.shape}: the mixture has {self.means.shape[1]} fields",
                reason="bad-profile",
            )
        if not np.isfinite(profiles).all():
            raise DataError("a profile has a value that is not finite", reason="bad-profile")
        # squares of differences, not scikit-learn's expanded product: exact for narrow components too
        difference = profiles[:, None, :] - self.means[None]
        log_density = -0.5 * (difference**2 / self.variances + np.log(2 * np.pi * self.variances)).sum(2)
        joint = log_density + np.log(np.maximum(self.weights, np.finfo(float).tiny))
        joint -= joint.max(1, keepdims=True)  # far from every component the nearest one still wins, without underflow
        q = np.exp(joint)
        return q / q.sum(1, keepdims=True)

    def assign(self, profiles: np.ndarray) -> np.ndarray:
        """``q_p``: the responsibilities padded with zeros, float32 (N, components); raises as they do."""
        q = self.responsibilities(profiles)
        padded = np.zeros((len(q), self.components), dtype=np.float32)
        padded[:, : q.shape[1]] = q
        return padded

    def state(self) -> dict[str, np.ndarray]:
        """Plain arrays, for the site state."""
        return {
            "weights": self.weights.copy(),
            "means": self.means.copy(),
            "variances": self.variances.copy(),
            "components": np.array([self.components]),
            "converged": np.array([self.converged]),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, np.ndarray]) -> DemographicMixture:
        """From :meth:`state`; DataError (``bad-mixture``) where an array is missing or does not fit."""
        missing = [name for name in ("weights", "means", "variances", "components", "converged") if name not in state]
        if missing:
            raise DataError(f"the stored mixture has no '{missing[0]}'", reason="bad-mixture")
        return cls(
            state["weights"],
            state["means"],
            state["variances"],
            int(state["components"][0]),
            bool(state["converged"][0]),
        )


def _by_column(rows: np.ndarray) -> np.ndarray:
    return np.lexsort(rows.T[::-1])
