"""Equal shares: in the gradient of a low-rank factor no patient weighs more than another.

Whoever sends the weights can choose them so that one visit's gradient is a million times all others', or so that all
are far below AdamW's epsilon, which then passes their sizes on instead of their signs. So each visit's gradient of each
rank, a row of A or a column of B, is brought to one length before visits are added up: the geometric mean of the
visits' own, at least :data:`LEAST_LENGTH`; visits of one patient share one such length. Without noise this is automatic
clipping (Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger", NeurIPS 2023),
rank by rank; it is no privacy guarantee.

A factor is laid out once for each visit of a batch, so that its gradient has a part for each: no further backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import DataError
from fedtar_flare.core.settings import matches
from fedtar_flare.models.adapters.lora import lora_layers

if TYPE_CHECKING:
    from peft import PeftModel

LEAST_LENGTH = 1e-3
"""Least length of a rank's gradient: AdamW's epsilon (1e-8) then is nothing beside a value of it."""


class VisitShares:
    """The factors of one set of adapters in some layers, whose gradients are equalised inside of :meth:`equal`.

    The gradient (2, ranks) of ``tally`` adds up the shares of visits that have a gradient of a rank, and log lengths.
    """

    def __init__(self, peft_model: PeftModel, adapter: str, glob: str = "*"):
        layers = [layer for name, layer in lora_layers(peft_model).items() if matches(name, [glob])]
        downs = [layer.lora_A[adapter] for layer in layers if adapter in layer.lora_A]
        ups = [layer.lora_B[adapter] for layer in layers if adapter in layer.lora_B]
        self._factors: list[nn.Linear] = [*downs, *ups]
        self._downs, device = len(downs), self._factors[0].weight.device
        self._ranks = [len(module.weight) for module in downs] + [module.weight.shape[1] for module in ups]
        self._ends = [0, *accumulate(self._ranks)]
        rank_of = []
        for module, first, rank in zip(self._factors, self._ends, self._ranks, strict=False):
            ranks = torch.arange(first, first + rank, device=device)
            rank_of.append(ranks.repeat_interleave(module.weight.numel() // rank))
        self._rank_of = torch.cat(rank_of[: len(downs)]), torch.cat(rank_of[len(downs) :])
        self.tally = nn.Parameter(torch.zeros(2, self._ends[-1], device=device))
        self._visits = Counter[str]()
        self._shares: Tensor | None = None

    def begin(self, patients: Sequence[str]) -> None:
        """Begin a batch, given each visit's patient."""
        self._visits = Counter(patients)

    @contextmanager
    def equal(self, patients: Sequence[str]) -> Iterator[None]:
        """Around the forward and the backward pass of visits, whose rows are adjacent in each layer's input."""
        if self.tally.grad is None:
            self.tally.grad = torch.zeros_like(self.tally)
        for index, module in enumerate(self._factors):
            module.__dict__["forward"] = partial(self._forward, index)
        self._shares = self.tally.new_tensor([1 / self._visits[patient] for patient in patients])[:, None]
        try:
            yield
        finally:
            self._shares = None
            for module in self._factors:
                del module.__dict__["forward"]

    def each(self, flat: Tensor, visits: int, side: int) -> Tensor:
        """Lay all A (side 0) or all B (1), rank by rank in one vector (n,), out for each visit: (visits, n)."""
        if self._shares is None:
            return flat.expand(visits, -1)
        return _EachOfAll.apply(flat, self._shares, self.tally, self._rank_of[side])

    def _forward(self, index: int, x: Tensor) -> Tensor:
        """The product with one factor, of which each visit has its own."""
        assert self._shares is not None
        visits = len(self._shares)
        if len(x) % visits:
            text = f"an input of shape {tuple(x.shape)} does not divide into {visits} visits"
            raise DataError(f"{text}: leave its layer out of the LoRA targets", reason="adapter-batch")
        down, weight = index < self._downs, self._factors[index].weight
        by_rank = weight if down else weight.t()
        each = _Each.apply(by_rank, self._shares, self.tally, self._ends[index])
        product = torch.bmm(x.reshape(visits, -1, x.shape[-1]), each.transpose(1, 2) if down else each)
        return product.view(*x.shape[:-1], product.shape[-1])

    @torch.no_grad()
    def finish(self, least: int) -> None:
        """Give each rank's gradient its length; one of fewer than ``least`` patients, and not all, becomes 0."""
        assert self.tally.grad is not None
        least = min(least, len(self._visits))
        counts, lengths = self.tally.grad
        scale = (lengths / counts.clamp(min=1)).exp().clamp(min=LEAST_LENGTH) * (counts > least - 1e-3)  # thirds
        for index, (module, part) in enumerate(zip(self._factors, scale.split(self._ranks), strict=True)):
            if module.weight.grad is not None:
                module.weight.grad *= part[:, None] if index < self._downs else part


class _Each(torch.autograd.Function):
    """A factor (r, n) for each of B visits, (B, r, n); backwards a visit's part of a rank has its share as length."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, shares: Tensor, tally: Tensor, first: int) -> Tensor:
        ctx.place = shares, tally, slice(first, first + len(factor))
        return factor.expand(len(shares), *factor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, tally, ranks = ctx.place
        inverse = _counted(gradient.float().square().sum(2), shares, tally.grad[:, ranks])
        return (gradient * inverse[:, :, None]).sum(0), None, None, None


class _EachOfAll(torch.autograd.Function):
    """As :class:`_Each` of many factors in one vector (n,), ``rank_of`` (n,) being the ranks of its values: (B, n)."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, shares: Tensor, tally: Tensor, rank_of: Tensor) -> Tensor:
        ctx.place = shares, tally, rank_of
        return flat.expand(len(shares), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, tally, rank_of = ctx.place
        squares = gradient.new_zeros(len(gradient), tally.shape[1]).index_add_(1, rank_of, gradient.square())
        return (gradient * _counted(squares, shares, tally.grad)[:, rank_of]).sum(0), None, None, None


def _counted(squares: Tensor, shares: Tensor, tally: Tensor) -> Tensor:
    """Count the visits' squared lengths (B, ranks) in the tally; each share (B, 1) over the length, of none 0."""
    has = squares > 0
    tally[0] += (has * shares).sum(0)
    tally[1] += torch.where(has, shares * squares.log() / 2, 0.0).sum(0)
    return torch.where(has, shares * squares.rsqrt(), 0.0)
