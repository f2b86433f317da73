"""The mixture that the server makes for one task: clusters, their weights, and the centres that go down."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedtar_flare.methods.fedkei.clustering import coordinates, gram, kmeans, merge_small, squared_distances
from fedtar_flare.methods.fedkei.config import FedKEIConfig
from fedtar_flare.methods.fedkei.mixing import KINDS, Kind, initial_beta, mix, outer_step
from fedtar_flare.methods.fedkei.plans import Plan
from fedtar_flare.methods.fedkei.pool import Module, Pool
from fedtar_flare.reporting.tsne import FEWEST, tsne


@dataclass(frozen=True)
class Part:
    """The mixture of one kind: M (d, N) minus its origin (d, 1), beta and beta0 (N, K), float64.

    ``assignment``: each module's cluster; ``distance`` (K,): of beta from beta0 after an outer step, before the limit.
    """

    modules: tuple[Module, ...]
    assignment: tuple[int, ...]
    matrix: Tensor
    beta: Tensor
    beta0: Tensor
    origin: Tensor
    distance: Tensor | None = None

    @classmethod
    def of(cls, pool: Pool, kind: Kind, modules: Sequence[Module], assignment: Sequence[int]) -> "Part":
        """The means of clusters (Eq. 3)."""
        beta0 = initial_beta(assignment)
        return cls(tuple(modules), tuple(assignment), pool.matrix(kind, modules), beta0, beta0, pool.origin(kind))

    def weighted(self, beta: Tensor) -> "Part":
        """The same modules with other weights (N, K)."""
        return replace(self, beta=beta, beta0=beta)


Parts = Mapping[Kind, Part]


@dataclass(frozen=True)
class Mixture:
    """What the server mixes for a task.

    Without ``parts`` it is the common start. ``by_site``: the mixtures of plans that mix for each site, by site; a site
    that is not in it gets ``parts``. ``probes``: whether PROBE comes before ADAPT; ``seconds``: of clustering.
    """

    pool: Pool
    parts: Parts | None
    by_site: Mapping[str, Parts] = field(default_factory=dict)
    probes: bool = False
    seconds: float = 0.0

    def centres(self, site: str | None = None) -> dict[str, Tensor]:
        """C (K, *shape) by tensor name (Eq. 4), float32, for a site (None: for all); each kind has its own K."""
        parts = self.parts if site is None else self.by_site.get(site, self.parts)
        if parts is None:
            return {name: value[None].clone() for name, value in self.pool.start.items()}
        return self.pool.layout.stacked({kind: p.origin + mix(p.matrix, p.beta) for kind, p in parts.items()})

    def step(self, gradients: Mapping[str, Tensor], eta_out: float) -> "Mixture":
        """The mixture after the outer step (Eq. 8), given G (K, *shape) by name, summed over the sites."""
        if self.parts is None:
            return self
        columns, moved = self.pool.layout.columns(gradients), {}
        for kind, part in self.parts.items():
            beta, distance = outer_step(part.beta0, part.matrix, columns[kind], eta_out)
            moved[kind] = replace(part, beta=beta, distance=distance)
        return replace(self, parts=moved)

    def report(self) -> list[dict[str, Any]]:
        """Per kind and cluster, as JSON primitives, for the record::

            {"kind": "adapter", "cluster": 0, "for": None or the site that it is mixed for, "distance": 0.02 or None,
             "members": [{"site": "site-1", "task": 1, "beta": 0.5, "beta0": 0.5}, ...]}

        ``members`` are the cluster's and all others with a weight in it. Empty for the common start.
        """
        mixed: dict[str | None, Parts] = {} if self.parts is None or self.by_site else {None: self.parts}
        mixed.update(self.by_site.items())
        return [
            {
                "kind": kind,
                "cluster": k,
                "for": site,
                "distance": None if part.distance is None else float(part.distance[k]),
                "members": [
                    {"site": m.site, "task": m.task, "beta": float(part.beta[n, k]), "beta0": float(part.beta0[n, k])}
                    for n, m in enumerate(part.modules)
                    if part.assignment[n] == k or part.beta[n, k] != 0
                ],
            }
            for site, parts in mixed.items()
            for kind, part in parts.items()
            for k in range(part.beta.shape[1])
        ]

    def plane(self) -> dict[str, list[dict[str, Any]]]:
        """By kind, modules in the plane by t-SNE of their distances: ``{"site", "task", "cluster", "x", "y"}`` each.

        Empty for the common start, and for fewer modules than t-SNE needs.
        """
        return {
            kind: [
                {"site": m.site, "task": m.task, "cluster": k, "x": round(float(x), 3), "y": round(float(y), 3)}
                for m, k, (x, y) in zip(p.modules, p.assignment, tsne(coordinates(gram(p.matrix)).numpy()), strict=True)
            ]
            for kind, p in (self.parts or {}).items()
            if len(p.modules) >= FEWEST
        }


def mixture_of(plan: Plan, pool: Pool, task: int, settings: FedKEIConfig) -> Mixture:
    """A plan's mixture for a task (counted from 1), of modules of the tasks before it.

    It is the common start where there is no such module, or where all of them together come from fewer sites than a
    cluster must have.
    """
    began = time.monotonic()
    modules = {"none": (), "all": pool.before(task)}.get(plan.members, pool.last(task))
    sites = [module.site for module in modules]
    if plan.members == "own":
        # only the site itself gets its module, so that no minimum of sites applies
        return Mixture(
            pool, None, by_site={m.site: {kind: Part.of(pool, kind, (m,), [0]) for kind in KINDS} for m in modules}
        )
    if len(set(sites)) < settings.min_cluster_sites or not modules:
        return Mixture(pool, None)
    inner = {kind: gram(pool.matrix(kind, modules)) for kind in KINDS}
    parts: dict[Kind, Part] = {}
    for kind, products in inner.items():
        labels = merge_small(
            _clusters(plan, sites, products, settings.clusters), sites, products, settings.min_cluster_sites
        )
        parts[kind] = Part.of(pool, kind, modules, labels)
    own: dict[str, Parts] = {}
    if plan.weights == "similarity":
        for n, site in enumerate(sites):
            own[site] = {kind: part.weighted(similarity(inner[kind], n)) for kind, part in parts.items()}
    elif plan.weights == "gaps":
        weights = gap_weights(pool, modules, task)
        parts = {kind: part.weighted(weights) for kind, part in parts.items()}
    probes = plan.probe != "none" and settings.eta_out > 0
    return Mixture(pool, parts, own, probes, time.monotonic() - began)


def _clusters(plan: Plan, sites: Sequence[str], inner: Tensor, clusters: int) -> list[int]:
    if plan.groups == "kmeans":
        return kmeans(inner, clusters)
    if plan.groups == "site":
        return [sorted(set(sites)).index(site) for site in sites]
    return list(range(len(sites))) if plan.groups == "each" else [0] * len(sites)


def similarity(inner: Tensor, index: int) -> Tensor:
    """FedAMP's weights (N, 1), float64, of N modules for the module at this index; nearer modules weigh more.

    ``xi_j = exp(-d_j^2 / sigma) / N`` for the others, the rest for its own module. sigma is the mean squared distance
    of two modules (our choice: free of scale).
    """
    squares = squared_distances(inner)
    n = len(squares)
    sigma = squares.sum() / max(n * (n - 1), 1)
    weights = torch.exp(-squares[index] / sigma.clamp(min=1e-300)) / n
    weights[index] = 0
    weights[index] = 1 - weights.sum()
    return weights[:, None]


def gap_weights(pool: Pool, modules: Sequence[Module], task: int) -> Tensor:
    """FedGA's weights (N, 1), float64, of the latest modules; sites with a larger generalisation gap weigh more.

    Task after task, ``a_i += d (g_i - mean g) / max_j |g_j - mean g|`` with the gaps g of the sites that sent theirs
    and d = 1 / (2 N) (our choice); no weight falls below 0.1 / N; then all are divided by their sum.
    """
    weights = {module.site: 1 / len(modules) for module in modules}
    for past in sorted({module.task for module in pool.before(task)}):
        gaps = {m.site: m.gap for m in pool.before(task) if m.task == past and m.gap is not None and m.site in weights}
        mean = sum(gaps.values()) / max(len(gaps), 1)
        most = max((abs(gap - mean) for gap in gaps.values()), default=0.0)
        for site, gap in gaps.items():
            if most > 0:
                weights[site] = max(0.1 / len(modules), weights[site] + (gap - mean) / most / (2 * len(modules)))
        total = sum(weights.values())
        weights = {site: weight / total for site, weight in weights.items()}
    return torch.tensor([weights[module.site] for module in modules], dtype=torch.float64)[:, None]
