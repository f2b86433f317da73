"""Tasks in sequence; mixtures of the pool: layouts, clusters, weights, and the plans' identities to the bit."""

from datetime import datetime
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import cases

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.files import read_tensors, write_tensors
from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Sample, Visit
from fedtar_flare.methods.fedkei.config import PLANS, FedKEIConfig
from fedtar_flare.methods.fedkei.mixing import Layout, gram, initial_beta, kmeans, merge_small, origin_of, outer_step
from fedtar_flare.methods.fedkei.mixture import Pool, mixture_of, similarity
from fedtar_flare.methods.fedkei.tasks import TaskStream, order_of, without_some

TASKS = ("nodule", "effusion", "mass=tumour|metastasis")
LABELS = ("nodule", "effusion", "tumour", "metastasis", "other")


def visit(*labels, unsure=(), patient="p", known=True):
    about = {"labels": frozenset(labels) if known else None, "uncertain": frozenset(unsure)}
    return Visit(patient, "v", datetime(2020, 1, 1), Path("/x.png"), "A report.", "radiograph", **about)


def sample(*labels, patient="p"):
    return Sample(visit(*labels, patient=patient), None, None, 1, "train")


def rules(report):
    assert report == "A report."
    return frozenset({"nodule"}), frozenset({"effusion"})


STREAM, SKIN = TaskStream(TASKS), ("bcc", "akiec")
STREAMS = {"plain": STREAM, "by rules": TaskStream(TASKS, from_report=rules)}
STREAMS |= {"a base": TaskStream(SKIN, base=("melanoma",)), "two bases": TaskStream(SKIN, base=("melanoma", "none"))}


@pytest.mark.parametrize(("stream", "shown", "unsure", "known", "labels"), cases(__file__, "labels.yaml"))
def test_labels_of_a_visit_by_task(stream, shown, unsure, known, labels):
    seen = visit(*shown, unsure=unsure, known=known)
    assert [STREAMS[stream].label_of(seen, step) for step in range(1, len(labels) + 1)] == labels


@given(st.integers(1, 12), st.sampled_from(("synchronous", "reversed", "shuffled")), st.text("ab", max_size=3))
def test_an_order_is_a_permutation_that_site_and_seed_decide(count, order, site):
    indices = order_of(count, order, site, seed=3)
    assert sorted(indices) == list(range(count)) and indices == order_of(count, order, site, seed=3)
    assert order != "synchronous" or indices == tuple(range(count))
    assert order != "reversed" or indices == tuple(reversed(range(count)))
    assert len({order_of(6, "shuffled", f"{site}{i}", seed=3) for i in range(8)}) > 4, "sites differ"


def test_patients_are_counted_once_and_classes_of_too_few_are_not_reported():
    stream = TaskStream(("nodule",))
    samples = [sample("nodule", patient="a"), sample("nodule", patient="a"), sample(patient="b"), sample(patient="c")]
    examples = stream.examples([*samples, sample("other", patient="d")], 1)
    assert examples.labels.tolist() == [1, 1, 0, 0] and examples.patients == ["a", "a", "b", "c"]
    assert examples.patients_of(1) == {"a"} and examples.enough(1) and not examples.enough(2)
    assert examples.counts(1) == [2, 2] and examples.counts(2) == [2, 0]


LABELLED = st.lists(st.tuples(st.integers(0, 30), st.sets(st.sampled_from(LABELS), max_size=3)), max_size=60)


@given(LABELLED, st.integers(1, 6))
def test_no_two_tasks_differ_in_fewer_patients_than_the_smallest_cell(labelled, least):
    """Plain gradients of one task, less those of the other, gave a single patient's with cosine 1.0."""
    pool = [sample(*labels, patient=f"p{p}") for p, labels in labelled]
    tasks = []
    for step in range(1, len(STREAM) + 1):
        made = STREAM.examples(pool, step, least)
        labels = zip(map(id, made._samples), made.labels.tolist(), strict=True)
        tasks.append(dict(zip(labels, made.patients, strict=True)))
    for one, other in combinations(tasks, 2):
        patients = {(one | other)[key] for key in one.keys() ^ other.keys()}
        assert not patients or len(patients) >= least
        for less, more in ((one, other), (other, one)):  # nor does either have few that the other has not
            more = {key[0] for key in more}
            patients = {patient for (which, _), patient in less.items() if which not in more}
            assert not patients or len(patients) >= least


def test_a_withdrawal_changes_more_of_a_task_than_the_patient():
    people, parts = [Patient(f"p{n}", None, (visit(patient=f"p{n}"),)) for n in range(90)], []
    for some in (people, people, people[1:], people[:-1]):
        kept = without_some(Cohort("a", some, key=bytes(16), timeline=Timeline(1)))
        parts.append({s.visit.patient_id for s in kept.samples("train")})
    assert parts[0] == parts[1]
    assert all(len(one ^ other) > 5 for one, other in combinations(parts[1:], 2))


LORA = "base_model.model.encoder.a.qkv.lora_"
NAMES = {f"{LORA}A.weight": (2, 6), f"{LORA}B.weight": (9, 2), "head.bias": (2,), "head.weight": (2, 5)}


def random_module(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=g) for name, shape in NAMES.items()}


MODULE = random_module(0)
LAYOUT = Layout.of(MODULE)


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
        partitions = (labels for labels in product(range(clusters), repeat=n) if len(set(labels)) == clusters)
        best = min(cost(matrix, labels) for labels in partitions)
        assert cost(matrix, kmeans(gram(matrix), clusters)) == pytest.approx(best, rel=1e-9)


def test_equal_modules_share_a_cluster_of_no_more_than_distinct_modules_and_a_small_one_goes_to_the_nearest():
    matrix = points(3, seed=2)[:, [0, 1, 0, 2, 1, 0]]
    assert kmeans(gram(matrix), 5) == [0, 1, 0, 2, 1, 0]
    assert kmeans(gram(matrix[:, [0, 0, 0]]), 3) == [0, 0, 0]
    assert kmeans(gram(matrix[:, :1]), 3) == [0]
    assert kmeans(gram(torch.zeros(5, 3)), 2) == [0, 0, 0]
    line = torch.tensor([[0.0, 0.1, 5.0, 5.1, 4.0]])
    assert merge_small([0, 0, 1, 1, 2], list("ababc"), gram(line), 2) == [0, 0, 1, 1, 1]


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


SETTINGS = FedKEIConfig()
MIXED = [name for name, one in PLANS.items() if one.members != "none"]
PAIRS = [(f"site-{i}", t) for t in (1, 2) for i in (1, 2, 3)]


def pool_of(order=PAIRS):
    """Modules of each site and task near one of two patterns, by task; added in the ``order`` of these pairs."""
    pool = Pool(random_module(10_000))
    for site, task in order:
        near, noise = random_module(task % 2, 2.0), random_module(100 * int(site[-1:]) + 7 * task, 0.3)
        pool.add(site, task, {name: near[name] + noise[name] for name in NAMES})
    return pool


def mixed(name, pool, task=3, **settings):
    return mixture_of(PLANS[name], pool, task, SETTINGS.replace(**settings))


def same(a, b):
    """Whether two dictionaries of tensors hold the same bits."""
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def owners(modules):
    return [(m.site, m.task) for m in modules]


def test_a_module_is_the_start_plus_what_was_sent_and_a_checkpoint_gives_the_same_bits(tmp_path):
    pool, sent = pool_of(), random_module(2)
    pool.add("site-4", 3, sent)
    assert all(torch.equal(pool.modules[-1].tensors[name], pool.start[name] + sent[name]) for name in NAMES)
    tensors, info = pool.state()
    write_tensors(tmp_path / "pool", tensors, {"pool": info})
    read, kept = read_tensors(tmp_path / "pool")
    again = Pool(pool.start)
    again.load(read, kept["pool"])
    assert owners(again.modules) == owners(pool.modules)
    assert all(same(a.tensors, b.tensors) for a, b in zip(again.modules, pool.modules, strict=True))


def test_one_cluster_of_fixed_weight_is_the_mean_of_the_pool_to_the_bit():
    pool = pool_of()
    one = mixed("fedkei", pool, clusters=1).centres()
    assert same(one, mixed("pool_mean", pool).centres())
    for name in NAMES:
        mean = torch.stack([m.tensors[name] for m in pool.modules]).double().mean(0).float()
        torch.testing.assert_close(one[name][0], mean, rtol=1.2e-7, atol=0)


def test_without_an_outer_step_fedkei_is_variant_b_and_of_last_modules_apple_to_the_bit():
    pool = pool_of()
    kei, b = (mixed(name, pool, eta_out=0.0) for name in ("fedkei", "variant_b"))
    assert not kei.probes and not b.probes and mixed("fedkei", pool).probes
    gradients = {name: torch.ones_like(value) for name, value in kei.centres().items()}
    assert same(kei.step(gradients, 0.0).centres(), b.centres())
    kei, apple = (mixed(name, pool, 2, clusters=3, eta_out=0.0) for name in ("fedkei", "apple"))
    assert same(kei.centres(), apple.centres())
    last = torch.stack([m.tensors["head.bias"] for m in pool.before(2)])
    assert torch.equal(apple.centres()["head.bias"], last)
    assert {PLANS[name].alpha for name in ("fedkei", "variant_b", "apple")} == {"learnt"}


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ffa_lora", "per_fedavg", "flwf", "variant_a"])
def test_fedavg_and_its_relatives_mix_the_last_modules_alone_and_sites_are_clusters_of_variant_a(name):
    pool, by_site = pool_of(), name == "variant_a"
    own = [m.tensors["head.weight"] for m in pool.modules if (m.site == "site-2" if by_site else m.task == 2)]
    torch.testing.assert_close(mixed(name, pool).centres()["head.weight"][int(by_site)], torch.stack(own).mean(0))


def test_similar_modules_weigh_more_and_equal_ones_alike():
    line = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    weights = similarity(line @ line.T, 0)[:, 0]
    assert weights.sum() == pytest.approx(1) and weights[0] > weights[1] > weights[2] > 0
    assert torch.allclose(similarity(torch.ones(4, 4, dtype=torch.float64), 2), torch.full((4, 1), 0.25).double())
    assert similarity(torch.ones(1, 1, dtype=torch.float64), 0).tolist() == [[1.0]]
    mixture = mixed("fedamp", pool_of())
    assert not same(mixture.centres("site-1"), mixture.centres("site-2"))
    assert {entry["for"] for entry in mixture.report()} == {"site-1", "site-2", "site-3"}
    assert same(mixture.centres("new"), mixed("fedavg", pool_of()).centres())


def test_sites_with_large_gaps_weigh_more_and_all_keep_some_weight():
    pool = Pool(random_module(1))
    for task in range(1, 9):
        for site, gap in (("a", 0.1), ("b", 0.4), ("c", None if task < 3 else 0.25)):
            pool.add(site, task, random_module(task), gap=gap)
    early, late = (mixed("fedga", pool, task).parts["head"].beta[:, 0] for task in (2, 9))
    for weights in (early, late):
        assert weights.sum() == pytest.approx(1) and weights[1] > weights[2] > weights[0] > 0
    assert late[1] > early[1]
    again = Pool(pool.start)
    again.load(*pool.state())
    assert torch.equal(mixed("fedga", again, 9).parts["head"].beta[:, 0], late)
    assert same(mixed("fedga", pool_of()).centres(), mixed("fedavg", pool_of()).centres())


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("least", [2, 3, 4])
def test_no_centre_is_of_fewer_sites_than_the_minimum(name, least):
    mixture = mixed(name, pool_of(), min_cluster_sites=least, clusters=6)
    if least == 4:
        assert mixture.parts is None and not mixture.by_site and not mixture.probes
        return
    assert mixture.report()
    for entry in mixture.report():
        assert len({member["site"] for member in entry["members"] if member["beta"]}) >= least


def test_modules_are_ordered_by_task_and_site_whenever_they_came_and_a_site_takes_its_own_along():
    pool = pool_of([("site-2", 3), ("site-1", 1), ("site-1", 3), ("site-2", 1), ("site-1", 2)])
    assert owners(pool.modules) == [("site-1", 1), ("site-2", 1), ("site-1", 2), ("site-1", 3), ("site-2", 3)]
    assert owners(pool.last(3)) == [("site-1", 2), ("site-2", 1)]
    assert len(pool.before(3)) == 3 and pool.before(1) == () == pool.last(1)
    assert pool.leave("site-1") == 3 and owners(pool.modules) == [("site-2", 1), ("site-2", 3)]
    assert pool.leave("site-1") == 0
