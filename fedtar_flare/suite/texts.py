"""How the hospitals' reports differ, over time and from each other (the paper's Fig. 1), for synthetic hospitals.

Reports become tf-idf vectors of words and pairs of words. **Drift** is the cosine distance between the mean vectors of
a hospital's first visits and of its t-th visits. **Clusters** are the vectors in two dimensions (t-SNE). Only
coordinates and distances are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedtar_flare.data.cohort import Cohort
from fedtar_flare.data.splits import SPLITS
from fedtar_flare.files import read_json, write_text
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.suite.embedding import in_two_dimensions
from fedtar_flare.suite.hospitals import cohort_of, site_config
from fedtar_flare.suite.plan import Cell

POINTS = 60
"""Reports of a hospital that are drawn, at most."""
COMPONENTS = 20
"""Of the singular value decomposition before t-SNE."""


def texts_file(folder: Path, cell: Cell) -> Path:
    """Where the texts of a cell's hospitals are described, the same file for all arms."""
    about = [cell.seed, cell.variant.sites, cell.variant.outside, cell.variant.cohort]
    about += [cell.recipe.get(name) for name in ("data", "time_steps", "preset")]
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"texts-{key}.json"


def keep_texts(cell: Cell, recipe: MethodRecipe, folder: Path) -> None:
    """Describe the texts of a cell's hospitals, unless that was done or one of them is real."""
    file, names = texts_file(folder, cell), (*cell.variant.sites, *cell.variant.outside)
    if file.is_file() or any(site_config(name).source != "synthetic" for name in names):
        return
    write_text(file, json.dumps(describe({name: cohort_of(recipe, name) for name in names})))


def read_texts(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """What :func:`keep_texts` kept; None where it kept nothing."""
    file = texts_file(folder, cell)
    return read_json(file) if file.is_file() else None


def describe(cohorts: Mapping[str, Cohort]) -> dict[str, Any]:
    """``{"drift": {site: [[t, distance], ...]}, "clusters": {site: [[x, y], ...]}}`` of the hospitals' reports."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    samples = [(name, s) for name, cohort in cohorts.items() for split in SPLITS for s in cohort.samples(split)]
    where, steps = np.array([site for site, _ in samples]), np.array([s.time_step for _, s in samples])
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit_transform([s.visit.report for _, s in samples])
    drift: dict[str, list[list[float]]] = {}
    for site in cohorts:
        present = sorted(set(steps[where == site].tolist()))
        sums = {t: np.asarray(vectors[(where == site) & (steps == t)].sum(axis=0)).ravel() for t in present}
        means = {t: total / np.linalg.norm(total) for t, total in sums.items()}
        if 1 in means:
            drift[site] = [[t, round(max(0.0, 1 - float(means[1] @ means[t])), 4)] for t in sorted(means)]
    drawn = np.concatenate([np.flatnonzero(where == site)[:POINTS] for site in cohorts])
    few = min(COMPONENTS, len(drawn) - 1, vectors.shape[1] - 1)
    places = in_two_dimensions(TruncatedSVD(few, random_state=0).fit_transform(vectors[drawn]))
    clusters = {site: np.round(places[where[drawn] == site], 2).tolist() for site in cohorts}
    return {"drift": drift, "clusters": clusters}
