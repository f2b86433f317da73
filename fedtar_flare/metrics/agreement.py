"""Agreement of readers beyond chance.

References
----------
Cohen, Educational and Psychological Measurement 1960; Fleiss, Psychological Bulletin 1971.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedtar_flare.metrics.significance import Array, PatientSums, patient_sums


def kappa(patients: Sequence[Any], codes: ArrayLike, kinds: int) -> PatientSums:
    """Cohen's kappa of two readers, Fleiss's of more, as sums of patients, so that it has an interval over them.

    ``codes`` (N, R) are what R >= 2 readers said of N items, whole numbers below ``kinds``; ``patients`` (N,) says
    whose each item is. It is nan where all readers said one and the same of everything.
    """
    said = np.eye(kinds)[np.asarray(codes, dtype=int)]  # (N, R, kinds)
    items, readers, _ = said.shape
    same = said.sum(axis=1)
    agreed = (same * (same - 1)).sum(axis=1) / (readers * (readers - 1))

    def score(sums: Array) -> Array:
        count = np.maximum(sums[:, 1], 1)
        shares = sums[:, 2:].reshape(-1, readers, kinds) / count[:, None, None]
        pooled = shares.mean(axis=1)
        expected = (shares[:, 0] * shares[:, 1] if readers == 2 else pooled**2).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(expected < 1 - 1e-12, (sums[:, 0] / count - expected) / (1 - expected), np.nan)

    columns = [agreed[:, None], np.ones((items, 1)), said.reshape(items, -1)]
    return patient_sums(patients, np.concatenate(columns, axis=1), score)
