from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.data.cells import keyed_unit
from fedtar_flare.methods.fedtar.config import PROFILES, PatientConfig
from fedtar_flare.methods.fedtar.demographics import DemographicMixture, profiles

KEY = b"a key of a site!"


def sample(age, sex):
    """A visit of patient p1."""
    return SimpleNamespace(visit=SimpleNamespace(patient_id="p1", age=age), sex=sex)


def made_up(n, seed=0):
    """Hash, age in whole years, sex."""
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.uniform(size=n), rng.integers(20, 90, n) / 100, rng.integers(0, 2, n)])


@pytest.fixture(scope="module")
def fitted():
    return DemographicMixture.fit(made_up(40), seed=2)


@pytest.mark.parametrize(
    ("age", "sex", "median", "fields", "expected"),
    [(40, "M", 70, PROFILES[0], [0.4, 1.0]), (0, "F", 70, PROFILES[0], [0.0, 0.0]),
     (None, "F", 70, PROFILES[0], [0.7, 0.0]), (None, None, None, PROFILES[0], [0.5, 0.5]),
     (130, "O", None, PROFILES[0], [1.3, 0.5]), (40, "M", None, PROFILES[1], [0.4, 1.0])],
)  # fmt: skip
def test_profile_is_equation_2_with_its_fallbacks(age, sex, median, fields, expected):
    identity = [keyed_unit("profile:p1", KEY)] if "hash" in fields else []
    assert profiles([sample(age, sex)], KEY, median, fields).tolist() == [identity + expected]


@pytest.mark.parametrize("n", [20, 60, 300])
@pytest.mark.parametrize("components", [1, 4, 16])
@pytest.mark.parametrize("columns", [slice(0, 3), slice(1, 3)])
def test_responsibilities_equal_scikit_learn(n, components, columns):
    from sklearn.mixture import GaussianMixture

    mixture = DemographicMixture.fit(made_up(n)[:, columns], components=components, seed=3)
    reference = GaussianMixture(len(mixture.weights), covariance_type="diag")
    reference.weights_, reference.means_, reference.covariances_ = mixture.weights, mixture.means, mixture.variances
    reference.precisions_cholesky_ = 1 / np.sqrt(mixture.variances)
    unseen = made_up(50, seed=9)[:, columns]  # patients that the fit has not seen
    padded = mixture.assign(unseen)
    q = padded[:, : len(mixture.weights)]
    np.testing.assert_allclose(q, reference.predict_proba(unseen), rtol=0, atol=1e-10)
    assert padded.shape == (50, components) and not padded[:, q.shape[1] :].any()


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(*[st.floats(-1e100, 1e100)] * 3), min_size=1, max_size=5))
def test_rows_sum_to_one_however_far_away(fitted, rows):
    q = fitted.assign(np.array(rows))
    assert np.isfinite(q).all() and (q >= 0).all()
    np.testing.assert_allclose(q.sum(1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "distinct"),
    [(np.array([[0.3, 0.5, 1.0]]), 1), (np.full((9, 3), 0.5), 1),  # nine patients that look alike
     *((np.repeat(made_up(n), 5, axis=0), n) for n in (2, 3, 15))],
)  # fmt: skip
def test_fewer_profiles_than_components_fit_what_they_allow_and_say_so(rows, distinct, caplog):
    few = DemographicMixture.fit(rows)
    q = few.assign(made_up(10))
    assert q.shape == (10, 16) and not q[:, distinct:].any()
    assert [record.args for record in caplog.records] == [(distinct, 16)]
    np.testing.assert_allclose(q.sum(1), 1, atol=1e-6)
    assert set(few.assign(rows).argmax(1)) == set(range(distinct))  # each patient has a component


@given(patients=st.integers(0, 10**6), components=st.integers(1, 64), each=st.integers(1, 100))
def test_components_grow_with_the_patients_up_to_those_of_the_job(patients, components, each):
    config = PatientConfig(components=components, patients_per_component=each)
    number = config.components_for(patients)
    assert 1 <= number <= components and number <= config.components_for(patients + 1)
    if patients >= components * each:
        assert number == components
    elif number > 1:
        assert abs(number * each - patients) <= each / 2


@pytest.mark.parametrize("n", [5, 60, 300])
def test_the_fit_depends_on_the_seed_and_the_profiles_but_not_on_their_order(n):
    data = made_up(n)
    first = DemographicMixture.fit(data, seed=1)
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(data)
        again = DemographicMixture.fit(shuffled, seed=1)
        assert all(np.array_equal(v, again.state()[k]) for k, v in first.state().items())
    assert (np.diff(first.means[:, 0]) >= 0).all()
