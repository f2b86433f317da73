import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from fedtar_flare.metrics.label_scores import CERTAIN_OR_NOT, label_counts, label_counts_of_texts

CLASSES = ("a", "b", "c")
LABEL = st.sampled_from(["positive", "negative", "uncertain", "blank"])
LABELS = st.fixed_dictionaries(dict.fromkeys(CLASSES, LABEL))


@settings(max_examples=25)  # each asks scikit-learn five times
@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=10), st.booleans())
def test_equals_scikit_learn(pairs, doubt):
    positive = {"positive", "uncertain"} if doubt else {"positive"}
    truth, predicted = zip(*pairs, strict=True)
    counts = label_counts(truth, predicted, **({"positive": CERTAIN_OR_NOT} if doubt else {}))
    sides = [
        np.array([[labels[name] in positive for name in CLASSES] for labels in side]) for side in (truth, predicted)
    ]
    f1 = lambda average: metrics.f1_score(*sides, average=average, zero_division=0)  # noqa: E731
    assert (counts.micro_f1() or 0.0) == pytest.approx(f1("micro"))
    some = (sides[0] | sides[1]).any(axis=0)
    per_class = [counts.of_classes()[name]["f1"] or 0.0 for name in CLASSES]
    assert per_class == pytest.approx(f1(None).tolist())
    assert (counts.macro_f1() or 0.0) == pytest.approx(f1(None)[some].mean() if some.any() else 0.0)
    assert counts.example_f1() == pytest.approx(metrics.f1_score(*sides, average="samples", zero_division=1))


def test_texts_are_labelled_on_both_sides():
    labeler = lambda text: {"x": "positive" if "x" in text else "blank"}  # noqa: E731
    counts = label_counts_of_texts(labeler, ["x", "-", "x"], ["x", "x", "-"])
    assert counts.of_classes() == {"x": {"precision": 0.5, "recall": 0.5, "f1": 0.5, "n": 2.0}}
    nothing = label_counts_of_texts(labeler, ["-"], ["-"])
    assert nothing.micro_f1() is None and nothing.macro_f1() is None and nothing.example_f1() == 1.0
