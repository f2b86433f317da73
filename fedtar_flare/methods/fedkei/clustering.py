"""Clusters of modules: k-means++ on their distances, without ever building a matrix wider than the pool.

N points span at most N - 1 dimensions, so coordinates (N, N) with exactly their distances follow from the N x N Gram
matrix; k-means on them is k-means on the modules, whatever d is.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

RESTARTS = 10
"""Starts of k-means++, of which the best result is taken."""
_EQUAL = 1e-12  # relative to the largest squared norm: squared distances below it are rounding


def gram(matrix: Tensor) -> Tensor:
    """Inner products (N, N), float64, of the columns of (d, N) less their mean, which keeps distances exact."""
    centred = matrix.double()
    centred = centred - centred.mean(1, keepdim=True)
    return centred.T @ centred


def squared_distances(inner: Tensor) -> Tensor:
    """Squared distances (N, N) of points with these inner products; rounding is set to 0."""
    norms = inner.diagonal()
    squares = norms[:, None] + norms[None, :] - 2 * inner
    return torch.where(squares > _EQUAL * norms.abs().max().clamp(min=1e-300), squares, torch.zeros_like(squares))


def coordinates(inner: Tensor) -> Tensor:
    """Points (N, N) with these inner products, float64."""
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    return vectors * values.clamp(min=0).sqrt()


def kmeans(inner: Tensor, clusters: int) -> list[int]:
    """Assign N points with these inner products (N, N) to at most ``clusters`` clusters, always the same: k-means++.

    Equal points share a cluster. Returns each point's cluster; clusters are numbered from 0 by their earliest members.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    first = distinct(inner)
    points = sorted(set(first))
    if len(points) <= clusters:
        return renumbered(first)
    weights = np.bincount(first, minlength=len(first))[points]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = KMeans(clusters, n_init=RESTARTS, random_state=0).fit(
            coordinates(inner)[points].numpy(), sample_weight=weights
        )
    labels = dict(zip(points, fitted.labels_.tolist(), strict=True))
    return renumbered([labels[point] for point in first])


def distinct(inner: Tensor) -> list[int]:
    """For each of N points with these inner products (N, N), the index of the earliest point that equals it."""
    return (squared_distances(inner) == 0).int().argmax(1).tolist()


def renumbered(labels: Sequence[int]) -> list[int]:
    """The same clusters, numbered 0, 1, ... by their earliest members."""
    order: dict[int, int] = {}
    return [order.setdefault(label, len(order)) for label in labels]


def merge_small(assignment: Sequence[int], sites: Sequence[str], inner: Tensor, least: int) -> list[int]:
    """Merge each cluster of fewer than ``least`` distinct sites with the one whose mean is nearest.

    The cluster of the fewest sites goes first (the earliest of several), until all are large enough, or one is left.
    """
    labels = renumbered(assignment)
    while True:
        members = [{s for s, label in zip(sites, labels, strict=True) if label == k} for k in sorted(set(labels))]
        small = min(range(len(members)), key=lambda k: len(members[k]))
        if len(members[small]) >= least or len(members) == 1:
            return labels
        means = torch.nn.functional.one_hot(torch.tensor(labels)).double()
        means = means / means.sum(0)
        distances = squared_distances(means.T @ inner @ means)[small]
        distances[small] = torch.inf
        nearest = int(distances.argmin())
        labels = renumbered([nearest if label == small else label for label in labels])
