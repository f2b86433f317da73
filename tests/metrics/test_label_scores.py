"""Scores of findings and of labels against scikit-learn, and what is labelled in a report."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.metrics import roc_auc_score

from fedtar_flare.metrics.agreement import (
    CERTAIN_OR_NOT,
    finding_counts,
    finding_f1,
    known_and_new,
    label_counts,
)
from fedtar_flare.metrics.classification import auc, auc_of_draws, epochs_to, lca, welch
from fedtar_flare.metrics.labeler import report_labels
from fedtar_flare.metrics.significance import label_score

CLASSES = ("a", "b", "c")
LABEL = st.sampled_from(["positive", "negative", "uncertain", "blank"])
LABELS = st.fixed_dictionaries(dict.fromkeys(CLASSES, LABEL))


@settings(max_examples=25)  # each asks scikit-learn seven times
@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=10), st.booleans())
def test_equals_scikit_learn(pairs, doubt):
    positive = {"positive", "uncertain"} if doubt else {"positive"}
    truth, predicted = zip(*pairs, strict=True)
    codes = [["".join(labels[name][0] for name in CLASSES) for labels in pair] for pair in pairs]
    counts = label_counts(CLASSES, codes, **({"positive": CERTAIN_OR_NOT} if doubt else {}))
    sets = [[{name for name in CLASSES if labels[name] in positive} for labels in side] for side in (truth, predicted)]
    sides = [np.array([[name in found for name in CLASSES] for found in side]) for side in sets]
    means, some = counts.averages(), (sides[0] | sides[1]).any(axis=0)
    full = (sides[0] | sides[1]).any(axis=1)
    for name, score in means["micro"].items():
        one = getattr(metrics, f"{name}_score")
        of = lambda average, one=one: one(*sides, average=average, zero_division=0)  # noqa: E731
        assert score == pytest.approx(of("micro"))
        assert [counts.of_classes()[k][name] or 0.0 for k in CLASSES] == pytest.approx(of(None).tolist())
        assert means["macro"][name] == pytest.approx(of(None)[some].mean() if some.any() else 0.0)
        examples = one(*(side[full] for side in sides), average="samples", zero_division=0) if full.any() else 0.0
        assert means["example"][name] == pytest.approx(np.mean([examples] * full.sum() + [1.0] * (~full).sum()))
        for average, values in means.items():  # as sums, by which systems are compared
            if full.any() or average == "example":
                assert label_score(range(len(pairs)), counts, average, name).value() == pytest.approx(values[name])
    scores = finding_f1(*sets)
    expected = metrics.precision_recall_fscore_support(*sides, average="micro", zero_division=0)
    for name, value in zip(("finding_precision", "finding_recall", "finding_f1"), expected, strict=False):
        assert (scores[name] or 0.0) == pytest.approx(value)


def test_what_is_undefined_is_none_and_never_a_guess():
    nothing = finding_f1([set(), set()], [set(), set()])
    assert set(nothing.values()) == {None}
    missed = finding_f1([{"nodule"}], [set()])
    assert missed["finding_precision"] is None and missed["finding_recall"] == missed["finding_f1"] == 0.0
    invented = finding_f1([set()], [{"nodule"}])
    assert invented["finding_recall"] is None and invented["finding_precision"] == 0.0


def test_known_and_new_findings_are_scored_apart_over_all_pairs_and_as_a_mean_of_findings():
    truth = [{"nodule", "cavity"}, {"cavity"}, {"nodule"}, {"mass"}]
    predicted = [{"nodule"}, {"cavity", "nodule"}, {"nodule"}, {"cavity"}]
    cavity, nodule = 2 * 1 / (2 + 2), 2 * 2 / (2 + 3)
    assert known_and_new(truth, predicted, {"nodule"}, "pqrs") == pytest.approx({
        "finding_f1": 2 * 3 / (5 + 5), "finding_f1_macro": (cavity + nodule + 0) / 3, "finding_f1_known": nodule,
        "finding_f1_known_macro": nodule, "finding_f1_new": 2 * 1 / (3 + 2), "finding_f1_new_macro": cavity / 2,
        "finding_recall_new": 1 / 3,
    })  # fmt: skip
    nothing_new = known_and_new([{"nodule"}], [{"nodule"}], {"nodule"}, "p")
    assert {nothing_new[f"finding_{name}"] for name in ("f1_new", "f1_new_macro", "recall_new")} == {None}
    assert finding_counts(truth, predicted) == {"cavity": (2, 2, 1), "mass": (1, 0, 0), "nodule": (2, 3, 2)}


def test_stated_labels_are_sure_and_doubted_ones_are_not():
    text = "Right pleural effusion. A pacemaker is in place. Possible pneumonia. No edema."
    assert report_labels("chexpert-rules")(text) == ({"Pleural Effusion"}, {"Pneumonia"})
    assert report_labels("ctrate-rules")("Emphysema. No pericardial effusion.") == ({"Emphysema"}, set())


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


def test_welch_without_variance():
    assert welch([0.5, 0.5], [0.5, 0.5]) == 1 and welch([0.6, 0.6], [0.5, 0.5]) == 0
