import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedtar_flare.metrics.agreement import LabelCounts
from fedtar_flare.metrics.language import language_statistics
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval, bleu_score, compare, holm, label_score, mean_score, over_seeds


def f1_score(patients, hits, named, actual):
    """Micro F1 of one class."""
    columns = (np.asarray(side, dtype=float)[:, None] for side in (hits, named, actual))
    return label_score(patients, LabelCounts(("any",), *columns), "micro", "f1")


def values_of(n, shift=0.0, seed=1):
    return np.random.default_rng(seed).normal(shift, 1, size=n)


def test_interval_of_a_mean_is_scipys():
    x = values_of(400)
    got = over_seeds([mean_score(range(400), x)])
    expected = stats.bootstrap((x,), np.mean, n_resamples=5000, method="percentile", random_state=3)
    assert got.value == pytest.approx(x.mean())
    assert got[1:] == pytest.approx(tuple(expected.confidence_interval), abs=0.012)


def test_reports_of_a_patient_are_drawn_together():
    x = np.repeat(values_of(50), 8)  # eight equal reports per patient hold no more than one
    together = over_seeds([mean_score(np.repeat(np.arange(50), 8), x)])
    once = over_seeds([mean_score(range(50), values_of(50))])
    apart = over_seeds([mean_score(range(400), x)])
    assert together[1:] == pytest.approx(once[1:])
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_ratio_scores_are_those_of_the_drawn_corpus():
    generator = np.random.default_rng(0)
    hits = generator.integers(0, 3, size=30)
    named, there = hits + generator.integers(0, 2, 30), hits + generator.integers(0, 2, 30)
    sums = f1_score(np.arange(30) % 11, hits, named, there)
    assert sums.value() == pytest.approx(2 * hits.sum() / (named.sum() + there.sum()))
    words = ["lung", "clear", "no", "effusion", ".", "nodule"]
    draw = lambda: [[words[i] for i in generator.integers(6, size=9)] for _ in range(30)]  # noqa: E731
    references, hypotheses = draw(), draw()
    statistics = language_statistics(references, hypotheses)
    for n in (1, 4):
        bleu = bleu_score(np.arange(30) % 11, statistics, n)
        assert bleu.value() == pytest.approx(statistics.scores()[f"bleu_{n}"])
        alone = language_statistics(
            [r for i, r in enumerate(references) if i % 11 == 4], [h for i, h in enumerate(hypotheses) if i % 11 == 4]
        )
        assert bleu.of_each[4] == pytest.approx(alone.scores()[f"bleu_{n}"])
        interval = over_seeds([bleu], replicates=500)
        assert interval.low <= interval.value <= interval.high


def test_few_patients_are_permuted_exactly_as_scipy_does():
    a, b = values_of(9, 0.4, seed=5), values_of(9, 0.0, seed=6)
    got = compare([mean_score(range(9), a)], [mean_score(range(9), b)])
    expected = stats.permutation_test(
        (a, b),
        lambda x, y, axis: (x - y).mean(axis=axis),
        permutation_type="samples",
        n_resamples=np.inf,
        vectorized=True,
    )
    assert got.p == pytest.approx(expected.pvalue)


def test_many_patients_are_permuted_at_random():
    a, b = values_of(60, 0.25, seed=5), values_of(60, 0.0, seed=6)
    got = compare([mean_score(range(60), a)], [mean_score(range(60), b)])
    assert got.p == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.02)
    assert got.difference.value == pytest.approx((a - b).mean())
    assert got.win_rate == pytest.approx((a > b).mean())
    better = compare([mean_score(range(60), a + 5)], [mean_score(range(60), b)])
    assert better.p == pytest.approx(1 / 5001) and better.difference.low > 0 and better[2:] == (1.0, 1.0)


def test_equal_systems_do_not_differ():
    same = mean_score(range(40), values_of(40))
    got = compare([same], [same])
    assert got.p == 1.0 and got.difference == Interval(0.0, 0.0, 0.0) and got[2:] == (0.5, 0.5)
    assert compare([same], [mean_score(range(40), values_of(40) + 1)], higher_is_better=False)[2:] == (1.0, 1.0)
    # BLEU without a common word is a guard's value, which is no gain
    below = mean_score(range(40), values_of(40) + 1e-5)
    assert compare([below], [same])[1:] == (pytest.approx(1 / 5001), 1.0, 1.0)
    assert compare([below], [same], tie=SCORES["bleu_4"].tie)[1:] == (1.0, 0.5, 0.5)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_by_its_definition(p_values):
    corrected = holm(p_values)
    m = len(p_values)
    rank = sorted(p_values.values())
    for name, p in p_values.items():
        steps = [min(1.0, (m - i) * q) for i, q in enumerate(rank) if q <= p]
        last = rank.index(p)  # of equal values all get the first one's
        assert corrected[name] == pytest.approx(max(steps[: last + 1]))
        assert p <= corrected[name] <= 1


def test_over_seeds_adds_the_spread_of_seeds_to_that_of_patients():
    x = values_of(300)
    shifts = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    runs = [mean_score(range(300), x + shift) for shift in shifts]
    got = over_seeds(runs)
    # the mean of five seeds drawn from five, and of the same 300 patients for all
    half = 1.96 * np.sqrt(shifts.var() / 5 + x.var() / 300)
    assert got.value == pytest.approx(x.mean())
    assert (got.high - got.low) / 2 == pytest.approx(half, rel=0.06)
    equal = over_seeds([runs[2]] * 5)
    assert (equal.high - equal.low) / 2 == pytest.approx(1.96 * x.std() / np.sqrt(300), rel=0.06)
    difference = compare(runs, [mean_score(range(300), x)] * 5).difference
    assert (difference.high - difference.low) / 2 == pytest.approx(1.96 * np.sqrt(shifts.var() / 5), rel=0.08)


def test_a_score_that_is_nowhere_defined_has_no_interval():
    nothing = over_seeds([f1_score(range(5), np.zeros(5), np.zeros(5), np.zeros(5))], replicates=20)
    assert np.isnan(nothing).all()
    once = over_seeds([f1_score(range(5), [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0])], replicates=200)
    assert once == Interval(1.0, 1.0, 1.0)


def test_parts_do_not_change_a_result(monkeypatch):
    sums = mean_score(range(30), values_of(30))
    whole = over_seeds([sums], replicates=300)
    monkeypatch.setattr("fedtar_flare.metrics.significance._CELLS", 1000)
    assert over_seeds([sums], replicates=300) == whole
