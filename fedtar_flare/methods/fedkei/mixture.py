"""The server's pool of modules, and the mixture that it makes of them for a task: clusters, weights, centres."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.files import without_prefix
from fedtar_flare.methods.fedkei import mixing
from fedtar_flare.methods.fedkei.config import FedKEIConfig, Plan
from fedtar_flare.methods.fedkei.contract import IMPORTANCE, PULL
from fedtar_flare.methods.fedkei.mixing import KINDS, Kind, Layout
from fedtar_flare.reporting.plots import FEWEST, tsne


# ---------------------------------------------------------------------- the pool
@dataclass(frozen=True)
class Module:
    """theta that a site learnt in a task (counted from 1), as tensors by name."""

    site: str
    task: int
    tensors: Mapping[str, Tensor]
    gap: float | None = None
    """How much tuning lowered the validation loss, where the site reports it."""
    importance: Mapping[str, Tensor] = field(default_factory=dict)
    """Fisher information by tensor name, where the plan uses it."""


class Pool:
    """Modules of all sites, by task and site, whenever they arrived; ``start`` is w0, float32 by name."""

    def __init__(self, start: Mapping[str, Tensor]):
        self.start = {name: start[name].detach().cpu().clone() for name in sorted(start)}
        self.layout = Layout.of(self.start)
        self._modules: dict[tuple[int, str], Module] = {}

    @property
    def modules(self) -> tuple[Module, ...]:
        """All modules, by task and site."""
        return tuple(self._modules[key] for key in sorted(self._modules))

    def add(self, site: str, task: int, sent: Mapping[str, Tensor], gap: float | None = None) -> None:
        """Add the module that ADAPT ``sent``, in place of the site's earlier one; refuses a negative importance."""
        importance = without_prefix(sent, IMPORTANCE)
        for name, value in sorted(importance.items()):
            if (value < 0).any():
                raise ExchangeError(f"the importance of tensor '{name}' has negative values")
        theta = {name: value + sent[name] for name, value in self.start.items()}
        self._modules[task, site] = Module(site, task, theta, gap, importance)

    def leave(self, site: str) -> int:
        """Remove all modules of a site; returns their number."""
        keys = [key for key in self._modules if key[1] == site]
        for key in keys:
            del self._modules[key]
        return len(keys)

    def before(self, task: int) -> tuple[Module, ...]:
        """Modules of tasks before this one."""
        return tuple(module for module in self.modules if module.task < task)

    def last(self, task: int) -> tuple[Module, ...]:
        """Each site's latest module before this task, by site."""
        latest = {module.site: module for module in self.before(task)}
        return tuple(latest[site] for site in sorted(latest))

    def curvature(self, task: int) -> dict[str, Tensor]:
        """FedCurv's ``sum_j F_j`` and ``sum_j F_j theta_j`` over all sites' latest modules, each (1, *shape)."""
        prefixes = (IMPORTANCE, PULL)
        sums = {f"{prefix}{name}": torch.zeros_like(v) for prefix in prefixes for name, v in self.start.items()}
        for module in self.last(task):
            for name, value in module.importance.items():
                sums[f"{IMPORTANCE}{name}"] += value
                sums[f"{PULL}{name}"] += value * module.tensors[name]
        return {name: value[None] for name, value in sums.items()}

    def matrix(self, kind: Kind, modules: Sequence[Module]) -> Tensor:
        """M (d, N), float32: these modules of one kind as columns, minus the origin."""
        return torch.stack([self.layout.vectors(m.tensors)[kind] for m in modules], dim=1) - self.origin(kind)

    def origin(self, kind: Kind) -> Tensor:
        """The origin as a column (d, 1)."""
        return self.layout.vectors(mixing.origin_of(self.start))[kind][:, None]

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Tensors ``<n>.<name>`` and ``<n>.importance.<name>`` of each module n; its site, task and gap as JSON."""
        tensors: dict[str, Tensor] = {}
        for n, module in enumerate(self.modules):
            tensors |= {f"{n}.{name}": value for name, value in module.tensors.items()}
            tensors |= {f"{n}.{IMPORTANCE}{name}": value for name, value in module.importance.items()}
        return tensors, [{"site": m.site, "task": m.task, "gap": m.gap} for m in self.modules]

    def load(self, tensors: Mapping[str, Tensor], info: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state` gave."""
        self._modules = {}
        for n, about in enumerate(info):
            state = without_prefix(tensors, f"{n}.")
            theta, importance = {name: state[name] for name in self.start}, without_prefix(state, IMPORTANCE)
            self._modules[about["task"], about["site"]] = Module(tensors=theta, importance=importance, **about)


# ---------------------------------------------------------------------- the mixture
@dataclass(frozen=True)
class Part:
    """The mixture of one kind: M (d, N) less its origin, beta and beta0 (N, K), the modules' clusters, betas' moves."""

    modules: tuple[Module, ...]
    assignment: tuple[int, ...]
    matrix: Tensor
    beta: Tensor
    beta0: Tensor
    origin: Tensor
    distance: Tensor | None = None

    def weighted(self, beta: Tensor) -> "Part":
        """The same modules with other weights (N, K)."""
        return replace(self, beta=beta, beta0=beta)


Parts = Mapping[Kind, Part]


@dataclass(frozen=True)
class Mixture:
    """What the server mixes for a task; without ``parts`` it is the common start."""

    pool: Pool
    parts: Parts | None
    by_site: Mapping[str, Parts] = field(default_factory=dict)
    """The mixtures of plans that mix for each site; a site that is not in it gets ``parts``."""
    probes: bool = False
    """Whether PROBE comes before ADAPT."""
    seconds: float = 0.0
    """Time of clustering."""

    def centres(self, site: str | None = None) -> dict[str, Tensor]:
        """C (K, *shape) by tensor name (Eq. 4), float32, for a site (None: for all); each kind has its own K."""
        parts = self.parts if site is None else self.by_site.get(site, self.parts)
        if parts is None:
            return {name: value[None].clone() for name, value in self.pool.start.items()}
        return self.pool.layout.stacked({kind: p.origin + mixing.mix(p.matrix, p.beta) for kind, p in parts.items()})

    def step(self, gradients: Mapping[str, Tensor], eta_out: float) -> "Mixture":
        """The mixture after the outer step (Eq. 8), given G (K, *shape) by name, summed over the sites."""
        if self.parts is None:
            return self
        columns, moved = self.pool.layout.columns(gradients), {}
        for kind, part in self.parts.items():
            beta, distance = mixing.outer_step(part.beta0, part.matrix, columns[kind], eta_out)
            moved[kind] = replace(part, beta=beta, distance=distance)
        return replace(self, parts=moved)

    def report(self) -> list[dict[str, Any]]:
        """Each kind's clusters with their members and all others with a weight in them, for the record::

        {"kind": "adapter", "cluster": 0, "for": None or the site that it is mixed for, "distance": 0.02 or None,
         "members": [{"site": "site-1", "task": 1, "beta": 0.5, "beta0": 0.5}, ...]}
        """
        mixed: dict[str | None, Parts] = {} if self.parts is None or self.by_site else {None: self.parts}
        mixed.update(self.by_site.items())
        clusters = []
        for site, parts in mixed.items():
            for kind, part in parts.items():
                for k in range(part.beta.shape[1]):
                    members = [
                        {"site": m.site, "task": m.task, "beta": float(beta), "beta0": float(beta0)}
                        for m, label, beta, beta0 in zip(
                            part.modules, part.assignment, part.beta[:, k], part.beta0[:, k], strict=True
                        )
                        if label == k or beta != 0
                    ]
                    distance = None if part.distance is None else float(part.distance[k])
                    about = {"kind": kind, "cluster": k, "for": site, "distance": distance}
                    clusters.append(about | {"members": members})
        return clusters

    def plane(self) -> dict[str, list[dict[str, Any]]]:
        """By kind, modules in the plane by t-SNE of their distances, where there are as many as it needs."""
        drawn = {}
        for kind, part in (self.parts or {}).items():
            if len(part.modules) < FEWEST:
                continue
            points = tsne(mixing.coordinates(mixing.gram(part.matrix)).numpy())
            drawn[str(kind)] = [
                {"site": m.site, "task": m.task, "cluster": k, "x": round(float(x), 3), "y": round(float(y), 3)}
                for m, k, (x, y) in zip(part.modules, part.assignment, points, strict=True)
            ]
        return drawn


def mixture_of(plan: Plan, pool: Pool, task: int, settings: FedKEIConfig) -> Mixture:
    """A plan's mixture for a task, of earlier tasks' modules; the common start where these are of too few sites."""
    began = time.monotonic()
    modules = {"none": (), "all": pool.before(task)}.get(plan.members, pool.last(task))
    sites = [module.site for module in modules]
    if len(set(sites)) < settings.min_cluster_sites or not modules:
        return Mixture(pool, None)
    inner = {kind: mixing.gram(pool.matrix(kind, modules)) for kind in KINDS}
    parts: dict[Kind, Part] = {}
    for kind, products in inner.items():
        labels = [0] * len(sites)
        if plan.groups == "kmeans":
            labels = mixing.kmeans(products, settings.clusters)
        elif plan.groups == "site":
            labels = [sorted(set(sites)).index(site) for site in sites]
        elif plan.groups == "each":
            labels = list(range(len(sites)))
        labels = mixing.merge_small(labels, sites, products, settings.min_cluster_sites)
        beta0 = mixing.initial_beta(labels)  # the means of the clusters (Eq. 3)
        parts[kind] = Part(modules, tuple(labels), pool.matrix(kind, modules), beta0, beta0, pool.origin(kind))
    by_site: dict[str, Parts] = {}
    if plan.weights == "similarity":
        for n, site in enumerate(sites):
            by_site[site] = {kind: part.weighted(similarity(inner[kind], n)) for kind, part in parts.items()}
    elif plan.weights == "gaps":
        weights = gap_weights(pool, modules, task)
        parts = {kind: part.weighted(weights) for kind, part in parts.items()}
    probes = plan.probe != "none" and settings.eta_out > 0
    return Mixture(pool, parts, by_site, probes, time.monotonic() - began)


def similarity(inner: Tensor, i: int) -> Tensor:
    """FedAMP's weights (N, 1) for module i: ``xi_j = exp(-d_j^2 / sigma) / N``, sigma the mean squared distance."""
    squares = mixing.squared_distances(inner)
    n = len(squares)
    sigma = squares.sum() / max(n * (n - 1), 1)
    weights = torch.exp(-squares[i] / sigma.clamp(min=1e-300)) / n
    weights[i] = 0
    weights[i] = 1 - weights.sum()
    return weights[:, None]


def gap_weights(pool: Pool, modules: Sequence[Module], task: int) -> Tensor:
    """FedGA's weights (N, 1), float64, of the latest modules; sites with a larger generalisation gap weigh more.

    Task after task, ``a_i += d (g_i - mean g) / max_j |g_j - mean g|`` with the gaps g that were sent and d = 1 / (2 N)
    (our choice); no weight falls below 0.1 / N; then all are divided by their sum.
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
