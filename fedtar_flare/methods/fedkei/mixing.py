"""The mathematics of mixtures (Eq. 3 to 11): clusters and weights of modules, inner steps, hypergradient, outer step.

A module is the adapter and the head that one site learnt in one task. Adapter and head are two kinds, mixed
independently: each has its own matrix M (d, N) of N modules as columns, its own weights ``beta`` (N, K) within K
clusters, and at each site its own weights ``alpha`` (K,) between clusters::

    C = o + (M - o) beta          o: the origin, 0 as in the paper (1 for factors of IA3)
    theta = o + (C - o) alpha

The functions below take matrices less the origin. With batches s = 0..S-1 at a site::

    alpha_{s+1} = alpha_s - eta_in C^T g_s        g_s = grad L_s(C alpha_s)
    G = (d theta' / d C)^T v                      theta' = C alpha_S,  v = grad L(theta')

The loss couples adapter and head (C is block-diagonal); gradients are by kind.

Modules are clustered through their inner products (N, N): N points span at most N - 1 dimensions, so coordinates (N, N)
with exactly their distances follow, and k-means on them is k-means on the modules, however large d is.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtar_flare.core.errors import ExchangeError

Kind = Literal["adapter", "head"]
Vectors = Mapping[Kind, Tensor]
"""By kind: a vector (d,), a matrix (d, K) or weights (K,)."""
KINDS: tuple[Kind, ...] = ("adapter", "head")
BETA_LIMIT = 1.0
"""Largest Euclidean distance of a column of beta from its initial value after the outer step."""
_RESTARTS = 10  # of k-means++; the best result is taken
_EQUAL = 1e-12  # relative to the largest squared norm: squared distances below it are rounding


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a module's tensors, sorted by name: how they are laid out in one vector of each kind."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """The layout of a module, given its tensors."""
        return cls(tuple(sorted((name, tuple(value.shape)) for name, value in tensors.items())))

    def parts(self, kind: Kind) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors of one kind; names of the head's begin with ``head.``."""
        return [(name, shape) for name, shape in self.shapes if name.startswith("head.") == (kind == "head")]

    def vectors(self, tensors: Mapping[str, Tensor]) -> dict[Kind, Tensor]:
        """A module as one vector (d,) of each kind."""
        return {kind: columns[:, 0] for kind, columns in self.columns({n: v[None] for n, v in tensors.items()}).items()}

    def columns(self, stacked: Mapping[str, Tensor]) -> dict[Kind, Tensor]:
        """Tensors (K, *shape) as one matrix (d, K) of each kind; :class:`ExchangeError` names one that does not fit."""
        for name in sorted(stacked.keys() ^ dict(self.shapes).keys()):
            raise ExchangeError(f"tensor '{name}' is {'unknown' if name in stacked else 'missing'} in a mixture")
        matrices: dict[Kind, Tensor] = {}
        for kind in KINDS:
            parts = self.parts(kind)
            leading = stacked[parts[0][0]].shape[:1]
            for name, shape in parts:
                if stacked[name].shape != (*leading, *shape) or not leading or not leading[0]:
                    have = tuple(stacked[name].shape)
                    raise ExchangeError(f"tensor '{name}' has shape {have}, not {('K', *shape)} as all of the {kind}")
            matrices[kind] = torch.cat([stacked[name].flatten(1) for name, _ in parts], dim=1).T
        return matrices

    def stacked(self, columns: Vectors) -> dict[str, Tensor]:
        """Tensors (K, *shape) by name of one matrix (d, K) of each kind; undoes :meth:`columns`."""
        tensors = {}
        for kind in KINDS:
            parts, rows = self.parts(kind), columns[kind].T
            sizes = [torch.Size(shape).numel() for _, shape in parts]
            for (name, shape), values in zip(parts, rows.split(sizes, dim=1), strict=True):
                tensors[name] = values.reshape(len(rows), *shape)
        return dict(sorted(tensors.items()))

    def tensors(self, vectors: Vectors) -> dict[str, Tensor]:
        """A module's tensors, given one vector (d,) of each kind; undoes :meth:`vectors`."""
        return {name: value[0] for name, value in self.stacked({k: v[:, None] for k, v in vectors.items()}).items()}


def origin_of(start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The point o that mixtures are taken around: 0, but the start (1) for factors of IA3."""
    return {name: value if name.endswith("ia3_l") else torch.zeros_like(value) for name, value in start.items()}


# ---------------------------------------------------------------------- at the server
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
    """Cluster of each of N points with these inner products (N, N): k-means++; equal points share one."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    first: list[int] = (squared_distances(inner) == 0).int().argmax(1).tolist()  # the earliest point that is equal
    points = sorted(set(first))
    if len(points) <= clusters:
        return _renumbered(first)
    weights = np.bincount(first, minlength=len(first))[points]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = KMeans(clusters, n_init=_RESTARTS, random_state=0).fit(
            coordinates(inner)[points].numpy(), sample_weight=weights
        )
    labels = dict(zip(points, fitted.labels_.tolist(), strict=True))
    return _renumbered([labels[point] for point in first])


def _renumbered(labels: Sequence[int]) -> list[int]:
    """The same clusters, numbered 0, 1, ... by their earliest members."""
    order: dict[int, int] = {}
    return [order.setdefault(label, len(order)) for label in labels]


def merge_small(assignment: Sequence[int], sites: Sequence[str], inner: Tensor, least: int) -> list[int]:
    """Merge the cluster of the fewest sites with that of the nearest mean, until all have ``least`` or one is left."""
    labels = _renumbered(assignment)
    while True:
        members = [{s for s, label in zip(sites, labels, strict=True) if label == k} for k in sorted(set(labels))]
        small = min(range(len(members)), key=lambda k: len(members[k]))
        if len(members[small]) >= least or len(members) == 1:
            return labels
        means = initial_beta(labels)
        distances = squared_distances(means.T @ inner @ means)[small]
        distances[small] = torch.inf
        nearest = int(distances.argmin())
        labels = _renumbered([nearest if label == small else label for label in labels])


def initial_beta(assignment: Sequence[int]) -> Tensor:
    """``beta0 = Z diag(1 / n_k)`` (N, K), float64, given each module's cluster (Eq. 3; we read it as a mean)."""
    members = torch.nn.functional.one_hot(torch.as_tensor(assignment)).double()
    return members / members.sum(0)


def mix(matrix: Tensor, weights: Tensor) -> Tensor:
    """``C = M beta`` (d, K) (Eq. 4), summed in float64, in the matrix's dtype."""
    return (matrix.double() @ weights.double()).to(matrix.dtype)


def outer_step(
    beta0: Tensor, matrix: Tensor, gradient: Tensor, eta_out: float, limit: float = BETA_LIMIT
) -> tuple[Tensor, Tensor]:
    """``beta' = beta0 - eta_out mask * (M^T G)`` (Eq. 8); only weights within a module's own cluster move.

    Returns beta' (N, K), and the distance (K,) of each column from beta0 before it is limited.
    """
    moved = beta0 - eta_out * ((beta0 > 0) * (matrix.double().T @ gradient.double()))
    change = moved - beta0
    distance = change.norm(dim=0)
    over = distance > limit
    return torch.where(over, beta0 + change * (limit / distance.clamp(min=limit)), moved), distance


# ---------------------------------------------------------------------- at a site
def inner_steps(
    centres: Vectors, alpha: Vectors, gradient: Callable[[int, Vectors], Vectors], steps: int, eta_in: float
) -> tuple[Vectors, Vectors]:
    """``steps`` steps of Eq. 6 on centres (d, K), given g_s (d,) of (s, theta - o); returns alpha_S, sum of g_s."""
    total = {kind: torch.zeros_like(c[:, 0]) for kind, c in centres.items()}
    for s in range(steps):
        g = gradient(s, combined(centres, alpha))
        alpha = {kind: alpha[kind] - eta_in * (c.T @ g[kind]) for kind, c in centres.items()}
        for kind in centres:
            total[kind] += g[kind]
    return alpha, total


def combined(centres: Vectors, alpha: Vectors) -> dict[Kind, Tensor]:
    """``theta = C alpha`` (Eq. 5), with the origin subtracted."""
    return {kind: c @ alpha[kind] for kind, c in centres.items()}


def first_order(
    centres: Vectors, alpha: Vectors, gradient_sum: Vectors, v: Vectors, eta_in: float
) -> dict[Kind, Tensor]:
    """Eq. 9 without second derivatives: ``G = v alpha'^T - eta_in (sum_s g_s)(C^T v)^T``, (d, K)."""
    return {
        kind: torch.outer(v[kind], alpha[kind]) - eta_in * torch.outer(gradient_sum[kind], c.T @ v[kind])
        for kind, c in centres.items()
    }
