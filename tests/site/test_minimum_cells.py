"""What may be told of a cohort: cells of enough patients, numbers that hide one visit, nothing by subtraction."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import build
from fedtar_flare.data.cells import SPLITS, Timeline
from fedtar_flare.data.cohort import EXCLUDED, Cohort, Patient, Sample, Visit
from fedtar_flare.data.minimum_cell import round_share, winsorised_mean
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.learning.evaluation import site_scores
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.reports import TextLabeler

START = datetime(2020, 1, 1)
TEXTS = ("Stable nodule.", "New effusion.", "The effusion has increased.", "Clear lungs.")


def cohort(numbers, time_steps=3, rejected=None):
    """One patient for each number, with so many visits."""
    patients = []
    for i, n in enumerate(numbers):
        dated = [(f"p{i}-{k}", START + timedelta(k), Path(f"{i}-{k}"), TEXTS[(i + k) % 4]) for k in range(n)]
        patients.append(Patient(f"p{i}", None, tuple(Visit(f"p{i}", *visit, "ct") for visit in dated)))
    return Cohort("a", patients, key=bytes(16), timeline=Timeline(time_steps), rejected=rejected)


def held_out(texts, ids=None):
    """Test samples with these reports, by default of a patient each."""
    ids = ids or [f"p{i}" for i in range(len(texts))]
    visits = [Visit(p, str(i), START, Path("x"), texts[i], "radiograph") for i, p in enumerate(ids)]
    return [Sample(visit, None, None, 1, "test") for visit in visits]


def patients_of(made, split, step):
    return {s.visit.patient_id for s in made.samples(split, step)}


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 7))
def test_a_cell_counts_by_its_patients_and_is_told_in_multiples(numbers, least):
    made = cohort(numbers)
    counts = made.counts(least)
    for split in SPLITS:
        for t, n in enumerate(counts[split], start=1):
            there = made.samples(split, t)
            enough = len(patients_of(made, split, t)) >= least
            assert n == (len(there) // least * least if enough else 0)
            assert made.samples(split, t, least) == (there if enough else [])
        pooled = made.samples(split, least=least)
        assert {s.time_step for s in pooled} == {t for t, n in enumerate(counts[split], 1) if n}


@settings(max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=6, max_size=60), st.integers(2, 6), st.data())
def test_a_withdrawal_moves_a_told_number_by_a_whole_multiple_or_not_at_all(numbers, least, data):
    made = cohort(numbers)
    gone = data.draw(st.sampled_from([p.patient_id for p in made.patients]))
    if len(made.patients) == 1:
        return
    less = made.leaving_out(lambda v: EXCLUDED if v.patient_id == gone else None)
    for split in SPLITS:
        for before, after in zip(made.counts(least)[split], less.counts(least)[split], strict=True):
            assert (before - after) % least == 0
    assert EXCLUDED not in less.left_out(least) and EXCLUDED not in less.left_out(1)
    assert made.digest() != less.digest() and made.digest() == cohort(numbers).digest()
    first, *rest = made.patients
    corrected = replace(first, visits=(replace(first.visits[0], report="Corrected."), *first.visits[1:]))
    changed = Cohort(made.site, [corrected, *rest], key=made.key, timeline=made.timeline)
    assert changed.digest() != made.digest(), "else two answers would differ in one report"


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(2, 9))
def test_a_share_tells_of_its_group_only_the_number_that_is_reported(block, least):
    """7 of 13 was told as it is: its only fraction with a denominator from 10 to 14."""
    sizes = range(block * least, (block + 1) * least)
    assert len({tuple(sorted({round_share(k / n, n, least) for k in range(n + 1)})) for n in sizes}) == 1


def test_studies_left_out_are_told_by_patients():
    made = cohort([2] * 12, rejected={"no-date": 40})
    less = made.leaving_out(lambda v: "one" if v.patient_id == "p0" else "many" if int(v.patient_id[1:]) > 4 else None)
    assert less.rejected == {"no-date": 40, "one": 2, "many": 14}
    assert less.left_out(5) == {"many": 10}  # whose studies were left out when they were read, nobody knows
    assert less.left_out(1) == less.rejected


@settings(max_examples=20)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=50), st.integers(2, 6))
def test_scores_tell_of_enough_patients_alone_and_no_total_tells_a_blank(numbers, least):
    made = cohort(numbers)
    samples = made.samples("train")
    if not samples:
        return
    texts = [TEXTS[len(s.visit.report) % 4] for s in samples]
    found = site_scores(samples, texts, [1.0] * len(samples), 3, least)
    for t, cell in found["steps"].items():
        if len(patients_of(made, "train", int(t))) < least:
            assert cell == {"n": 0}
        else:
            assert cell["n"] % least == 0 and cell["n"] > 0 and "token_loss" in cell
            assert all(on_grid(value, cell["n"]) for name, value in cell.items() if name not in ("n", "token_loss"))
    n = sum(cell["n"] for cell in found["steps"].values())
    assert found["all"]["n"] == n and all(on_grid(found["all"].get(name), n) for name in ("bleu_1", "identical_share"))
    told = [one for kind in found.get("findings", {}).values() for one in kind.values()]
    assert all(one["n"] % least == 0 and on_grid(one["recall"], one["n"]) for one in told)
    assert all(on_grid(one["precision"], one["named"]) for one in told if "named" in one)


@settings(max_examples=60)
@given(st.lists(st.floats(0.5, 5), min_size=10, max_size=30), st.integers(2, 5), st.data())
def test_weights_that_make_losses_of_too_few_patients_huge_move_no_told_loss_beyond_those_of_others(usual, least, data):
    """Weights for which one word is very unlikely moved a loss of 20 reports from 2.0 to 3.0: who has it was told."""
    ids = [f"p{i % (len(usual) - 2)}" for i in range(len(usual))]  # two patients have two visits
    outliers = set(ids[: data.draw(st.integers(1, min(least, len(set(ids)) // 2 + len(set(ids)) % 2) - 1))])  # not half
    kinds = ([0.0, 1e-30], [1e3, 1e30, float("inf"), float("nan")])
    values = [[e if p in outliers else usual[i] for i, p in enumerate(ids)] for k in kinds for e in k]
    told = [winsorised_mean([*zip(ids, row, strict=True)], least) for row in values]
    others = [usual[i] for i, p in enumerate(ids) if p not in outliers]
    assert len(set(told[:2])) == len(set(told[2:])) == 1 and min(others) <= told[0] <= told[2] <= max(others)
    assert winsorised_mean([*zip(ids, usual, strict=True)], 1) == pytest.approx(sum(usual) / len(usual))
    samples = held_out(["Clear lungs."] * len(ids), ids)
    scores = [site_scores(samples, [""] * len(ids), row, 1, least)["all"].get("token_loss") for row in values[2:]]
    assert len(set(scores)) == 1


def on_grid(share, n):
    """Whether it is a multiple of 1 / n, or unknown."""
    return share is None or abs(share * n - round(share * n)) < 1e-9


@pytest.mark.parametrize("having", range(5))
def test_drafts_that_all_name_a_rare_finding_do_not_count_those_who_have_it(having):
    """A server that chooses the weights chooses what is drafted: presence F1 and class F1 were n / 20."""
    draft = "Left pneumothorax has increased."
    samples = held_out([draft] * having + ["Small right effusion."] * (20 - having))
    told = site_scores(samples, [draft] * 20, [1.0] * 20, 1, 5)["all"]
    names = "presence_f1 chexpert_rules_f1 side_accuracy change_accuracy finding_change_micro_f1 change_coverage"
    assert not any(told[name] for name in names.split())


@pytest.mark.parametrize(("having", "naming"), [(4, 20), (4, 4), (10, 1), (10, 4)])
def test_clinical_efficacy_tells_of_classes_of_enough_patients_alone(having, naming):
    """By precision, drafts that name a class of one patient's alone would tell whether that patient has it."""
    codes = {"-": "b" * 18, "x": "p" + "b" * 17}
    values = set()
    for right in range(min(having, naming) + 1):  # how many of those who have it are those of whom it is named
        samples = held_out(["x"] * having + ["-"] * (20 - having))
        drafts = ["x"] * right + ["-"] * (20 - naming) + ["x"] * (naming - right)
        told = site_scores(samples, drafts, [1.0] * 20, 1, 5, TextLabeler("radbert", codes.__getitem__))["all"]
        values.add(tuple(told[name] for name in SCORES if name.startswith("radbert")))
    assert len(values) == 1 and (having == 10 or set(*values) == {None})


def test_contradictions_are_told_of_enough_patients_alone():
    samples, told = cohort([2] * 60, time_steps=2).samples("train"), []
    second = [i for i, s in enumerate(samples) if s.time_step == 2]
    for claims in (1, 4, 5):
        texts = ["The effusion has increased." if i in second[:claims] else "Clear lungs." for i in range(len(samples))]
        told.append(site_scores(samples, texts, [1.0] * len(samples), 2, 5)["all"]["contradictions"])
    assert told[:2] == [None, None] and told[2] > 0


def test_drafts_that_all_claim_a_rare_finding_changed_do_not_count_those_who_had_it():
    values = set()
    for having in range(5):
        rare, usual = "Small left pneumothorax. Small right effusion.", "Small right effusion."
        first = held_out([rare] * having + [usual] * (20 - having))
        later = [replace(s, visit=replace(s.visit, visit_id="2", acquired=START + timedelta(9))) for s in first]
        drafts = ["Clear lungs."] * 20 + ["Left pneumothorax has increased. Right effusion has increased."] * 20
        values.add(site_scores([*first, *later], drafts, [1.0] * 40, 1, 5)["all"]["contradictions"])
    assert len(values) == 1


def test_a_job_cannot_ask_by_the_hour_or_the_day():
    days = (("01-01", day) for day in ("01-02", "01-28", "03-01T12:00"))
    for first, second in (("01-01T06:00", "01-01T07:00"), *days):
        with pytest.raises(ConfigError, match="periods"):
            build(DataConfig, {"alignment": "period", "periods": [f"2020-{first}", f"2020-{second}"]}, "data")
    build(DataConfig, {"alignment": "period", "periods": ["2020-01-01", "2020-01-29"]}, "data")
