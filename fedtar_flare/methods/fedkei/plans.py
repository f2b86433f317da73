"""Plans: FedKEI, its rivals and controls, which differ in how the server mixes a start and what the site minimises.

Every start is ``theta = M beta alpha`` over some modules of the pool. A controller asks :meth:`Plan.mixture` for the
mixture of a task, sends :meth:`Mixture.centres` down, where :attr:`Mixture.probes` adds up the answers and goes on with
:meth:`Mixture.step`, and sends the centres for tuning. Where the pool has nothing for a plan, the mixture is the common
start alone (K = 1, alpha fixed at 1).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedtar_flare.errors import ConfigError
from fedtar_flare.methods.fedkei.clustering import gram, kmeans, merge_small, squared_distances
from fedtar_flare.methods.fedkei.mixing import Kind, initial_beta
from fedtar_flare.methods.fedkei.mixture import AlphaMode, Mixture, Part
from fedtar_flare.methods.fedkei.objectives import PLAIN, Local
from fedtar_flare.methods.fedkei.pool import Module, Pool
from fedtar_flare.settings import nearest


class Clustering(Protocol):
    """What a mixture is made by, of :class:`fedtar_flare.methods.fedkei.config.FedKEIConfig`."""

    clusters: int
    min_cluster_sites: int
    eta_out: float


@dataclass(frozen=True)
class Plan:
    """One row of the table of plans.

    Args:
        members: modules that are mixed: ``none``; ``last``: each site's latest; ``all``; ``own``: the site's latest,
            for that site alone.
        groups: into which clusters: ``one``, ``each`` on its own, by ``site``, ``kmeans``.
        weights: beta0: the ``mean`` of a cluster; by ``similarity`` to the site's own latest module (FedAMP); or moved
            towards sites of large generalisation ``gaps`` (FedGA).
        alpha: what the site does with the centres.
        probe: the outer step: ``none``, ``bilevel`` (through alpha's inner steps), ``direct`` (Variant C).
        local: what the site minimises.
    """

    name: str
    members: Literal["none", "last", "all", "own"] = "none"
    groups: Literal["one", "each", "site", "kmeans"] = "one"
    weights: Literal["mean", "similarity", "gaps"] = "mean"
    alpha: AlphaMode = "fixed"
    probe: Literal["none", "bilevel", "direct"] = "none"
    local: Local = PLAIN

    def mixture(self, pool: Pool, task: int, settings: Clustering) -> Mixture:
        """The mixture for a task (counted from 1) of modules of the tasks before it.

        It is the common start alone where there is no such module, or where all of them together are of fewer sites
        than a cluster must have.
        """
        began = time.monotonic()
        modules = {"none": (), "all": pool.before(task)}.get(self.members, pool.last(task))
        if self.members == "own":
            # nobody but the site itself gets it, so a minimum of sites has no place here
            own = {m.site: _parts(pool, (m,), {kind: [0] for kind in pool.layout.kinds}) for m in modules}
            return Mixture(pool, None, own=own)
        if len({module.site for module in modules}) < settings.min_cluster_sites or not modules:
            return Mixture(pool, None)
        inner = {kind: gram(pool.matrix(kind, modules)) for kind in pool.layout.kinds}
        if self.weights != "mean":
            parts = _parts(pool, modules, {kind: [0] * len(modules) for kind in inner})
            if self.weights == "gaps":
                parts, own = _weighted(parts, dict.fromkeys(parts, gap_weights(pool, modules, task))), {}
            else:
                apart = (
                    {kind: similarity(products, n) for kind, products in inner.items()} for n in range(len(modules))
                )
                own = {m.site: _weighted(parts, weights) for m, weights in zip(modules, apart, strict=True)}
            return Mixture(pool, parts, own=own, seconds=time.monotonic() - began)
        labels: dict[Kind, list[int]] = {}
        for kind, products in inner.items():
            found = self._clusters(modules, products, settings.clusters)
            merged = merge_small(found, [module.site for module in modules], products, settings.min_cluster_sites)
            assert merged is not None  # all of them together are of enough sites
            labels[kind] = merged
        return Mixture(
            pool,
            _parts(pool, modules, labels),
            alpha=self.alpha,
            probes=self.probe != "none" and settings.eta_out > 0,
            seconds=time.monotonic() - began,
        )

    def _clusters(self, modules: Sequence[Module], inner: Tensor, many: int) -> list[int]:
        if self.groups == "kmeans":
            return kmeans(inner, many)
        if self.groups == "site":
            sites = sorted({module.site for module in modules})
            return [sites.index(module.site) for module in modules]
        return list(range(len(modules))) if self.groups == "each" else [0] * len(modules)


def _parts(pool: Pool, modules: Sequence[Module], labels: Mapping[Kind, Sequence[int]]) -> dict[Kind, Part]:
    found: dict[Kind, Part] = {}
    for kind, assignment in labels.items():
        beta0 = initial_beta(assignment)
        matrix, origin = pool.matrix(kind, modules), pool.origin(kind)
        found[kind] = Part(tuple(modules), tuple(assignment), matrix, beta0, beta0, origin)
    return found


def similarity(inner: Tensor, own: int) -> Tensor:
    """FedAMP's weights (N, 1), float64, of N modules for the one at ``own``: near ones count for more.

    ``xi_j = exp(-d_j^2 / sigma) / N`` for the others, the rest for its own module. Sigma is the mean squared distance
    of two modules (our choice: free of scale).
    """
    apart = squared_distances(inner)
    many = len(apart)
    mean = apart.sum() / max(many * (many - 1), 1)
    weights = torch.exp(-apart[own] / mean.clamp(min=1e-300)) / many
    weights[own] = 0
    weights[own] = 1 - weights.sum()
    return weights[:, None]


def gap_weights(pool: Pool, modules: Sequence[Module], task: int) -> Tensor:
    """FedGA's weights (N, 1), float64, of the latest modules: sites whom the shared start served badly count for more.

    Task after task, ``a_i += d (g_i - mean g) / max_j |g_j - mean g|`` with the gaps g of the sites that told theirs
    and d = 1 / (2 N) (our choice); none falls below a tenth of an equal one; then all are divided by their sum.
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


def _weighted(parts: Mapping[Kind, Part], weights: Mapping[Kind, Tensor]) -> dict[Kind, Part]:
    """The same modules under other weights."""
    return {kind: part.weighted(weights[kind]) for kind, part in parts.items()}


PLANS: dict[str, Plan] = {
    plan.name: plan
    for plan in (
        Plan("rand"),
        Plan("fedavg", "last"),
        Plan("fedprox", "last", local=Local("proximal")),
        Plan("ffa_lora", "last", local=Local("frozen_a")),
        Plan("fedamp", "last", "each", weights="similarity"),
        Plan("apple", "last", "each", alpha="learnt"),
        Plan("fedga", "last", weights="gaps"),
        Plan("per_fedavg", "last", local=Local("maml")),
        Plan("fedcurv", "last", local=Local("fisher")),
        Plan("flwf", "last", local=Local("distil")),
        Plan("variant_a", "all", "site", alpha="learnt"),
        Plan("variant_b", "all", "kmeans", alpha="learnt"),
        Plan("variant_c", "all", "kmeans", alpha="learnt", probe="direct"),
        Plan("fedkei", "all", "kmeans", alpha="learnt", probe="bilevel"),
        Plan("own_last", "own"),
        Plan("pool_mean", "all"),
        Plan("best_cluster", "all", "kmeans", alpha="best"),
        Plan("head_only", local=Local("head_only")),
        Plan("rand_3", local=Local(extra_epochs=3)),
    )
}


def plan(name: str) -> Plan:
    """The plan of a name.

    Raises:
        ConfigError: it is unknown.
    """
    if name not in PLANS:
        raise ConfigError(f"plan '{name}' is unknown: it must be one of {', '.join(PLANS)}{nearest(name, PLANS)}")
    return PLANS[name]
