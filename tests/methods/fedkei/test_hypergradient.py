"""The gradient in the centres against autograd through all inner steps, and against finite differences."""

import pytest
import torch

from fedtar_flare.methods.fedkei import hypergradient as hyper
from fedtar_flare.methods.fedkei.mixing import initial_beta, mix, outer_step

ETA = 0.07
D, K = {"adapter": 7, "head": 4}, {"adapter": 3, "head": 2}


class Toy:
    """Losses of both kinds together that are far from quadratic: log-cosh of random projections."""

    def __init__(self, steps, seed=0):
        g = torch.Generator().manual_seed(seed)
        width = sum(D.values())
        self.w = torch.randn(steps + 1, 9, width, generator=g, dtype=torch.float64)
        self.centres = {kind: torch.randn(D[kind], K[kind], generator=g, dtype=torch.float64) for kind in D}
        self.alpha = {kind: torch.full((K[kind],), 1 / K[kind], dtype=torch.float64) for kind in D}
        self.steps = steps

    def loss(self, s, theta):
        x = torch.cat([theta[kind] for kind in D])
        return torch.log(torch.cosh(self.w[s] @ x)).sum() / 9 + (x**3).sum() / 50

    def gradient(self, s, theta):
        theta = {kind: value.detach().requires_grad_() for kind, value in theta.items()}
        return dict(zip(theta, torch.autograd.grad(self.loss(s, theta), list(theta.values())), strict=True))

    def outer(self, centres):
        """L(theta') as a function of the centres, through all inner steps, whose gradients are constants."""
        alpha = self.alpha
        for s in range(self.steps):
            g = self.gradient(s, {kind: centres[kind] @ alpha[kind] for kind in D})
            alpha = {kind: alpha[kind] - ETA * centres[kind].T @ g[kind] for kind in D}
        return self.loss(self.steps, {kind: centres[kind] @ alpha[kind] for kind in D})

    def path_and_v(self):
        path = hyper.inner_steps(self.centres, self.alpha, self.gradient, self.steps, ETA)
        return path, self.gradient(self.steps, hyper.combined(self.centres, path.last))


def by_autograd(toy):
    centres = {kind: value.clone().requires_grad_() for kind, value in toy.centres.items()}
    return dict(zip(centres, torch.autograd.grad(toy.outer(centres), list(centres.values())), strict=True))


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_first_order_is_autograd_with_the_inner_gradients_detached(steps):
    toy = Toy(steps, seed=10 + steps)
    path, v = toy.path_and_v()
    found, wanted = hyper.first_order(toy.centres, path, v, ETA), by_autograd(toy)
    for kind in D:
        torch.testing.assert_close(found[kind], wanted[kind], rtol=1e-10, atol=1e-10)


def test_without_inner_steps_it_is_the_direct_step():
    toy = Toy(0)
    path, v = toy.path_and_v()
    found, direct = hyper.first_order(toy.centres, path, v, ETA), hyper.direct(toy.alpha, v)
    assert all(torch.equal(found[kind], direct[kind]) for kind in D)


def test_the_gradient_in_beta_is_autograd_through_centres_and_steps():
    """M^T G of the sum over sites, masked, is the gradient of the sum of their losses in beta."""
    toys = [Toy(2, seed=21), Toy(2, seed=22)]
    labels, g = [0, 0, 1, 2, 2], torch.Generator().manual_seed(5)
    matrix = torch.randn(D["adapter"], 5, generator=g, dtype=torch.float64)
    beta0 = initial_beta(labels)
    for toy in toys:
        toy.centres = {"adapter": mix(matrix, beta0), "head": toys[0].centres["head"]}
    beta = beta0.clone().requires_grad_()
    centres = [{**toy.centres, "adapter": matrix @ beta} for toy in toys]
    heads = [{kind: c if c.requires_grad else c.clone().requires_grad_() for kind, c in one.items()} for one in centres]
    wanted = torch.autograd.grad(sum(toy.outer(one) for toy, one in zip(toys, heads, strict=True)), beta)[0]
    total = torch.zeros(D["adapter"], 3, dtype=torch.float64)
    for toy in toys:
        path, v = toy.path_and_v()
        total += hyper.first_order(toy.centres, path, v, ETA)["adapter"]
    moved, _ = outer_step(beta0, matrix, total, 1e-3, limit=1e9)
    torch.testing.assert_close((beta0 - moved) / 1e-3, (beta0 > 0) * wanted, rtol=1e-9, atol=1e-9)
