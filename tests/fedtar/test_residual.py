import gc
import math
import random
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.fedtar import residual
from fedtar_flare.fedtar.residual import (
    WEIGHTINGS,
    SpilledUpdates,
    aggregation_weights,
    residual_step,
    telescoped_weights,
    weighted_mean,
)

SHAPES = {"a": (4, 3), "b": (5,), "c": ()}
FLOAT32 = torch.finfo(torch.float32).eps
steps = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=6)


def tensors(seed, dtype=torch.float32, shapes=None):
    generator = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in (shapes or SHAPES).items()}
    return {name: value.to(dtype) for name, value in made.items()}


def difference(after, before):
    return {name: after[name].double() - before[name].double() for name in before}


def norm(state):
    return torch.cat([v.double().flatten() for v in state.values()]).norm().item()


# ------------------------------------------------------------------ Theorems 1 and 2
@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 2**31))
def test_theorem_1_with_skipped_steps(plan, seed):
    alphas, taken = [a for a, _ in plan], [t for _, t in plan]
    w0 = w = tensors(seed)
    means = [tensors(seed + t + 1) for t in range(len(plan))]
    for alpha, took, mean in zip(alphas, taken, means, strict=True):
        if took:
            w, _, _ = residual_step(w, difference(mean, w), alpha)
    betas = telescoped_weights(alphas, taken)
    assert len(betas) == len(plan) + 1 and min(betas) >= 0 and math.fsum(betas) == pytest.approx(1, abs=1e-14)
    assert all(beta == 0 for beta, took in zip(betas[1:], taken, strict=True) if not took)
    for name in SHAPES:
        expected = sum(b * v[name].double() for b, v in zip(betas, [w0, *means], strict=True))
        torch.testing.assert_close(w[name].double(), expected, rtol=0, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.floats(0, 1), st.floats(-8, 8), st.integers(0, 2**31))
def test_theorem_2_up_to_the_rounding_of_the_master(alpha, magnitude, seed):
    w = tensors(seed)
    delta = {name: v * 10**magnitude for name, v in tensors(seed + 1, torch.float64).items()}
    moved, residual_norm, update_norm = residual_step(w, delta, alpha)
    assert residual_norm == pytest.approx(norm(difference(moved, w)), rel=1e-12, abs=1e-300)  # measured, not derived
    assert update_norm == pytest.approx(norm(delta), rel=1e-12)
    assert abs(residual_norm - alpha * update_norm) <= FLOAT32 * norm(moved) + 1e-12 * update_norm


def test_the_ends_of_alpha():
    w, goal = tensors(0), tensors(1)
    same, none, _ = residual_step(w, difference(goal, w), 0.0)
    there, _, _ = residual_step(w, difference(goal, w), 1.0)
    assert none == 0.0 and all(torch.equal(same[n], w[n]) and torch.equal(there[n], goal[n]) for n in w)


def test_the_residual_norm_shows_an_update_that_float32_loses():
    w = {"a": torch.ones(1000)}
    moved, residual_norm, update_norm = residual_step(w, {"a": torch.full((1000,), 1e-9)}, 0.5)
    assert torch.equal(moved["a"], w["a"]) and residual_norm == 0.0 and update_norm > 0


def test_a_step_changes_neither_of_its_inputs():
    w, delta = tensors(0), tensors(1, torch.float64)
    copies = [{n: v.clone() for n, v in state.items()} for state in (w, delta)]
    residual_step(w, delta, 0.5)
    assert all(torch.equal(s[n], c[n]) for s, c in zip((w, delta), copies, strict=True) for n in s)


def test_a_step_refuses_what_does_not_fit_and_names_it():
    w, delta = tensors(0), tensors(1, torch.float64)
    for alpha in (-0.1, 1.1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="alpha_t"):
            residual_step(w, delta, alpha)
    for change, words in (
        ({"b": torch.zeros(1)}, "'b' has shape"),  # would broadcast
        ({"b": torch.full((5,), math.nan)}, "'b'.*not finite"),
        ({"b": torch.full((5,), 1e300, dtype=torch.float64)}, "'b'.*not finite"),  # beyond float32
        ({"d": torch.zeros(1)}, "'d'"),
    ):
        with pytest.raises(ExchangeError, match=words):
            residual_step(w, delta | change, 0.5)
    with pytest.raises(ExchangeError, match=r"'a' of the master is torch\.float64"):
        residual_step(tensors(0, torch.float64), delta, 0.5)
    with pytest.raises(ExchangeError):
        residual_step({}, {}, 0.5)


def test_telescoped_weights_refuse_what_does_not_fit():
    with pytest.raises(ConfigError, match="2 alphas but 1"):
        telescoped_weights([0.5, 0.5], [True])
    with pytest.raises(ConfigError, match="alpha_2 = nan"):
        telescoped_weights([0.5, math.nan], [True, True])
    assert telescoped_weights([0.5, 0.5], [False, False]) == [1.0, 0.0, 0.0]


# ------------------------------------------------------------------ Equation 6: weights
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 10**9), max_size=8), st.sampled_from(WEIGHTINGS))
def test_weights_are_normalised_and_leave_out_sites_without_samples(counts, weighting):
    here = {site: n for site, n in counts.items() if n}
    if not here:
        with pytest.raises(ConfigError, match="nothing to average"):
            aggregation_weights(counts, weighting)
        return
    weights = aggregation_weights(counts, weighting)
    assert list(weights) == sorted(here) and math.fsum(weights.values()) == pytest.approx(1, abs=1e-12)
    sizes = {"samples": 1, "uniform": 0, "inverse": -1}
    first = min(here)
    for site in here:  # any two sites stand in the ratio that the weighting says
        expected = (here[site] / here[first]) ** sizes[weighting]
        assert weights[site] / weights[first] == pytest.approx(expected, rel=1e-12)


def test_weights_refuse_what_is_no_count():
    for bad in (-1, 1.5, math.nan, None):
        with pytest.raises(ConfigError, match="site hospital-b"):
            aggregation_weights({"hospital-a": 3, "hospital-b": bad})
    with pytest.raises(ConfigError, match="weighting 'median'"):
        aggregation_weights({"a": 1}, "median")


# ------------------------------------------------------------------ Equation 6: means
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_the_same_to_the_bit_in_any_order_of_arrival(tmp_path, dtype):
    updates = {f"site-{k}": {n: v * 10.0 ** (k - 3) for n, v in tensors(k, dtype).items()} for k in range(7)}
    weights = aggregation_weights({site: k + 1 for k, site in enumerate(updates)})
    in_memory = weighted_mean(updates, weights)
    for seed in range(5):
        order = random.Random(seed).sample(sorted(updates), len(updates))
        with SpilledUpdates(tmp_path / "updates", SHAPES) as spilled:
            for site in order:
                spilled.add(site, updates[site])
            mean = spilled.mean({site: weights[site] for site in reversed(order)})
        shuffled = weighted_mean({s: updates[s] for s in order}, {s: weights[s] for s in reversed(order)})
        for name in SHAPES:
            assert mean[name].dtype == torch.float64
            assert torch.equal(mean[name], in_memory[name]) and torch.equal(shuffled[name], in_memory[name])
    for name in SHAPES:
        stack = torch.stack([updates[s][name].double() for s in sorted(updates)])
        expected = torch.tensordot(torch.tensor([weights[s] for s in sorted(updates)], dtype=torch.float64), stack, 1)
        torch.testing.assert_close(in_memory[name], expected, rtol=1e-12, atol=1e-12)


def test_only_the_weighted_sites_enter(tmp_path):
    with SpilledUpdates(tmp_path / "updates", SHAPES) as spilled:
        for k in range(3):
            spilled.add(str(k), tensors(k))
        mean = spilled.mean({"1": 1.0})
    assert all(torch.equal(mean[n], tensors(1)[n].double()) for n in SHAPES)


def test_updates_wait_on_disk_not_in_memory_and_the_folder_goes(tmp_path):
    folder = tmp_path / "run" / "updates"
    folder.mkdir(parents=True)
    (folder / "left-over.safetensors").write_bytes(b"of a killed run")
    with pytest.raises(RuntimeError), SpilledUpdates(folder, SHAPES) as spilled:
        assert not list(folder.iterdir())
        update = tensors(0)
        alive = [weakref.ref(v) for v in update.values()]
        spilled.add("site", update)
        del update
        gc.collect()
        assert not any(ref() is not None for ref in alive) and len(list(folder.iterdir())) == 1
        raise RuntimeError
    assert not folder.exists() and folder.parent.exists()


def test_any_site_name_and_tensors_that_share_memory(tmp_path):
    shared = torch.arange(6.0)
    update = {"a": shared, "b": shared.view(2, 3), "c": shared.view(2, 3).T}
    with SpilledUpdates(tmp_path / "updates", update) as spilled:
        spilled.add("../a/..", update)
        spilled.add("", {n: 3 * v for n, v in update.items()})
        mean = spilled.mean({"../a/..": 0.5, "": 0.5})
        assert torch.equal(spilled.mean({"../a/..": 0.5, "": 0.5})["b"], mean["b"])  # summing changes nothing on disk
    assert torch.equal(mean["a"], 2 * shared.double()) and torch.equal(mean["b"], 2 * update["b"].double())
    assert list(tmp_path.iterdir()) == []


def test_a_bad_update_is_refused_by_name_and_leaves_nothing(tmp_path):
    good = tensors(0)
    with SpilledUpdates(tmp_path / "updates", SHAPES) as spilled:
        with pytest.raises(ExchangeError, match=r"'a'.*not finite"):
            spilled.add("site-b", good | {"a": torch.full((4, 3), math.inf)})
        spilled.add("site-a", good)
        for change, words in (
            ({"b": torch.zeros(1)}, "'b' has shape"),
            ({"c": torch.tensor(math.nan)}, "'c'.*not finite"),
            ({"d": torch.zeros(1)}, "'d'"),
        ):
            with pytest.raises(ExchangeError, match=words):
                spilled.add("site-b", good | change)
        with pytest.raises(ExchangeError, match="already"):
            spilled.add("site-a", tensors(1))
        with pytest.raises(ConfigError, match="site-b has a weight"):
            spilled.mean({"site-a": 0.5, "site-b": 0.5})
        assert len(list((tmp_path / "updates").iterdir())) == 1
        assert torch.equal(spilled.mean({"site-a": 1.0})["a"], good["a"].double())


def test_a_half_written_update_is_never_summed(tmp_path, monkeypatch):
    def full_disk(data, path):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    with SpilledUpdates(tmp_path / "updates", SHAPES) as spilled:
        with monkeypatch.context() as patch:
            patch.setattr(residual, "save_file", full_disk)
            with pytest.raises(OSError, match="no space"):
                spilled.add("site-a", tensors(0))
        assert not list((tmp_path / "updates").glob("*.safetensors"))  # it never got its name
        with pytest.raises(ConfigError, match="site-a has a weight"):
            spilled.mean({"site-a": 1.0})
        spilled.add("site-a", tensors(1))
        assert torch.equal(spilled.mean({"site-a": 1.0})["a"], tensors(1)["a"].double())


def test_means_refuse_weights_that_do_not_sum_to_one_and_misfitting_updates():
    updates = {"a": tensors(0), "b": tensors(1)}
    for weights, words in (
        ({}, "sum to 0"),
        ({"a": 0.5, "b": 0.4}, "sum to 0.9"),
        ({"a": 1.5, "b": -0.5}, "not within"),
        ({"a": math.nan, "b": 0.5}, "site a"),
        ({"a": 0.5, "z": 0.5}, "site z"),
    ):
        with pytest.raises(ConfigError, match=words):
            weighted_mean(updates, weights)
    half = {"a": 0.5, "b": 0.5}
    for change, words in (({"b": torch.zeros(1)}, "'b' has shape"), ({"d": torch.zeros(1)}, "'d'")):
        with pytest.raises(ExchangeError, match=words):
            weighted_mean(updates | {"b": updates["b"] | change}, half)
    with pytest.raises(ExchangeError, match=r"'a'.*not finite"):
        weighted_mean(updates | {"b": updates["b"] | {"a": torch.full((4, 3), math.nan)}}, half)
    with pytest.raises(ConfigError, match="at least one tensor"):
        SpilledUpdates("never-made", [])
