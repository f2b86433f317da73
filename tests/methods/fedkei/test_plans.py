"""The plans' mixtures: identities to the bit, edges, reports."""

import json

import pytest
import torch
from made_up_pool import NAMES, pool_of, random_module, same

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.methods.fedkei.config import FedKEIConfig
from fedtar_flare.methods.fedkei.mixing import KINDS
from fedtar_flare.methods.fedkei.plans import PLANS, plan, similarity
from fedtar_flare.methods.fedkei.pool import Pool

SETTINGS = FedKEIConfig()
MIXED = [name for name, one in PLANS.items() if one.members != "none"]


def gradients_like(centres, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=g) for name, value in centres.items()}


@pytest.mark.parametrize("name", list(PLANS))
def test_the_first_task_starts_from_the_common_start_under_every_plan(name):
    pool = Pool(random_module(3))
    mixture = plan(name).mixture(pool, 1, SETTINGS)
    for site in (None, "site-1"):
        assert same(mixture.centres(site), {n: v[None] for n, v in pool.start.items()})
    assert mixture.alpha == "fixed" and not mixture.probes and mixture.report() == []
    assert same(mixture.step({}, 0.05).centres(), mixture.centres())


@pytest.mark.parametrize("name", MIXED)
def test_a_mixture_does_not_depend_on_the_order_of_arrival(name):
    pairs = [(f"site-{i}", t) for t in (1, 2) for i in (1, 2, 3)]
    one, other = (plan(name).mixture(pool_of(order=o), 3, SETTINGS) for o in (pairs, pairs[::-1]))
    for site in (None, "site-1", "site-3", "never-seen"):
        assert same(one.centres(site), other.centres(site))
    assert one.report() == other.report() == json.loads(json.dumps(one.report()))


def test_one_cluster_of_fixed_weight_is_the_mean_of_the_pool_to_the_bit():
    pool = pool_of()
    one = PLANS["fedkei"].mixture(pool, 3, FedKEIConfig(clusters=1)).centres()
    assert same(one, PLANS["pool_mean"].mixture(pool, 3, SETTINGS).centres())
    for name in NAMES:
        mean = torch.stack([m.tensors[name] for m in pool.modules]).double().mean(0).float()
        torch.testing.assert_close(one[name][0], mean, rtol=1.2e-7, atol=0)


def test_without_an_outer_step_fedkei_is_variant_b_to_the_bit():
    pool, settings = pool_of(), SETTINGS.replace(eta_out=0.0)
    kei, b = (PLANS[name].mixture(pool, 3, settings) for name in ("fedkei", "variant_b"))
    assert not kei.probes and not b.probes and PLANS["fedkei"].mixture(pool, 3, SETTINGS).probes
    assert same(kei.step(gradients_like(kei.centres()), 0.0).centres(), b.centres())
    assert kei.alpha == b.alpha == "learnt"


def test_one_cluster_for_each_last_module_is_apple_to_the_bit():
    pool = pool_of(sites=3, tasks=1)
    settings = FedKEIConfig(clusters=3, eta_out=0.0)
    kei, apple = (PLANS[name].mixture(pool, 2, settings) for name in ("fedkei", "apple"))
    assert same(kei.centres(), apple.centres()) and kei.alpha == apple.alpha
    assert torch.equal(apple.centres()["head.bias"], torch.stack([m.tensors["head.bias"] for m in pool.modules]))


def test_fedavg_and_its_relatives_mix_the_last_modules_alone():
    pool = pool_of(sites=2, tasks=3)
    for name in ("fedavg", "fedprox", "ffa_lora", "per_fedavg", "flwf"):
        found = PLANS[name].mixture(pool, 3, SETTINGS).centres()
        own = [m.tensors["head.weight"] for m in pool.modules if m.task == 2]
        torch.testing.assert_close(found["head.weight"][0], torch.stack(own).mean(0))


def test_own_last_is_for_its_site_alone():
    pool = pool_of()
    mixture = PLANS["own_last"].mixture(pool, 3, SETTINGS.replace(min_cluster_sites=3))
    assert torch.equal(mixture.centres("site-2")["head.bias"][0], pool.last(3)[1].tensors["head.bias"])
    assert same(mixture.centres("new"), {n: v[None] for n, v in pool.start.items()})
    assert {entry["for"] for entry in mixture.report()} == set(pool.sites)


def test_sites_as_clusters():
    pool = pool_of(sites=3, tasks=2)
    found = PLANS["variant_a"].mixture(pool, 3, SETTINGS)
    own = [m.tensors["head.weight"] for m in pool.modules if m.site == "site-2"]
    torch.testing.assert_close(found.centres()["head.weight"][1], torch.stack(own).mean(0))


def test_similar_modules_weigh_more_and_equal_ones_alike():
    line = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    weights = similarity(line @ line.T, 0)[:, 0]
    assert weights.sum() == pytest.approx(1) and weights[0] > weights[1] > weights[2] > 0
    assert torch.allclose(similarity(torch.ones(4, 4, dtype=torch.float64), 2), torch.full((4, 1), 0.25).double())
    assert similarity(torch.ones(1, 1, dtype=torch.float64), 0).tolist() == [[1.0]]
    pool = pool_of()
    mixture = PLANS["fedamp"].mixture(pool, 3, SETTINGS)
    assert not same(mixture.centres("site-1"), mixture.centres("site-2"))
    assert same(mixture.centres("new"), PLANS["fedavg"].mixture(pool, 3, SETTINGS).centres())


def test_the_step_moves_beta_by_the_gradient_and_tells_how_far():
    pool = pool_of()
    mixture = PLANS["fedkei"].mixture(pool, 3, SETTINGS)
    moved = mixture.step(gradients_like(mixture.centres()), 0.05)
    assert not same(moved.centres(), mixture.centres())
    for entry in moved.report():
        assert entry["distance"] > 0
        assert sum(m["beta0"] for m in entry["members"]) == pytest.approx(1)
        change = sum((m["beta"] - m["beta0"]) ** 2 for m in entry["members"]) ** 0.5
        assert change == pytest.approx(min(1, entry["distance"]))
    with pytest.raises(ExchangeError, match="columns"):
        mixture.step({name: value[:1] for name, value in gradients_like(mixture.centres()).items()}, 0.05)


@pytest.mark.parametrize("name", [name for name in MIXED if name != "own_last"])
@pytest.mark.parametrize("least", [2, 3, 4])
def test_no_centre_is_of_fewer_sites_than_the_minimum(name, least):
    pool = pool_of(sites=3, tasks=2)
    settings = SETTINGS.replace(min_cluster_sites=least, clusters=6)
    mixture = plan(name).mixture(pool, 3, settings)
    if least == 4:
        assert mixture.parts is None and not mixture.own and not mixture.probes
        return
    assert mixture.report()
    for entry in mixture.report():
        assert len({member["site"] for member in entry["members"] if member["beta"]}) >= least


def test_more_clusters_than_modules_and_a_pool_of_one_and_equal_modules():
    pool = pool_of(sites=1, tasks=1)
    assert PLANS["fedkei"].mixture(pool, 2, SETTINGS).centres()["head.bias"].shape == (1, 2)
    pool = Pool(random_module(1))
    for site in ("a", "b", "c"):
        pool.add(site, 1, random_module(2))
    mixture = PLANS["fedkei"].mixture(pool, 2, SETTINGS)
    assert {kind: mixture.parts[kind].many for kind in KINDS} == {"adapter": 1, "head": 1}
    torch.testing.assert_close(mixture.centres()["head.bias"][0], pool.modules[0].tensors["head.bias"])


def test_an_unknown_plan_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'fedkei'"):
        plan("fedkey")


def test_sites_with_large_gaps_weigh_more_and_all_keep_some_weight():
    pool = Pool(random_module(1))
    for task in range(1, 9):
        for site, gap in (("a", 0.1), ("b", 0.4), ("c", None if task < 3 else 0.25)):
            pool.add(site, task, random_module(task), gap=gap)
    found = [PLANS["fedga"].mixture(pool, task, SETTINGS).parts["head"].beta[:, 0] for task in (2, 9)]
    for weights in found:
        assert weights.sum() == pytest.approx(1) and weights[1] > weights[2] > weights[0] > 0
    assert found[1][1] > found[0][1]
    again = Pool(pool.start)
    again.load(*pool.state())
    assert torch.equal(PLANS["fedga"].mixture(again, 9, SETTINGS).parts["head"].beta[:, 0], found[1])
    same_as_mean = pool_of()
    assert same(
        PLANS["fedga"].mixture(same_as_mean, 3, SETTINGS).centres(),
        PLANS["fedavg"].mixture(same_as_mean, 3, SETTINGS).centres(),
    )
