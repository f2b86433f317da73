"""Patients' embeddings in two dimensions (the paper's Fig. 3b), made at the site from its own patients.

Only a synthetic hospital's are made: a point is a patient, and real ones stay where they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedtar_flare.data.cohort import Sample
from fedtar_flare.fedtar.demographics import DemographicMixture
from fedtar_flare.fedtar.executor import PatientExecutor
from fedtar_flare.fedtar.profiles import memberships
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.site.state import SiteState
from fedtar_flare.suite.hospitals import cohort_of, site_config

FEWEST = 5
"""Patients that a picture needs."""


def embedding(recipe: MethodRecipe, site: str, state: SiteState, after: str) -> list[dict[str, Any]]:
    """t-SNE of ``phi = W_proj q + b_proj`` of a site's patients, without their time step.

    Args:
        after: the version of the site's state, or the newest before it.

    Returns:
        ``site``, ``x``, ``y``, ``age`` (at the first visit; None where unknown) and ``sex`` of each patient; empty
        without a patient part, where all patients share one q (a mixture of one component has no other), and for real
        data.
    """
    executor = recipe.executor
    newest = state.latest(after)
    if not isinstance(executor, PatientExecutor) or newest is None or site_config(site).source != "synthetic":
        return []
    if not executor.patient_config.enabled or executor.patient_config.constant_q:
        return []
    cohort = cohort_of(recipe, site)
    samples = _first_visits([s for split in ("train", "validation", "test") for s in cohort.samples(split)])
    if len(samples) < FEWEST:
        return []
    arrays, info = state.read("mixture")
    mixture = DemographicMixture.from_state({name: value.numpy() for name, value in arrays.items()})
    private = state.read(newest)[0]
    q = memberships(samples, mixture, cohort.key, info["median_age"], executor.patient_config.profile)
    phi = torch.nn.functional.linear(q, private["patient/projection.weight"], private["patient/projection.bias"])
    if torch.allclose(phi, phi[:1].expand_as(phi)):
        return []
    return [
        {"site": site, "x": round(float(x), 3), "y": round(float(y), 3), "age": s.visit.age, "sex": s.sex}
        for s, (x, y) in zip(samples, in_two_dimensions(phi.numpy()), strict=True)
    ]


def in_two_dimensions(points: np.ndarray) -> np.ndarray:
    """t-SNE of N points, (N, 2); the same points give the same picture."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    return TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(points.astype(np.float64))


def _first_visits(samples: list[Sample]) -> list[Sample]:
    first: dict[str, Sample] = {}
    for sample in sorted(samples, key=lambda s: s.visit.acquired):
        first.setdefault(sample.visit.patient_id, sample)
    return list(first.values())
