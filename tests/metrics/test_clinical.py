import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from fedtar_flare.metrics.clinical import finding_counts, finding_f1, known_and_new

FINDINGS = ["nodule", "effusion", "emphysema", "cardiomegaly"]
SETS = st.frozensets(st.sampled_from(FINDINGS))


@settings(deadline=None)
@given(st.lists(st.tuples(SETS, SETS), min_size=1, max_size=12))
def test_equals_scikit_learn(pairs):
    truth, predicted = [t for t, _ in pairs], [p for _, p in pairs]
    scores = finding_f1(truth, predicted)
    rows = [[[int(name in findings) for name in FINDINGS] for findings in side] for side in (truth, predicted)]
    expected = metrics.precision_recall_fscore_support(*rows, average="micro", zero_division=0)
    for name, value in zip(("finding_precision", "finding_recall", "finding_f1"), expected, strict=False):
        assert (scores[name] or 0.0) == pytest.approx(value)
    example = metrics.f1_score(*rows, average="samples", zero_division=1)
    assert scores["finding_f1_example"] == pytest.approx(example)


def test_what_is_undefined_is_none_and_never_a_guess():
    nothing = finding_f1([set(), set()], [set(), set()])
    assert nothing.pop("finding_f1_example") == 1.0 and set(nothing.values()) == {None}
    missed = finding_f1([{"nodule"}], [set()])
    assert missed["finding_precision"] is None and missed["finding_recall"] == missed["finding_f1"] == 0.0
    invented = finding_f1([set()], [{"nodule"}])
    assert invented["finding_recall"] is None and invented["finding_f1_example"] == 0.0


def test_known_and_new_findings_are_scored_apart():
    truth = [{"nodule", "cavity"}, {"cavity"}, {"nodule"}, set()]
    predicted = [{"nodule"}, {"cavity", "nodule"}, {"nodule"}, {"cavity"}]
    assert known_and_new(truth, predicted, {"nodule"}) == {
        "finding_f1": pytest.approx(2 * 3 / (4 + 5)),
        "finding_f1_known": pytest.approx(2 * 2 / (2 + 3)),
        "finding_f1_new": pytest.approx(2 * 1 / (2 + 2)),
        "finding_recall_new": 0.5,
    }
    nothing_new = known_and_new([{"nodule"}], [{"nodule"}], {"nodule"})
    assert nothing_new["finding_f1_new"] is None and nothing_new["finding_recall_new"] is None
    assert finding_counts(truth, predicted) == {"cavity": (2, 1), "nodule": (2, 2)}
