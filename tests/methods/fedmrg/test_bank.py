"""The feature bank: whose rows, how many, for how long, in which order; and how well it gives patients away."""

import json
from datetime import datetime
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import cases
from torch.nn.functional import normalize as unit

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Sample, Visit
from fedtar_flare.methods.fedmrg.bank import MOST_ROWS, ROUNDS, FeatureBank, SiteBank, membership_auc, rows_of_round
from fedtar_flare.methods.fedmrg.contract import CONTRACT
from fedtar_flare.protocol.exchange import check_tensors
from fedtar_flare.site.policy import GUARD, PRIVACY_FILTER
from fedtar_flare.site.site_file import Bounds, SiteConfig
from fedtar_flare.testing import executor_of, task_of

CASES = cases(__file__, "cases.yaml")


def samples(patients, visits=2):
    def sample(p, v):
        visit = Visit(f"p{p}", f"v{v}", datetime(2020, 1, 1 + v), Path("x"), "text", "ct")
        return Sample(visit, None, None, 1, "train")

    return [sample(p, v) for p in range(patients) for v in range(visits)]


def normal(*shape, seed=0):
    return unit(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


@given(st.tuples(st.integers(0, 23), st.integers(1, 7), st.integers(1, 6), st.integers(1, 12)), st.integers(0, 2**56))
def test_rows_of_distinct_patients_who_stay_together_and_come_again_after_all_others(numbers, seed):
    patients, rows, group, rounds = numbers
    pool = samples(patients)
    chosen = [rows_of_round(pool, r, rows, group, seed) for r in range(1, rounds + 1)]
    groups = patients // group
    together = {}
    for round_ in chosen:
        names = [[s.visit.patient_id for s in row] for row in round_]
        assert len(round_) == min(rows, groups) and all(len(row) == group for row in names)
        flat = [name for row in names for name in row]
        assert len(set(flat)) == len(flat), "no patient is in two rows of a round"
        for row in names:
            for name in row:
                assert together.setdefault(name, row) == row, "the patients of a row stay together"
    if groups:
        cycle = groups // min(rows, groups)
        for start in range(0, rounds - cycle + 1, cycle):
            flat = [row[0].visit.patient_id for round_ in chosen[start : start + cycle] for row in round_]
            assert len(set(flat)) == len(flat), "each row comes once before any comes again"
    assert chosen == [rows_of_round(pool, r, rows, group, seed) for r in range(1, rounds + 1)]


def test_a_patient_who_comes_again_comes_with_another_visit():
    first, second = (rows_of_round(samples(2), r, 2, 1, seed=1) for r in (1, 2))
    assert {row[0].visit.visit_id for row in first} == {"v0"} and {row[0].visit.visit_id for row in second} == {"v1"}


@given(visits=st.lists(st.integers(1, 3), min_size=5, max_size=20), group=st.integers(2, 5), rounds=st.integers(2, 9))
def test_no_two_rows_of_a_run_differ_in_one_patient_s_visit(visits, group, rounds):
    pool = [s for p, n in enumerate(visits) for s in samples(p + 1, n)[-n:]]
    rows = [row for r in range(1, rounds + 1) for row in rows_of_round(pool, r, 4, group, seed=0)]
    for one, other in combinations([{(s.visit.patient_id, s.visit.visit_id) for s in row} for row in rows], 2):
        assert len(one - other) in (0, group)


@pytest.mark.parametrize("gone", [0, 1])
def test_no_two_rows_of_jobs_at_a_hospital_differ_in_fewer_patients_than_the_smallest_cell(gone):
    people = [Patient(s.visit.patient_id, None, (s.visit,)) for s in samples(90, visits=1)]
    rows = []
    for group, cohort in [(5, people), (6, people), (11, people), (5, people[gone:])]:
        strategy, task = strategy_at(share=True, bank_group=group)
        made = Cohort("a", cohort, key=bytes(16), timeline=Timeline(1))
        pool = strategy._in_bank_order(made, task.config)
        chosen = rows_of_round(pool, 1, 64, strategy._patients_a_row(task.config, 5), seed=group)
        rows += [{s.visit.patient_id for s in row} for row in chosen]
    for one, other in combinations(rows, 2):
        assert one == other or len(one ^ other) >= 5, "a row less another is one patient's features"


def test_a_site_leaves_its_own_rows_out_and_no_others():
    sent, foreign, bank = normal(3, 4), normal(5, 4, seed=1), SiteBank(4)
    bank.sent = {1: sent[:2], 2: sent[2:]}
    for down in (torch.cat([foreign[:2], sent[:1], foreign[2:], sent[1:]]), foreign):
        bank.receive(down)
        bank.begin(3)
        assert torch.equal(bank.rows, foreign)


def test_rows_are_unit_means_of_features_and_the_site_remembers_those_it_sent(learner_of):
    learner = learner_of()
    pool = learner.cohort.samples("train")
    chosen = rows_of_round(pool, 1, 3, 2, seed=0)
    rows = learner.share_rows(chosen, 1, min_cell=1)
    by_hand = []
    for row in chosen:
        each = [learner.features_of([s])[0] for s in row]
        mean = torch.stack(each).mean(0)
        by_hand.append(mean / mean.norm())
    torch.testing.assert_close(rows, torch.stack(by_hand), rtol=1e-5, atol=1e-6)
    learner.bank.rows = torch.cat([rows, normal(2, 32)])
    learner.share_rows([], 2, min_cell=1)
    assert len(learner.bank.rows) == 2 and learner.bank.use == {"sent": 0.0, "received": 2.0}
    again = learner_of()
    again.load_private(learner.private())
    assert torch.equal(again.bank.sent[1], rows), "what was sent is part of the site's state"
    again.share_rows([], 2 + ROUNDS, min_cell=1)
    assert not again.bank.sent, "and is forgotten when the server has forgotten it"
    assert learner.share_rows(chosen, 1, 1) is not None and torch.equal(learner.bank.sent[1], rows)


def test_the_bank_comes_down_with_the_weights_and_is_checked(learner_of):
    learner = learner_of()
    w = learner.shared()
    learner.load_shared({**w, "bank.features": normal(4, 32)})
    assert torch.equal(learner.bank.rows, normal(4, 32)) and learner.shared().keys() == w.keys()
    learner.load_shared(w)
    assert learner.bank.rows.shape == (0, 32)
    for bad in (normal(4, 31), normal(1, 4)[0], 2 * normal(4, 32), torch.zeros(1, 32)):
        with pytest.raises(ExchangeError, match="bank"):
            learner.load_shared({**w, "bank.features": bad})
    with pytest.raises(ExchangeError, match="not rows of 3"):
        SiteBank(3).receive(torch.zeros(100_001, 3))


def strategy_at(source="manifest", share=None, simulated=False, workspace=None, min_patients=5, **fedmrg):
    executor = executor_of("fedmrg", fedmrg={"labeler": "none", **fedmrg})
    shares = None if share is None else ["features"] * share
    policy = Bounds(min_patients=1 if simulated or source == "synthetic" else min_patients)
    about = {"path": Path("m.csv"), "simulated": simulated, "policy": policy}
    config = SiteConfig(source=source, shares=shares, **about)
    site = SimpleNamespace(simulated=simulated, workspace=workspace)
    return executor.strategy, task_of(executor, source, config=config, site=site, min_cell=policy.min_patients)


@pytest.mark.parametrize(("source", "simulated", "share", "expected"), CASES["shares"])
def test_a_real_site_shares_no_row_unless_its_file_says_so(tmp_path, source, simulated, share, expected):
    strategy, task = strategy_at(source, share, simulated, tmp_path)
    assert strategy._shares_features(task) is expected


def test_no_row_leaves_a_site_whose_policy_has_a_privacy_filter(tmp_path):
    (tmp_path / "local").mkdir()
    policy = tmp_path / "local" / "privacy.json"
    for path, expected in ((GUARD, True), (PRIVACY_FILTER, False)):
        policy.write_text(json.dumps({"scopes": [{"task_result_filters": [{"path": path}]}]}))
        strategy, task = strategy_at(share=True, workspace=tmp_path)
        assert strategy._shares_features(task) is expected


@pytest.mark.parametrize(("settings", "expected"), CASES["patients a row"])
def test_a_row_of_a_real_site_is_of_at_least_five_patients_whatever_the_job_says(settings, expected):
    strategy, task = strategy_at(share=True, **settings)
    assert strategy._patients_a_row(task.config, task.min_cell) == expected


@pytest.mark.parametrize("setting", [{"bank_rows": 0}, {"contrast_weight": 0.0}, {"backbone": "frozen"}])
def test_rows_are_made_only_where_somebody_learns_from_them(setting):
    assert executor_of("fedmrg").strategy._contrasts and not executor_of("fedmrg", fedmrg=setting).strategy._contrasts


@pytest.mark.parametrize(
    ("rows", "problem"),
    [(normal(MOST_ROWS + 1, 8), "at most 64 rows of at most 4096"), (normal(1, 4097), "at most 64 rows"),
     (1.03 * normal(2, 8), "norm is not 1"), (torch.zeros(1, 4), "norm is not 1")],
)  # fmt: skip
def test_rows_of_another_form_are_refused_by_name(rows, problem):
    with pytest.raises(ExchangeError, match=rf"'bank.features'.*{problem}"):
        check_tensors(CONTRACT, "train", {"bank.features": rows}, {}, sends="difference")
    with pytest.raises(ExchangeError, match="not allowed to leave"):
        check_tensors(CONTRACT, "handshake", {"bank.features": normal(3, 8)}, {}, sends="initial")


def test_the_server_keeps_the_last_rows_of_each_site_for_three_rounds():
    bank = FeatureBank()
    assert bank.rows(1) is None
    bank.put("a", 1, normal(2, 4, seed=1))
    bank.put("b", 1, normal(2, 4, seed=2))
    assert bank.rows(2).shape == (4, 4)
    bank.put("a", 2, normal(1, 4, seed=3))
    assert bank.rows(3).shape == (3, 4), "new rows take the place of the site's old ones"
    assert bank.rows(1 + ROUNDS).shape == (3, 4)
    assert torch.equal(bank.rows(2 + ROUNDS), normal(1, 4, seed=3)), "those of round 1 have expired"
    assert bank.rows(3 + ROUNDS) is None


def test_rows_go_down_in_an_order_that_hides_their_sites_and_is_the_same_after_a_resume():
    bank, late = FeatureBank(), FeatureBank()
    for site, seed in (("a", 1), ("b", 2), ("c", 3)):
        bank.put(site, 1, normal(8, 4, seed=seed))
    for site, seed in (("c", 3), ("a", 1), ("b", 2)):
        late.put(site, 1, normal(8, 4, seed=seed))
    restored = FeatureBank()
    restored.load(bank.state())
    rows = bank.rows(2)
    for other in (late, restored):
        assert torch.equal(other.rows(2), rows) and torch.equal(other.rows(3), rows)
    swapped = FeatureBank()
    for site, seed in (("a", 3), ("b", 1), ("c", 2)):
        swapped.put(site, 1, normal(8, 4, seed=seed))
    assert torch.equal(swapped.rows(2), rows), "whose rows they are changes nothing"


def test_a_row_of_one_patient_gives_the_patient_away_and_one_of_five_is_no_anonymity():
    """Features of 80 patients around a common mean, else without order; the attacker has image, encoder and rows."""
    features = unit(normal(1, 64, seed=9) + 0.6 * normal(80, 64))
    inside, outside = features[:40], features[40:]
    aucs = [membership_auc(unit(inside.view(40 // g, g, 64).mean(1)), inside, outside) for g in (1, 5, 20)]
    assert aucs[0] == 1.0 and 0.9 < aucs[1] < 1.0 and 0.5 < aucs[2] < aucs[1]
