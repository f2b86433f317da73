"""The best round compares like with like."""

import math
import random

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


def test_a_site_that_is_absent_at_the_end_does_not_make_the_first_round_best():
    # the pooled mean says round 1 (1.0 against 1.8 at the end, when only the harder site is there)
    both = rounds({"easy": 0.1, "hard": 1.95}, {"easy": 0.05, "hard": 1.9}, {"hard": 1.8})
    assert best_round(both) == 3


def test_a_late_site_does_not_make_its_round_worse():
    assert best_round(rounds({"a": 0.5}, {"a": 0.4, "late": 9.0})) == 2
    assert best_round(rounds({"a": 0.4}, {"a": 0.5, "late": 0.01})) == 1


def test_sites_count_by_their_reports():
    assert best_round(rounds({"a": (1.0, 1), "b": (1.0, 9)}, {"a": (0.1, 1), "b": (1.2, 9)})) == 1


def test_rounds_without_a_site_in_common_go_by_their_order_and_equal_ones_by_the_first():
    assert best_round(rounds({"a": 0.1}, {"b": 5.0})) == 2
    assert best_round(rounds({"a": 0.5}, {"a": 0.5})) == 1


def test_without_a_known_loss_there_is_no_best_round():
    assert best_round([]) is best_round(rounds({})) is best_round(rounds({"a": None}, {"a": math.nan})) is None
    assert best_round(rounds({"a": None}, {"a": 3.0}, {})) == 2


def test_the_later_one_of_a_repeated_round_counts():
    first, second = rounds({"a": 0.5}, {"a": 0.7})
    again = rounds({"a": 0.9})[0]
    assert best_round([first, second, again]) == 2


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
