"""The mixture that the server makes for one task: clusters, their weights, and the centres that go down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from fedtar_flare.errors import ExchangeError
from fedtar_flare.methods.fedkei.mixing import Kind, mix, outer_step
from fedtar_flare.methods.fedkei.pool import Module, Pool

AlphaMode = Literal["fixed", "learnt", "best"]
"""What a site does with centres: ``fixed``: 1/K; ``learnt``: Eq. 6; ``best``: takes the one of the lowest training
loss."""

Parts = Mapping[Kind, "Part"]


@dataclass(frozen=True)
class Part:
    """The mixture of one kind: M (d, N) less its origin (d, 1), beta and beta0 (N, K) float64.

    ``assignment``: each module's cluster; ``distance``: (K,) of beta from beta0 after a step, before the limit.
    """

    modules: tuple[Module, ...]
    assignment: tuple[int, ...]
    matrix: Tensor
    beta: Tensor
    beta0: Tensor
    origin: Tensor
    distance: Tensor | None = None

    @property
    def many(self) -> int:
        """K."""
        return self.beta.shape[1]

    def columns(self) -> Tensor:
        """C (d, K) = o + (M - o) beta (Eq. 4)."""
        return self.origin + mix(self.matrix, self.beta)

    def weighted(self, beta: Tensor) -> Part:
        """The same modules under other weights (N, K)."""
        return replace(self, beta=beta, beta0=beta)


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

    pool: Pool
    parts: Parts | None
    own: Mapping[str, Parts] = field(default_factory=dict)
    alpha: AlphaMode = "fixed"
    probes: bool = False
    seconds: float = 0.0

    def centres(self, site: str | None = None) -> dict[str, Tensor]:
        """C (K, *shape) by tensor name, float32, to be sent to a site (None: to all alike); K may differ by kind."""
        parts = self.parts if site is None else self.own.get(site, self.parts)
        if parts is None:
            return {name: value[None].clone() for name, value in self.pool.start.items()}
        return self.pool.layout.stacked({kind: part.columns() for kind, part in parts.items()})

    def step(self, gradients: Mapping[str, Tensor], eta_out: float) -> Mixture:
        """The mixture after the outer step (Eq. 8).

        Args:
            gradients: sum over the sites of G (K, *shape), by name as :meth:`centres`.

        Raises:
            ExchangeError: they do not fit the centres; names the tensor or the kind.
        """
        if self.parts is None:
            return self
        columns = self.pool.layout.columns(gradients)
        moved: dict[Kind, Part] = {}
        for kind, part in self.parts.items():
            if columns[kind].shape[1] != part.many:
                raise ExchangeError(
                    f"the gradient of the {kind}s has {columns[kind].shape[1]} columns; the mixture has {part.many}"
                )
            beta, distance = outer_step(part.beta0, part.matrix, columns[kind], eta_out)
            moved[kind] = replace(part, beta=beta, distance=distance)
        return replace(self, parts=moved)

    def report(self) -> list[dict[str, Any]]:
        """Per kind and cluster, as JSON primitives, for the record::

            {"kind": "adapter", "cluster": 0, "for": None or the site that it is mixed for, "distance": 0.02 or None,
             "members": [{"site": "site-1", "task": 1, "beta": 0.5, "beta0": 0.5}, ...]}

        ``members`` are those of the cluster and whoever else has weight in it. Empty for the common start alone.
        """
        mixed: dict[str | None, Parts] = {} if self.parts is None or self.own else {None: self.parts}
        mixed.update(self.own.items())
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
            for k in range(part.many)
        ]
