"""FedTAR's hypergradient from T numbers, beside the paper's recursion for dw/dpsi and plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtar_flare.fedtar.policy import AlphaPolicy, hypergradient, t_numbers
from tests.benchmarks.result import Result, alternated, peak_bytes

STEPS = 5


class Round:
    """Step means and a validation gradient of made-up values; every way gives dL/dpsi as one vector."""

    def __init__(self, size: int, embedding_dim: int):
        generator = torch.Generator().manual_seed(0)
        self.size = size
        self.policy = AlphaPolicy(STEPS, alpha_form="sigmoid", embedding_dim=embedding_dim)
        self.psi = tuple(self.policy.parameters())
        self.means = [torch.randn(size, generator=generator) for _ in range(STEPS)]
        self.gradient = torch.randn(size, generator=generator)
        self.path = [torch.randn(size, generator=generator)]
        for alpha, mean in zip(self.policy.alphas().tolist(), self.means, strict=True):
            self.path.append(self.path[-1] + alpha * (mean - self.path[-1]))

    def ours(self) -> Tensor:
        """What the sites send, and the server's outer gradient."""
        numbers = torch.tensor(t_numbers({"w": self.gradient}, [{"w": w} for w in self.path]), dtype=torch.float64)
        alphas = self.policy.alphas()
        found = hypergradient(numbers, alphas, torch.ones(STEPS, dtype=torch.bool))
        return _flat(torch.autograd.grad(alphas, self.psi, found))

    def autograd(self) -> Tensor:
        """Through Eq. 7 as it stands, from w_0."""
        w, alphas = self.path[0], self.policy.alphas().float()
        for alpha, mean in zip(alphas, self.means, strict=True):
            w = w + alpha * (mean - w)
        return _flat(torch.autograd.grad(w, self.psi, self.gradient))

    def recursion(self) -> Tensor:
        """``S_t = (1 - alpha_t) S_{t-1} + Delta_t (dalpha_t/dpsi)^T``, then ``S_T^T g``."""
        alphas = self.policy.alphas()
        s = torch.zeros(self.size, sum(p.numel() for p in self.psi))
        for t, mean in enumerate(self.means):
            slope = _flat(torch.autograd.grad(alphas[t], self.psi, retain_graph=True)).float()
            s.mul_(1 - alphas[t].item()).addr_(mean - self.path[t], slope)
        return s.T @ self.gradient


def _flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([one.flatten() for one in gradients])


def measure(rival: str, memory: bool, quick: bool) -> Result:
    # the recursion keeps a matrix of all weights by all of psi: 5 GB at a million weights
    size = 1000 if quick else 10**5 if rival == "recursion" else 10**6
    case = Round(size, 4 if quick else 32)
    ways: dict[str, Callable[[], Tensor]] = {"ours": case.ours, "theirs": getattr(case, rival)}
    # single precision along a path of its own: the ways differ by its rounding over ``size`` products
    torch.testing.assert_close(ways["ours"]().float(), ways["theirs"]().float(), rtol=1e-2, atol=1e-1)
    if memory:
        peaks = {name: tuple(peak_bytes(way) / 1e6 for _ in range(3)) for name, way in ways.items()}
    else:
        peaks = alternated(ways, 2 if quick else 5)
    title = {"recursion": "the paper's recursion", "autograd": "autograd through the round"}[rival]
    goal = {("recursion", False): 10.0, ("recursion", True): 5.0}.get((rival, memory), 1.0)
    psi = sum(p.numel() for p in case.psi)
    return Result(
        f"hypergradient-{rival}{'-memory' if memory else ''}",
        f"hypergradient{', memory' if memory else ''}, {size:,} weights, T={STEPS}, psi of {psi}",
        title,
        "MB" if memory else "s",
        peaks["ours"],
        peaks["theirs"],
        ("at least", goal),
    )


def _case(rival: str, memory: bool) -> Callable[[bool], Result]:
    return lambda quick: measure(rival, memory, quick)


COMPARISONS = {
    f"hypergradient-{rival}{'-memory' if memory else ''}": _case(rival, memory)
    for rival in ("recursion", "autograd")
    for memory in (False, True)
}
