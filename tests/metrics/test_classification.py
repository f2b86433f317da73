"""AUC, areas under learning curves, and Welch's test against scikit-learn and scipy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from fedtar_flare.metrics.classification import auc, auc_of_draws, best_epoch, epochs_to, lca, welch


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-4, 4)), max_size=60))
def test_auc_is_scikit_learns_also_with_ties(pairs):
    labels, scores = [label for label, _ in pairs], [score / 3 for _, score in pairs]
    if len(set(labels)) < 2:
        assert auc(labels, scores) is None
    else:
        assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
        assert auc(labels, [-s for s in scores]) == pytest.approx(1 - auc(labels, scores), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_a_drawn_patient_counts_as_often_as_it_was_drawn(seed):
    draw = np.random.default_rng(seed)
    many, patients = int(draw.integers(2, 14)), int(draw.integers(1, 6))
    labels, places = draw.integers(0, 2, many), draw.integers(0, patients, many)
    scores = draw.integers(0, 4, (many, 3)) / 4
    draws = draw.multinomial(patients, [1 / patients] * patients, 5).astype(float)
    found = auc_of_draws(labels.tolist(), scores, places.tolist(), draws)
    for r, counts in enumerate(draws):
        repeated = np.repeat(np.arange(many), counts[places].astype(int))
        for column in range(3):
            wanted = auc(labels[repeated], scores[repeated, column])
            assert np.isnan(found[r, column]) if wanted is None else np.isclose(found[r, column], wanted)


def test_areas_under_curves_and_epochs():
    curve = (0.5, 0.6, 0.8, 0.8)
    assert lca(curve) == pytest.approx(2.2 / 3)
    assert lca((0.5, None, 0.7)) is None and lca((None, 0.7)) == pytest.approx(0.7)
    assert lca((0.7, None)) is None and lca((0.5,)) is None and lca(()) is None
    assert epochs_to(curve, 0.8) == 2 and epochs_to(curve, 0.9) is None and epochs_to((None, 0.9), 0.5) == 1
    assert best_epoch(curve) == 2 and best_epoch((None, None)) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_welch_is_scipys(a, b):
    if np.var(a) + np.var(b) < 1e-12:
        return
    assert welch(a, b) == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue, rel=1e-9, abs=1e-12)


def test_welch_without_variance():
    assert welch([0.5, 0.5], [0.5, 0.5]) == 1 and welch([0.6, 0.6], [0.5, 0.5]) == 0
