"""Plans: FedKEI, its rivals and controls, which differ in how the server mixes a start and what the site minimises.

Every start is ``theta = M beta alpha`` over some modules of the pool. A controller asks :meth:`Plan.mixture` for the
mixture of a task, sends :meth:`Mixture.centres` down, where :attr:`Mixture.probes` adds up the answers and goes on with
:meth:`Mixture.step`, and sends the centres for tuning. Where the pool has nothing for a plan, the mixture is the common
start alone (K = 1, alpha fixed at 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtar_flare.errors import ConfigError
from fedtar_flare.fedkei.mixing import Kind, Origin, Support
from fedtar_flare.fedkei.objectives import Local
from fedtar_flare.fedkei.pool import Module, Pool
from fedtar_flare.settings import Settings, nearest

Metric = Literal["factors", "delta"]
AlphaMode = Literal["fixed", "learnt", "best"]
"""``fixed``: 1/K; ``learnt``: Eq. 6; ``best``: the one centre with the lowest training loss."""


class MixingSettings(Settings):
    """How the server mixes starts; part of a job's settings (a method's config derives from it)."""

    clusters: int = Field(3, ge=1, description="K of the adapters; fewer where the pool has fewer distinct modules")
    head_clusters: int = Field(3, ge=1, description="K of the heads")
    support: Support = Field("cluster", description="what the outer step may move: weights within the cluster, or all")
    metric: Metric = Field("factors", description="what clusters adapters: raw factors, or ('delta') LoRA's products")
    origin: Origin = Field("zero", description="mixtures are taken around zero (paper) or around the common start")
    eta_out: float = Field(0.05, ge=0, description="step size of the outer step (Eq. 8); 0: Variant B")
    beta_limit: float = Field(1.0, gt=0, description="farthest that a column of beta may move from its initial value")
    min_cluster_sites: int = Field(
        1, ge=1, description="sites that a cluster must stem from, smaller ones merge; production: at least 2"
    )
    cluster_seed: int = Field(0, ge=0, description="of k-means++")


@dataclass(frozen=True)
class Part:
    """The mixture of one kind: M (d, N), beta and beta0 (N, K) float64, mask (N, K) bool, o (d, 1)."""

    modules: tuple[Module, ...]
    assignment: tuple[int, ...]
    matrix: Tensor
    beta: Tensor
    beta0: Tensor
    mask: Tensor
    origin: Tensor
    distance: Tensor | None = None  # (K,) of beta from beta0 after a step, before the limit

    @property
    def many(self) -> int:
        """K."""
        return self.beta.shape[1]


@dataclass(frozen=True)
class Mixture:
    """What the server mixes for a task.

    Args:
        parts: the mixture of each kind; None: the common start alone.
        own: for plans that mix for each site apart, by site; the others get ``parts``.
        alpha: what the site does with the centres.
        probes: whether PROBE is asked for before ADAPT.
        seconds: that clustering took.
    """

    start: Mapping[str, Tensor]
    parts: Mapping[Kind, Part] | None
    own: Mapping[str, Mapping[Kind, Part]] = field(default_factory=dict)
    alpha: AlphaMode = "fixed"
    probes: bool = False
    limit: float = 1.0
    seconds: float = 0.0

    def centres(self, site: str | None = None) -> dict[str, Tensor]:
        """C (K, *shape) by tensor name, float32, to be sent to a site (None: to all alike); K may differ by kind."""
        raise NotImplementedError

    def step(self, gradients: Mapping[str, Tensor], eta_out: float) -> Mixture:
        """The mixture after the outer step (Eq. 8); ``gradients``: sum over the sites of G (K, *shape) by name."""
        raise NotImplementedError

    def report(self) -> list[dict[str, Any]]:
        """Per kind and cluster, as JSON primitives, for the record::

            {"kind": "adapter", "cluster": 0, "distance": 0.02 or None,
             "members": [{"site": "site-1", "task": 1, "beta": 0.5, "beta0": 0.5}, ...]}

        ``members`` are those of the cluster and whoever else has weight in it. Empty for the common start alone.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Plan:
    """One row of the table of plans.

    Args:
        members: modules that are mixed: ``none``; ``last``: each site's latest; ``all``; ``own``: the site's latest.
        groups: into which clusters: ``one``, ``each`` on its own, by ``site``, ``kmeans``.
        weights: beta0: the ``mean`` of a cluster, or by ``similarity`` to the site's own latest module (FedAMP).
        alpha: see :data:`AlphaMode`.
        probe: the outer step: ``none``, ``bilevel`` (the settings' hypergradient), ``direct`` (Variant C).
        local: what the site minimises.
    """

    name: str
    title: str
    members: Literal["none", "last", "all", "own"] = "none"
    groups: Literal["one", "each", "site", "kmeans"] = "one"
    weights: Literal["mean", "similarity"] = "mean"
    alpha: AlphaMode = "fixed"
    probe: Literal["none", "bilevel", "direct"] = "none"
    local: Local = Local()

    def mixture(self, pool: Pool, task: int, settings: MixingSettings) -> Mixture:
        """The mixture for a task (counted from 1) of modules of the tasks before it."""
        raise NotImplementedError


PLANS: dict[str, Plan] = {
    plan.name: plan
    for plan in (
        Plan("rand", "Rand: the common start"),
        Plan("fedavg", "FedAvg", "last"),
        Plan("fedprox", "FedProx", "last", local=Local("proximal")),
        Plan("ffa_lora", "FFA-LoRA", "last", local=Local("frozen_a")),
        Plan("fedamp", "FedAMP", "last", "each", weights="similarity"),
        Plan("apple", "APPLE", "last", "each", alpha="learnt"),
        Plan("per_fedavg", "Per-FedAvg", "last", local=Local("maml")),
        Plan("variant_a", "Variant A: sites as clusters", "all", "site", alpha="learnt"),
        Plan("variant_b", "Variant B: no outer step", "all", "kmeans", alpha="learnt"),
        Plan("variant_c", "Variant C: beta by a direct step", "all", "kmeans", alpha="learnt", probe="direct"),
        Plan("fedkei", "FedKEI", "all", "kmeans", alpha="learnt", probe="bilevel"),
        Plan("own_last", "The site's own last module", "own"),
        Plan("pool_mean", "Mean of the pool", "all"),
        Plan("best_cluster", "Best cluster", "all", "kmeans", alpha="best"),
        Plan("head_only", "Rand, head only", local=Local("head_only")),
        Plan("rand_3", "Rand + 3 epochs", local=Local(extra_epochs=3)),
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
