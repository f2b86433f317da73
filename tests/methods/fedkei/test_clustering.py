"""k-means through inner products: brute force, raw vectors, equal points, minimum sizes."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.methods.fedkei.clustering import (
    distinct,
    gram,
    kmeans,
    merge_small,
)


def points(n, d=40, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(d, 3, generator=g) * 2
    return centres[:, [i % 3 for i in range(n)]] + spread * torch.randn(d, n, generator=g)


def cost(matrix, labels):
    total = 0.0
    for k in set(labels):
        own = matrix[:, [i for i, label in enumerate(labels) if label == k]].double()
        total += float((own - own.mean(1, keepdim=True)).square().sum())
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
    assert distinct(gram(matrix)) == [0, 1, 0, 3, 1, 0]
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
