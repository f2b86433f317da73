"""Mixtures of modules: which weights there are, and what they give (Eq. 3 to 5, 8, 10, 11).

A module is the adapter and the head that one site learnt in one task. Adapter and head are two kinds, mixed apart: each
has its own matrix M (d, N) of N modules as columns, its own weights ``beta`` (N, K) within K clusters, and at each site
its own weights ``alpha`` (K,) between clusters::

    C = o + (M - o) beta          o: the origin, 0 as in the paper (1 for factors of IA3)
    theta = o + (C - o) alpha

In what follows matrices hold differences from the origin already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedtar_flare.errors import ExchangeError

Kind = Literal["adapter", "head"]

KINDS: tuple[Kind, ...] = ("adapter", "head")
"""What is clustered and mixed apart."""

BETA_LIMIT = 1.0
"""Farthest that a column of beta may move from its initial value in the outer step."""


def kind_of(name: str) -> Kind:
    """The kind of a tensor, by its name on the wire.

    >>> kind_of("head.bias"), kind_of("base_model.model.encoder.backbone.blocks.0.attn.qkv.lora_A.weight")
    ('head', 'adapter')
    """
    return "head" if name.startswith("head.") else "adapter"


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a module's tensors, sorted by name: how they are laid out in one vector of each kind."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Of a module."""
        return cls(tuple(sorted((name, tuple(value.shape)) for name, value in tensors.items())))

    def parts(self, kind: Kind) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of one kind."""
        return [(name, shape) for name, shape in self.shapes if kind_of(name) == kind]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that have a tensor."""
        return tuple(kind for kind in KINDS if self.parts(kind))

    def vectors(self, tensors: Mapping[str, Tensor]) -> dict[Kind, Tensor]:
        """A module as one vector (d,) of each kind."""
        return {kind: columns[:, 0] for kind, columns in self.columns({n: v[None] for n, v in tensors.items()}).items()}

    def columns(self, stacked: Mapping[str, Tensor]) -> dict[Kind, Tensor]:
        """Tensors (K, *shape) as one matrix (d, K) of each kind.

        Raises:
            ExchangeError: a tensor is missing, unknown or misshapen, or the K of one kind differ; names the tensor.
        """
        for name in sorted(stacked.keys() ^ dict(self.shapes).keys()):
            raise ExchangeError(f"tensor '{name}' is {'unknown' if name in stacked else 'missing'} in a mixture")
        found: dict[Kind, Tensor] = {}
        for kind in self.kinds:
            parts = self.parts(kind)
            many = stacked[parts[0][0]].shape[:1]
            for name, shape in parts:
                if stacked[name].shape != (*many, *shape) or not many or not many[0]:
                    raise ExchangeError(
                        f"tensor '{name}' has shape {tuple(stacked[name].shape)} in a mixture, not {('K', *shape)}, "
                        f"with one K of at least 1 for all tensors of the {kind}"
                    )
            found[kind] = torch.cat([stacked[name].flatten(1) for name, _ in parts], dim=1).T
        return found

    def stacked(self, columns: Mapping[Kind, Tensor]) -> dict[str, Tensor]:
        """Tensors (K, *shape) by name of one matrix (d, K) of each kind; undoes :meth:`columns`."""
        found = {}
        for kind in self.kinds:
            rows, at = columns[kind].T, 0
            for name, shape in self.parts(kind):
                size = torch.Size(shape).numel()
                found[name] = rows[:, at : at + size].reshape(len(rows), *shape)
                at += size
        return dict(sorted(found.items()))

    def tensors(self, vectors: Mapping[Kind, Tensor]) -> dict[str, Tensor]:
        """A module's tensors of one vector (d,) of each kind; undoes :meth:`vectors`."""
        return {name: value[0] for name, value in self.stacked({k: v[:, None] for k, v in vectors.items()}).items()}


def origin_of(start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The point o that mixtures are taken around: 0, but the start (1) for factors of IA3."""
    return {name: value if name.endswith("ia3_l") else torch.zeros_like(value) for name, value in start.items()}


def initial_beta(assignment: Sequence[int]) -> Tensor:
    """``beta0 = Z diag(1 / n_k)`` (N, K), float64, of each module's cluster 0..K-1 (Eq. 3; the mean is our reading)."""
    members = torch.nn.functional.one_hot(torch.as_tensor(assignment)).double()
    return members / members.sum(0)


def mix(matrix: Tensor, weights: Tensor) -> Tensor:
    """``M beta`` (d, K) or ``C alpha`` (d,) (Eq. 4, 5), summed in float64, in the matrix's number format."""
    return (matrix.double() @ weights.double()).to(matrix.dtype)


def outer_step(
    beta0: Tensor, matrix: Tensor, gradient: Tensor, eta_out: float, limit: float = BETA_LIMIT
) -> tuple[Tensor, Tensor]:
    """``beta' = beta0 - eta_out mask * (M^T G)`` (Eq. 8); only weights within a module's own cluster move.

    Parameters
    ----------
    beta0 : Tensor, (N, K), float64
    matrix : Tensor, (d, N)
        M.
    gradient : Tensor, (d, K)
        Sum over the sites of G.
    limit : float
        Farthest that a column may move.

    Returns
    -------
    beta : Tensor, (N, K)
    distance : Tensor, (K,)
        That each column would have had from beta0 without the limit.
    """
    moved = beta0 - eta_out * ((beta0 > 0) * (matrix.double().T @ gradient.double()))
    change = moved - beta0
    distance = change.norm(dim=0)
    over = distance > limit
    return torch.where(over, beta0 + change * (limit / distance.clamp(min=limit)), moved), distance
