"""The mathematics of mixtures: layouts, weights, and gradients against autograd through all inner steps."""

import pytest
import torch

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.methods.fedkei.mixing import (
    Layout,
    combined,
    first_order,
    initial_beta,
    inner_steps,
    mix,
    origin_of,
    outer_step,
)

MODULE = {
    "base_model.model.encoder.a.lora_A.weight": torch.arange(6.0).view(2, 3),
    "base_model.model.encoder.a.lora_B.weight": torch.arange(8.0).view(4, 2),
    "head.bias": torch.tensor([1.0, 2.0]),
    "head.weight": torch.arange(10.0).view(2, 5),
}
LAYOUT = Layout.of(MODULE)
ETA = 0.07
D, K = {"adapter": 7, "head": 4}, {"adapter": 3, "head": 2}


def test_modules_come_back_from_their_vectors_also_with_different_numbers_by_kind():
    vectors = LAYOUT.vectors(MODULE)
    assert {kind: len(v) for kind, v in vectors.items()} == {"adapter": 14, "head": 12}
    back = LAYOUT.tensors(vectors)
    assert list(back) == sorted(MODULE) and all(torch.equal(back[name], value) for name, value in MODULE.items())
    stacked = {n: torch.stack([v, v + 1, v + 2][: 2 if n.startswith("head") else 3]) for n, v in MODULE.items()}
    columns = LAYOUT.columns(stacked)
    assert columns["adapter"].shape == (14, 3) and columns["head"].shape == (12, 2)
    assert all(torch.equal(value, stacked[name]) for name, value in LAYOUT.stacked(columns).items())


@pytest.mark.parametrize(
    "change, said",
    [({"head.bias": None}, "missing"), ({"other": torch.zeros(1, 1)}, "unknown"),
     ({"head.bias": torch.zeros(3, 2)}, "head.weight"),
     *(({"head.bias": torch.zeros(shape)}, "head.bias") for shape in ((2,), (0, 2), ()))],
)  # fmt: skip
def test_centres_that_do_not_fit_are_refused_by_name(change, said):
    stacked = {name: value[None] for name, value in MODULE.items()} | change
    with pytest.raises(ExchangeError, match=said):
        LAYOUT.columns({name: value for name, value in stacked.items() if value is not None})


def test_the_outer_step_stays_within_its_limit_and_in_its_support():
    beta0 = initial_beta([0, 0, 1])
    g = torch.Generator().manual_seed(2)
    matrix, gradient = torch.randn(9, 3, generator=g), 50 * torch.randn(9, 2, generator=g)
    beta, distance = outer_step(beta0, matrix, gradient, 1.0, limit=0.5)
    assert (distance > 0.5).all() and not beta[beta0 == 0].any()
    torch.testing.assert_close((beta - beta0).norm(dim=0), torch.full((2,), 0.5, dtype=torch.float64))
    free, free_distance = outer_step(beta0, matrix, gradient, 1.0, limit=1e9)
    turned = torch.nn.functional.cosine_similarity(free - beta0, beta - beta0, dim=0)
    assert torch.equal(free_distance, distance) and torch.allclose(turned, torch.ones(2, dtype=torch.float64))
    still, none = outer_step(beta0, matrix, gradient, 0.0)
    assert torch.equal(still, beta0) and not none.any()


def test_factors_of_ia3_are_always_mixed_around_the_start():
    start = {"base_model.model.a.ia3_l": torch.ones(3, 1), "head.bias": torch.full((2,), 5.0)}
    assert torch.equal(origin_of(start)["base_model.model.a.ia3_l"], torch.ones(3, 1))
    assert not origin_of(start)["head.bias"].any()


class Toy:
    """Losses of both kinds together that are far from quadratic: log-cosh of random projections."""

    def __init__(self, steps, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.w = torch.randn(steps + 1, 9, sum(D.values()), generator=g, dtype=torch.float64)
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

    def found(self):
        alpha, total = inner_steps(self.centres, self.alpha, self.gradient, self.steps, ETA)
        v = self.gradient(self.steps, combined(self.centres, alpha))
        return first_order(self.centres, alpha, total, v, ETA)


def test_the_gradient_in_beta_is_autograd_through_centres_and_steps():
    """M^T G of the sum over sites, masked, is the gradient of the sum of their losses in beta."""
    toys = [Toy(2, seed=21), Toy(2, seed=22)]
    labels, g = [0, 0, 1, 2, 2], torch.Generator().manual_seed(5)
    matrix = torch.randn(D["adapter"], 5, generator=g, dtype=torch.float64)
    beta0 = initial_beta(labels)
    for toy in toys:
        toy.centres = {"adapter": mix(matrix, beta0), "head": toys[0].centres["head"]}
    beta = beta0.clone().requires_grad_()
    losses = [toy.outer({**toy.centres, "adapter": matrix @ beta}) for toy in toys]
    wanted = torch.autograd.grad(sum(losses), beta)[0]
    moved, _ = outer_step(beta0, matrix, sum(toy.found()["adapter"] for toy in toys), 1e-3, limit=1e9)
    torch.testing.assert_close((beta0 - moved) / 1e-3, (beta0 > 0) * wanted, rtol=1e-9, atol=1e-9)
