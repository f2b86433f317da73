"""Demographic profiles and their soft clusters (FedTAR, Eq. 2 and 3).

A client process assigns in every task but fits once per run, and importing scikit-learn costs seconds: only the fit
uses it, and the responsibilities are computed here, exactly, in numpy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from fedtar_flare.errors import DataError
from fedtar_flare.methods.fedtar.config import PROFILES

UNKNOWN_SEX = 0.5
UNKNOWN_AGE = 0.5
"""Stands for age / 100 where no training patient of the site has a known age."""
REG_COVAR = TOLERANCE = 1e-6
"""Of scikit-learn's fit: small and strict, since profiles lie within [0, 1.3]."""


def profile_vector(
    identity: float, age: float | None, sex: str | None, median_age: float | None, wanted: Sequence[str] = PROFILES[0]
) -> np.ndarray:
    """``v_p = [hash(id), age / 100, sex]`` (Eq. 2), float64, or those of its fields that are ``wanted``.

    Parameters
    ----------
    identity : float
        Keyed hash of the identifier, in [0, 1].
    age : float or None
        Years at the visit; None takes ``median_age``.
    sex : str or None
        ``F`` is 0, ``M`` is 1, anything else 0.5.
    median_age : float or None
        Of the site's training patients; None when no age is known.
    wanted : sequence of str
        One of :data:`PROFILES`.

    Raises
    ------
    DataError
        An age outside 0 to 130 years (``age-out-of-range``).

    References
    ----------
    FedTAR, Eq. 2.
    """
    age = median_age if age is None else age
    if age is not None and not 0 <= age <= 130:
        raise DataError(f"age {age} is not within 0 to 130 years", reason="age-out-of-range")
    values = {
        "hash": identity,
        "age": UNKNOWN_AGE if age is None else age / 100,
        "sex": {"F": 0.0, "M": 1.0}.get(sex or "", UNKNOWN_SEX),
    }
    return np.array([values[field] for field in wanted])


@dataclass(frozen=True, eq=False)
class DemographicMixture:
    """A Gaussian mixture with diagonal covariances over profiles; stays at the site.

    Args:
        weights: (K,) of the fitted components, K <= ``components``, not negative, sum one.
        means: (K, P).
        variances: (K, P), positive.
        components: length of q; q is padded with zeros beyond K.
        converged: False when the fit stopped before its tolerance was met.
        short: True when there were fewer distinct profiles than components to fit.
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
        """Fit by expectation maximisation (scikit-learn's ``GaussianMixture``, diagonal covariances).

        The same profiles, in any order, and the same seed give the same mixture. Components are ordered by their means.

        Parameters
        ----------
        profiles : array (N, P), float64
            One row per training patient, at least one.
        components : int, default 16
            Length of q.
        fitted : int, optional
            K wanted, at most ``components``, which None stands for; with fewer distinct profiles, as many as those.
        seed : int, default 0
            Of scikit-learn's start.

        References
        ----------
        FedTAR, Eq. 3.
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
        """``q_p``: the responsibilities padded with zeros, float32 (N, components)."""
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
        components, converged = int(state["components"][0]), bool(state["converged"][0])
        short = bool(state["short"][0]) if "short" in state else False  # states of older releases lack it
        return cls(state["weights"], state["means"], state["variances"], components, converged, short)


def _by_column(rows: np.ndarray) -> np.ndarray:
    return np.lexsort(rows.T[::-1])
