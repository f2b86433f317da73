"""The best round compares like with like."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.record.events import SiteValidation, Validation
from fedtar_flare.record.log import best_round


def rounds(*losses):
    """Rounds 1, 2, ... of site to loss, or to (loss, reports)."""
    pairs = [{s: v if isinstance(v, tuple) else (v, 10) for s, v in one.items()} for one in losses]
    return [
        Validation(round=r, sites={site: SiteValidation(validation_loss=loss, n=n) for site, (loss, n) in one.items()})
        for r, one in enumerate(pairs, 1)
    ]


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        # the pooled mean says round 1 (1.0 against 1.8 at the end, when only the harder site is there)
        pytest.param([{"easy": 0.1, "hard": 1.95}, {"easy": 0.05, "hard": 1.9}, {"hard": 1.8}], 3, id="one is absent"),
        pytest.param([{"a": 0.5}, {"a": 0.4, "late": 9.0}], 2, id="a late site with a large loss"),
        pytest.param([{"a": 0.4}, {"a": 0.5, "late": 0.01}], 1, id="a late site with a small loss"),
        pytest.param([{"a": (1.0, 1), "b": (1.0, 9)}, {"a": (0.1, 1), "b": (1.2, 9)}], 1, id="by reports"),
        pytest.param([{"a": 0.1}, {"b": 5.0}], 2, id="no site in common"),
        pytest.param([{"a": 0.5}, {"a": 0.5}], 1, id="equal ones"),
        pytest.param([], None, id="no round"),
        pytest.param([{}], None, id="no site"),
        pytest.param([{"a": None}, {"a": math.nan}], None, id="no loss"),
        pytest.param([{"a": None}, {"a": 3.0}, {}], 2, id="one loss"),
    ],
)
def test_the_best_round_compares_like_with_like(losses, best):
    assert best_round(rounds(*losses)) == best


def test_the_later_one_of_a_repeated_round_counts():
    assert best_round([*rounds({"a": 0.5}, {"a": 0.7}), *rounds({"a": 0.9})]) == 2


LOSSES = st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 10), max_size=4)


@given(st.lists(LOSSES, min_size=1, max_size=8), st.integers(0, 2**32))
def test_a_further_round_becomes_the_best_or_changes_nothing(losses, seed):
    validations = rounds(*losses)
    for r in range(1, len(validations) + 1):
        assert best_round(validations[:r]) in (best_round(validations[: r - 1]), r)
    shuffled = random.Random(seed).sample(validations, len(validations))
    assert best_round(shuffled) == best_round(validations)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=8))
def test_with_the_same_sites_it_is_the_round_of_the_lowest_mean(losses):
    means = [(a * 10 + b * 10) / 20 for a, b in losses]
    assert best_round(rounds(*({"a": a, "b": b} for a, b in losses))) == 1 + means.index(min(means))
