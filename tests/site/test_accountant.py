"""Accounting against independent computations: one closed form, Opacus's accountants, and the ledger on disk."""

import json
import math
import multiprocessing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import locked
from fedtar_flare.site.accountant import Ledger, composed_mu, delta_of, epsilon_of


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 1.0), (0.5, 0.3), (2.0, 1.0), (8.0, 3.0), (40.0, 8.0)])
def test_delta_is_the_hockey_stick_divergence_of_two_gaussians(epsilon, mu):
    """delta(epsilon) = integral of max(0, p(x) - e^epsilon q(x)) with p = N(mu, 1), q = N(0, 1): no formula of ours."""
    difference = lambda x: stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x)  # noqa: E731
    start = epsilon / mu + mu / 2  # where the two cross
    integral, _ = integrate.quad(difference, start, start + 40, epsabs=1e-15, limit=500)
    assert delta_of(epsilon, mu) == pytest.approx(integral, rel=1e-6, abs=1e-14)


@given(st.floats(0.01, 30.0), st.floats(1e-12, 0.2))
def test_epsilon_is_the_smallest_that_keeps_delta(mu, delta):
    epsilon = epsilon_of(mu, delta)
    assert delta_of(epsilon, mu) <= delta
    assert epsilon == 0 or delta_of(epsilon * (1 - 1e-6), mu) > delta * (1 - 1e-9)


def test_a_weak_release_and_a_far_tail_are_finite():
    assert epsilon_of(1e-9, 1e-5) == 0.0
    assert 0 < epsilon_of(200.0, 1e-12) < 200**2
    with pytest.raises(ConfigError):
        epsilon_of(1.0, 0.0)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("releases", [{2.0: 1}, {1.0: 20}, {0.7: 3, 4.0: 50}, {10.0: 500}])
def test_epsilon_agrees_with_opacus(releases):
    """Opacus's Renyi accountant is an upper bound, its PRV accountant a numerical estimate of the same number."""
    accountants = pytest.importorskip("opacus.accountants")
    renyi, prv = accountants.RDPAccountant(), accountants.PRVAccountant()
    renyi.history = prv.history = [(z, 1.0, count) for z, count in releases.items()]
    ours = epsilon_of(composed_mu(releases), 1e-5)
    fine = [1 + x / 10.0 for x in range(1, 1000)]
    assert ours < renyi.get_epsilon(1e-5, alphas=fine) < 1.2 * ours
    assert prv.get_epsilon(1e-5, eps_error=0.01) == pytest.approx(ours, abs=0.02)


def test_the_ledger_outlives_a_restart_and_runs(tmp_path):
    file = tmp_path / "state" / "privacy_ledger.json"
    for run in ("first", "first", "second"):
        Ledger(file).add(run, 2.0)  # a new object each time, as in a new process
    spent = Ledger(file).spent(1e-5)
    assert spent.releases == 3 and spent.epsilon == pytest.approx(epsilon_of(math.sqrt(3) / 2, 1e-5))
    assert Ledger(file, scope="first").spent(1e-5).releases == 2
    assert Ledger(file).spent(1e-5, planned=[0.5]).epsilon == pytest.approx(epsilon_of(math.sqrt(3 / 4 + 4), 1e-5))
    assert Ledger(file).spent(1e-5).releases == 3  # planning spends nothing
    assert Ledger(tmp_path / "none.json").spent(1e-5).epsilon == 0.0


RUNS = ([], {"a": []}, *({"a": {z: n}} for z, n in (("2.0", -5), ("nan", 1), ("0", 1), ("2.0", 1.5), ("2.0", True))))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 2, "runs": {}}', *(json.dumps({"format": 1, "runs": runs}) for runs in RUNS)]
)
def test_a_damaged_ledger_is_never_a_fresh_budget(tmp_path, content):
    file = tmp_path / "privacy_ledger.json"
    file.write_text(content)
    with pytest.raises(FedTARError, match="cannot be read"):
        Ledger(file)


def _spend(file, count):
    for _ in range(count):
        with locked(file):
            Ledger(file).add("run", 1.0)


def test_two_jobs_at_once_lose_no_release(tmp_path):
    file, fork = tmp_path / "privacy_ledger.json", multiprocessing.get_context("fork")
    processes = [fork.Process(target=partial(_spend, file, 50)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert Ledger(file).spent(1e-5).releases == 150
