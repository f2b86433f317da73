import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.fedtar.demographics import DemographicMixture, profile_vector


def profiles(n, seed=0):
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.uniform(size=n), rng.uniform(0.2, 0.9, n), rng.integers(0, 2, n)])


def test_profile_is_equation_2_with_its_fallbacks():
    assert profile_vector(0.25, 40, "M", 70).tolist() == [0.25, 0.4, 1.0]
    assert profile_vector(0.25, None, "F", 70).tolist() == [0.25, 0.7, 0.0]
    assert profile_vector(0.25, None, None, None).tolist() == [0.25, 0.5, 0.5]
    assert profile_vector(0.25, 40, "M", None, ("age", "sex")).tolist() == [0.4, 1.0]
    for bad in ((0.1, 430, "M"), (0.1, -1, "M"), (1.5, 40, "M"), (0.1, float("nan"), "M")):
        with pytest.raises(DataError):
            profile_vector(*bad, 50)
    with pytest.raises(ConfigError):
        profile_vector(0.1, 40, "M", 50, ("sex",))


@pytest.mark.parametrize("n", [20, 200])
@pytest.mark.parametrize("components", [1, 4, 16])
def test_assignment_equals_scikit_learn(n, components):
    from sklearn.mixture import GaussianMixture

    data = profiles(n)
    mixture = DemographicMixture.fit(data, components=components, seed=3)
    reference = GaussianMixture(len(mixture.weights), covariance_type="diag")
    reference.weights_, reference.means_, reference.covariances_ = mixture.weights, mixture.means, mixture.variances
    reference.precisions_cholesky_ = 1 / np.sqrt(mixture.variances)
    unseen = profiles(50, seed=9)
    q = mixture.assign(unseen)
    np.testing.assert_allclose(q[:, : len(mixture.weights)], reference.predict_proba(unseen), atol=1e-6)


def test_few_patients_fit_what_they_allow_and_say_so():
    one = DemographicMixture.fit(np.array([[0.3, 0.5, 1.0]]))
    assert one.assign(profiles(4)).tolist() == [[1.0] + [0.0] * 15] * 4 and "1 distinct" in one.note
    few = DemographicMixture.fit(np.repeat(profiles(3), 5, axis=0))
    q = few.assign(profiles(10))
    assert q.shape == (10, 16) and (q[:, 3:] == 0).all() and "3 distinct" in few.note
    assert DemographicMixture.fit(profiles(40)).note == ""


def test_constant_columns_and_no_patient():
    constant = profiles(30)
    constant[:, 1:] = 0.5
    assert np.isfinite(DemographicMixture.fit(constant).assign(constant)).all()
    with pytest.raises(DataError, match="no training patient"):
        DemographicMixture.fit(np.zeros((0, 3)))
    with pytest.raises(DataError, match="finite"):
        DemographicMixture.fit(np.array([[np.nan, 0, 0], [0, 0, 0]]))
    with pytest.raises(DataError, match="fields"):
        DemographicMixture.fit(profiles(5)).assign(np.zeros((2, 2)))


def test_state_round_trips_and_the_fit_is_reproducible():
    data = profiles(60)
    first, second = (DemographicMixture.fit(data, seed=1) for _ in range(2))
    again = DemographicMixture.from_state(first.state())
    assert np.array_equal(first.assign(data), second.assign(data))
    assert np.array_equal(first.assign(data), again.assign(data))
    assert np.array_equal(DemographicMixture.fit(data[::-1], seed=1).means.shape, first.means.shape)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 3), min_size=1, max_size=5))
def test_rows_sum_to_one_however_far_away(rows):
    mixture = DemographicMixture.fit(profiles(40), seed=2)
    q = mixture.assign(np.array(rows))
    assert np.isfinite(q).all() and (q >= 0).all()
    np.testing.assert_allclose(q.sum(1), 1, atol=1e-6)
