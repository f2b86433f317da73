"""Candidates compared from sites' sums: as from all patients in one place; a planted difference is found."""

import numpy as np
import pytest
from test_registry import reports

from fedtar_flare.metrics import paired_sums
from fedtar_flare.metrics.paired_sums import NORMAL, RATIOS, SiteSums, combined, compared, guarded_sums, ratio_sums

FINDINGS = ("nodule", "effusion", "cardiomegaly", "atelectasis")
NAMES = ("a", "b")


def reports_of(truth, drafts, least=1, visits=2):
    """Reports of patients with so many visits each, by the findings of references and drafts."""

    def text(named):
        return ". ".join(["Clear lungs", *(f"There is {name}" for name in sorted(named))])

    texts = [[text(named) for named in side] for side in (truth, drafts)]
    rows = [(f"p{i // visits}", i, *pair) for i, pair in enumerate(zip(*texts, strict=True))]
    about = {"findings": truth, "drafted": drafts, "known": frozenset(FINDINGS)}
    return reports(rows, "ctrate-rules", min_cell=least, **about)


def hospital(generator, patients, recalls, least=1, visits=2):
    """Both candidates' reports: a finding is named with a probability, else missed; a patient's visits are alike."""
    truth, drafts = [], ([], [])
    for _ in range(patients):
        found = {name for name in FINDINGS if generator.random() < 0.5} or {"nodule"}
        hard = generator.normal(0, 0.1)
        for _ in range(visits):
            truth.append(frozenset(found))
            for named, recall in zip(drafts, recalls, strict=True):
                named.append(frozenset(name for name in found if generator.random() < recall + hard))
    return [reports_of(truth, named, least, visits) for named in drafts]


def federation(seed, recalls, patients=96, least=1, sites=3):
    """What each hospital sends, and what it has."""
    generator = np.random.default_rng(seed)
    own = [[ratio_sums(of) for of in hospital(generator, patients, recalls, least)] for _ in range(sites)]
    sent = []
    for both in own:
        scores = {name: guarded_sums(name, [of[name] for of in both], 2 * patients, least) for name in both[0]}
        sent.append(SiteSums(NAMES, scores))
    return sent, own


def pooled(own, score):
    """Difference and standard error from all single patients, by their influences."""
    value, influence = 0.0, 0.0
    for sign, i in ((1, 0), (-1, 1)):
        rows = np.concatenate([both[i][score].sums for both in own])
        ratio = rows[:, 0].sum() / rows[:, 1].sum()
        value += sign * ratio
        influence = influence + sign * (rows[:, 0] - ratio * rows[:, 1]) / rows[:, 1].sum()
    return value, float(np.sqrt(np.square(influence).sum()))


def test_without_a_minimum_cell_the_merged_sums_give_what_all_patients_in_one_place_do():
    sent, own = federation(0, (0.8, 0.7), patients=20)
    assert {"finding_f1", "presence_f1", "rouge_l"} <= {*sent[0].scores} <= {*RATIOS}
    for score in sent[0].scores:
        value, error = pooled(own, score)
        found, p = combined(sent, score, {"a": 1.0, "b": -1.0})
        assert found == pytest.approx((value, value - NORMAL * error, value + NORMAL * error), abs=1e-9)
        assert 0 <= p <= 1
        every = np.concatenate([both[0][score].sums for both in own]).sum(axis=0)
        assert combined(sent, score, {"a": 1.0})[0].value == pytest.approx(every[0] / every[1], abs=1e-9)


@pytest.mark.parametrize("least", [1, 5])
def test_five_points_of_finding_f1_are_found_and_none_is_made_up(least, monkeypatch):
    """Recalls of 0.72 and 0.8 are F1 of 84 and 89."""
    monkeypatch.setattr(paired_sums, "text_sums", lambda reports: {})  # which take a hundred times as long

    def differences(recalls, seeds):
        return [compared(federation(s, recalls, least=least)[0], NAMES)["finding_f1"]["a - b"] for s in range(seeds)]

    planted, equal = differences((0.8, 0.72), 10), differences((0.8, 0.8), 100)
    assert np.mean([value for value, *_ in planted]) == pytest.approx(0.05, abs=0.01)
    assert sum(p < 0.05 for *_, p in planted) >= 8
    assert sum(p < 0.05 for *_, p in equal) <= 10


def test_with_a_minimum_cell_no_exact_sum_leaves_and_rare_scores_do_not():
    sent, own = federation(1, (0.8, 0.7), patients=9, least=5)
    for site, both in zip(sent, own, strict=True):
        of = site.scores["finding_f1"]
        below = of["sums"][2:]
        assert of["n"] == 15 and all(b % 5 == 0 for b in below)
        for i, b in enumerate(below):
            assert (15 * of["sums"][i] / b) == pytest.approx(round(15 * of["sums"][i] / b), abs=1e-9)
            assert of["products"][str(i)][i] != pytest.approx(np.square(both[i]["finding_f1"].sums[:, 0]).sum())
    few = federation(2, (0.8, 0.7), patients=4, least=5)[0]
    assert not few[0].scores


def test_a_site_without_a_candidate_counts_for_the_others_alone():
    sent, own = federation(3, (0.8, 0.7), patients=20)
    alone = {name: guarded_sums(name, [of[name] for of in own[2][:1]], 40, 1) for name in own[2][0]}
    sites = [*sent[:2], SiteSums(("a",), alone)]
    assert combined(sites, "finding_f1", {"a": 1.0})[0] == pytest.approx(combined(sent, "finding_f1", {"a": 1.0})[0])
    both, among_two = (combined(of, "finding_f1", {"a": 1.0, "b": -1.0}) for of in (sites, sent[:2]))
    assert both == among_two
    assert combined(sites, "finding_f1", {"c": 1.0}) is None
