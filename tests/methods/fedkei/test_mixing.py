"""The mathematics of mixtures: layouts, clusters and weights (test_fedkei_learner.py has gradients)."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.methods.fedkei.mixing import (
    Layout,
    gram,
    initial_beta,
    kmeans,
    merge_small,
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
    "change, name",
    [({"head.bias": None}, "missing"), ({"other": torch.zeros(1, 1)}, "unknown"),
     ({"head.bias": torch.zeros(3, 2)}, "head.weight"),
     *(({"head.bias": torch.zeros(shape)}, "head.bias") for shape in ((2,), (0, 2), ()))],
)  # fmt: skip
def test_centres_that_do_not_fit_are_refused_by_name(change, name):
    stacked = {name: value[None] for name, value in MODULE.items()} | change
    with pytest.raises(ExchangeError, match=name):
        LAYOUT.columns({name: value for name, value in stacked.items() if value is not None})


def points(n, d=40, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(d, 3, generator=g) * 2
    return centres[:, [i % 3 for i in range(n)]] + spread * torch.randn(d, n, generator=g)


def cost(matrix, labels):
    total = 0.0
    for k in set(labels):
        members = matrix[:, [i for i, label in enumerate(labels) if label == k]].double()
        total += float((members - members.mean(1, keepdim=True)).square().sum())
    return total


@pytest.mark.parametrize("n, clusters", [(4, 2), (6, 3), (7, 2), (8, 3)])
def test_kmeans_finds_what_trying_all_partitions_finds(n, clusters):
    for seed in range(3):
        matrix = points(n, seed=seed, spread=3.0)
        best = min(
            cost(matrix, labels) for labels in product(range(clusters), repeat=n) if len(set(labels)) == clusters
        )
        assert cost(matrix, kmeans(gram(matrix), clusters)) == pytest.approx(best, rel=1e-9)


def test_equal_modules_share_a_cluster_and_clusters_are_no_more_than_distinct_modules():
    matrix = points(3, seed=2)[:, [0, 1, 0, 2, 1, 0]]
    assert kmeans(gram(matrix), 5) == [0, 1, 0, 2, 1, 0]
    assert kmeans(gram(matrix[:, [0, 0, 0]]), 3) == [0, 0, 0]
    assert kmeans(gram(matrix[:, :1]), 3) == [0]
    assert kmeans(gram(torch.zeros(5, 3)), 2) == [0, 0, 0]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 4))
def test_clusters_are_numbered_by_their_earliest_members(seed, n, clusters):
    labels = kmeans(gram(points(n, seed=seed)), clusters)
    firsts = [labels.index(k) for k in range(max(labels) + 1)]
    assert firsts == sorted(firsts) and labels == kmeans(gram(points(n, seed=seed)), clusters)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcd")), min_size=1, max_size=9), st.integers(1, 4))
def test_no_cluster_is_of_fewer_sites_than_the_minimum(members, least):
    labels, sites = [m[0] for m in members], [m[1] for m in members]
    inner = gram(points(len(members), seed=len(members)))
    merged = merge_small(labels, sites, inner, least)
    if len(set(sites)) < least:
        assert not any(merged)
        return
    for k in set(merged):
        assert len({site for site, label in zip(sites, merged, strict=True) if label == k}) >= least
    for a, b in product(range(len(labels)), repeat=2):
        assert labels[a] != labels[b] or merged[a] == merged[b]  # clusters merge, they are never torn apart


def test_a_small_cluster_goes_to_the_nearest():
    line = torch.tensor([[0.0, 0.1, 5.0, 5.1, 4.0]])
    assert merge_small([0, 0, 1, 1, 2], list("ababc"), gram(line), 2) == [0, 0, 1, 1, 1]


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
    torch.testing.assert_close(beta0 - free, (beta0 > 0) * (matrix.double().T @ gradient.double()))
    still, none = outer_step(beta0, matrix, gradient, 0.0)
    assert torch.equal(still, beta0) and not none.any()


def test_factors_of_ia3_are_always_mixed_around_the_start():
    origin = origin_of({"base_model.model.a.ia3_l": torch.ones(3, 1), "head.bias": torch.full((2,), 5.0)})
    assert torch.equal(origin["base_model.model.a.ia3_l"], torch.ones(3, 1)) and not origin["head.bias"].any()
