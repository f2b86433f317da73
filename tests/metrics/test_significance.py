import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics
from sklearn.metrics import roc_auc_score

from fedtar_flare.metrics import agreement, significance
from fedtar_flare.metrics.classification import auc, auc_of_draws, epochs_to, lca
from fedtar_flare.metrics.labeler import report_labels
from fedtar_flare.metrics.language import language_statistics
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval, compare, holm, label_score, mean_score, over_seeds


def f1_score(patients, hits, named, actual):
    """Micro F1 of one class."""
    columns = (np.asarray(side, dtype=float)[:, None] for side in (hits, named, actual))
    return label_score(patients, agreement.LabelCounts(("any",), *columns), "micro", "f1")


def values_of(n, shift=0.0, seed=1):
    return np.random.default_rng(seed).normal(shift, 1, size=n)


def test_tau_is_scipys_and_its_interval_draws_patients():
    first, second = np.round(values_of(60)), np.round(values_of(60, seed=2) + 0.8 * values_of(60))
    patients = np.arange(60) // 3
    got = significance.kendall_tau(patients, first, second)
    assert got.value == pytest.approx(stats.kendalltau(first, second).statistic) and got.low < got.value < got.high
    generator, drawn = np.random.default_rng(0), []
    for _ in range(400):
        rows = (generator.integers(20, size=20)[:, None] * 3 + np.arange(3)).ravel()
        drawn.append(stats.kendalltau(first[rows], second[rows]).statistic)
    assert got[1:] == pytest.approx(tuple(np.percentile(drawn, [2.5, 97.5])), abs=0.05)
    assert np.isnan(significance.kendall_tau(patients, first, np.ones(60)).value)


def test_reports_of_a_patient_are_drawn_together():
    x = np.repeat(values_of(50), 8)  # eight equal reports per patient hold no more than one
    together = over_seeds([mean_score(np.repeat(np.arange(50), 8), x)])
    once = over_seeds([mean_score(range(50), values_of(50))])
    apart = over_seeds([mean_score(range(400), x)])
    assert together[1:] == pytest.approx(once[1:])
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_ratio_scores_are_those_of_the_drawn_corpus():
    generator = np.random.default_rng(0)
    hits = generator.integers(0, 3, size=30)
    named, there = hits + generator.integers(0, 2, 30), hits + generator.integers(0, 2, 30)
    sums = f1_score(np.arange(30) % 11, hits, named, there)
    assert sums.value() == pytest.approx(2 * hits.sum() / (named.sum() + there.sum()))
    words = ["lung", "clear", "no", "effusion", ".", "nodule"]
    draw = lambda: [[words[i] for i in generator.integers(6, size=9)] for _ in range(30)]  # noqa: E731
    references, hypotheses = draw(), draw()
    statistics = language_statistics(references, hypotheses)
    for n in (1, 4):
        bleu = significance.bleu_score(np.arange(30) % 11, statistics, n)
        assert bleu.value() == pytest.approx(statistics.scores()[f"bleu_{n}"])
        alone = language_statistics(references[4::11], hypotheses[4::11])
        assert bleu.of_each[4] == pytest.approx(alone.scores()[f"bleu_{n}"])
        interval = over_seeds([bleu], replicates=500)
        assert interval.low <= interval.value <= interval.high


def test_few_patients_are_permuted_exactly_as_scipy_does_and_many_at_random():
    a, b = values_of(9, 0.4, seed=5), values_of(9, 0.0, seed=6)
    got = compare([mean_score(range(9), a)], [mean_score(range(9), b)])
    exact = {"permutation_type": "samples", "n_resamples": np.inf, "vectorized": True}
    expected = stats.permutation_test((a, b), lambda x, y, axis: (x - y).mean(axis=axis), **exact)
    assert got.p == pytest.approx(expected.pvalue)
    assert compare([mean_score(range(9), a)] * 5, [mean_score(range(9), b)] * 5).p == got.p, "five seeds, nine patients"
    a, b = values_of(60, 0.25, seed=5), values_of(60, 0.0, seed=6)
    got = compare([mean_score(range(60), a)], [mean_score(range(60), b)])
    assert got.p == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.02)
    assert got.difference.value == pytest.approx((a - b).mean())
    assert got.win_rate == pytest.approx((a > b).mean())
    better = compare([mean_score(range(60), a + 5)], [mean_score(range(60), b)])
    assert better.p == pytest.approx(1 / 5001) and better.difference.low > 0 and better[2:] == (1.0, 1.0)


def test_equal_systems_do_not_differ():
    same = mean_score(range(40), values_of(40))
    got = compare([same], [same])
    assert got.p == 1.0 and got.difference == Interval(0.0, 0.0, 0.0) and got[2:] == (0.5, 0.5)
    assert compare([same], [mean_score(range(40), values_of(40) + 1)], higher_is_better=False)[2:] == (1.0, 1.0)
    # BLEU without a common word is a guard's value, which is no gain
    below = mean_score(range(40), values_of(40) + 1e-5)
    assert compare([below], [same])[1:] == (pytest.approx(1 / 5001), 1.0, 1.0)
    assert compare([below], [same], tie=SCORES["bleu_4"].tie)[1:] == (1.0, 0.5, 0.5)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_by_its_definition(p_values):
    corrected = holm(p_values)
    m = len(p_values)
    rank = sorted(p_values.values())
    for name, p in p_values.items():
        steps = [min(1.0, (m - i) * q) for i, q in enumerate(rank) if q <= p]
        last = rank.index(p)  # of equal values all get the first one's
        assert corrected[name] == pytest.approx(max(steps[: last + 1]))
        assert p <= corrected[name] <= 1


def test_over_seeds_adds_the_spread_of_seeds_to_that_of_patients():
    x = values_of(300)
    shifts = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    runs = [mean_score(range(300), x + shift) for shift in shifts]
    got = over_seeds(runs)
    # the mean of five seeds drawn from five, and of the same 300 patients for all
    half = 1.96 * np.sqrt(shifts.var() / 5 + x.var() / 300)
    assert got.value == pytest.approx(x.mean())
    assert (got.high - got.low) / 2 == pytest.approx(half, rel=0.06)
    equal = over_seeds([runs[2]] * 5)
    assert (equal.high - equal.low) / 2 == pytest.approx(1.96 * x.std() / np.sqrt(300), rel=0.06)
    difference = compare(runs, [mean_score(range(300), x)] * 5).difference
    assert (difference.high - difference.low) / 2 == pytest.approx(1.96 * np.sqrt(shifts.var() / 5), rel=0.08)


def test_a_score_that_is_nowhere_defined_has_no_interval():
    nothing = over_seeds([f1_score(range(5), np.zeros(5), np.zeros(5), np.zeros(5))], replicates=20)
    assert np.isnan(nothing).all()
    once = over_seeds([f1_score(range(5), [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0])], replicates=200)
    assert once.value == 1 and np.isnan(once[1:]).all(), "one patient does not tell how patients differ"
    assert over_seeds([mean_score(range(10), np.zeros(10))] * 2, share=True) == pytest.approx((0, 0, 0.27753), abs=1e-4)
    few, worse = (f1_score(range(50), *np.eye(1, 50) * [[hits], [1], [1]]) for hits in (1, 0))
    assert compare([few], [worse])[1:3] == (1.0, 1.0), "the share of patients who have the score"


CLASSES = ("a", "b", "c")
LABEL = st.sampled_from(["positive", "negative", "uncertain", "blank"])
LABELS = st.fixed_dictionaries(dict.fromkeys(CLASSES, LABEL))


@settings(max_examples=25)  # each asks scikit-learn seven times
@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=10), st.booleans())
def test_equals_scikit_learn(pairs, doubt):
    positive = {"positive", "uncertain"} if doubt else {"positive"}
    truth, predicted = zip(*pairs, strict=True)
    codes = [["".join(labels[name][0] for name in CLASSES) for labels in pair] for pair in pairs]
    counts = agreement.label_counts(CLASSES, codes, **({"positive": agreement.CERTAIN_OR_NOT} if doubt else {}))
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
    scores = agreement.finding_f1(*sets)
    expected = metrics.precision_recall_fscore_support(*sides, average="micro", zero_division=0)
    for name, value in zip(("finding_precision", "finding_recall", "finding_f1"), expected, strict=False):
        assert (scores[name] or 0.0) == pytest.approx(value)
    there, named = (side.any() for side in sides)
    undefined = {"finding_precision": not named, "finding_recall": not there, "finding_f1": not (there or named)}
    assert {name: scores[name] is None for name in undefined} == undefined, "never a guess"


def test_known_and_new_findings_are_scored_apart_over_all_pairs_and_as_a_mean_of_findings():
    truth = [{"nodule", "cavity"}, {"cavity"}, {"nodule"}, {"mass"}]
    predicted = [{"nodule"}, {"cavity", "nodule"}, {"nodule"}, {"cavity"}]
    cavity, nodule = 2 * 1 / (2 + 2), 2 * 2 / (2 + 3)
    assert agreement.known_and_new(truth, predicted, {"nodule"}, "pqrs") == pytest.approx({
        "finding_f1": 2 * 3 / (5 + 5), "finding_f1_macro": (cavity + nodule + 0) / 3, "finding_f1_known": nodule,
        "finding_f1_known_macro": nodule, "finding_f1_new": 2 * 1 / (3 + 2), "finding_f1_new_macro": cavity / 2,
        "finding_recall_new": 1 / 3,
    })  # fmt: skip
    nothing_new = agreement.known_and_new([{"nodule"}], [{"nodule"}], {"nodule"}, "p")
    assert {nothing_new[f"finding_{name}"] for name in ("f1_new", "f1_new_macro", "recall_new")} == {None}


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
