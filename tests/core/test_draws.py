"""What must stay secret has a seed of full width, and no path to a generator with a short one."""

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import fedtar_flare
from fedtar_flare.core.draws import SECRET, derived_seed, orders, standard_normals, uniforms

PUBLIC_SEEDS = {
    "core/draws.py",  # a simulation's; orders() decides
    "learning/learner.py",  # of a simulation's DP-SGD, which protects nobody
    "learning/pretraining.py", "learning/diagnosis.py", "learning/comparison.py", "learning/canaries.py",
    "methods/fedtar/patient_lora.py", "methods/fedtar/policy.py",
    "models/adapters/kinds.py", "models/adapters/lora.py", "models/encoders.py", "models/classifier.py",
    "models/learned_prompts.py", "models/report_generator.py", "models/vlm.py",
    "testing/federation.py",
}  # fmt: skip
"""Files that seed torch, by a number that everybody knows: of initial weights, above all, which sites must share."""


def test_no_other_file_seeds_torch():
    root = Path(fedtar_flare.__file__).parent
    seeds = re.compile(r"\.(manual_seed|seed_all)\b")
    files = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in root.rglob("*.py")}
    assert {name for name, text in files.items() if seeds.search(text)} == PUBLIC_SEEDS


def test_seeds_that_share_their_low_64_bits_give_other_orders_where_they_are_secret():
    seed = derived_seed(SECRET + 7, "site-1", "train")
    assert seed >= SECRET and derived_seed(7, "site-1", "train") < 2**56
    others = [seed ^ (1 << bit) for bit in range(254)]
    drawn = {tuple(next(orders(20, other))) for other in (seed, *others)}
    assert len(drawn) == 255


@pytest.mark.parametrize("seed", [3, derived_seed(SECRET, "x")], ids=["public", "secret"])
def test_orders_are_permutations_uniform_and_the_same_each_time(seed):
    drawn = list(islice(orders(4, seed), 4800))
    assert (drawn == list(islice(orders(4, seed), 4800)) and drawn[0] != drawn[1]) or drawn[1] != drawn[2]
    _, counts = np.unique([[tuple(order)] for order in drawn], axis=0, return_counts=True)
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > 1e-4
    assert list(next(orders(0, seed))) == []


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(1)], ids=["real", "simulated"])
def test_noise_is_normal_and_draws_are_uniform(generator):
    assert stats.kstest(standard_normals(20_000, generator).numpy(), "norm").pvalue > 1e-4
    assert stats.kstest(uniforms(20_000, generator).numpy(), "uniform").pvalue > 1e-4
