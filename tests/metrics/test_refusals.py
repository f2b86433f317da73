"""What cannot be scored or compared is refused by name, before any number is computed."""

import pytest

from fedtar_flare.core.errors import DataError
from fedtar_flare.metrics.agreement import finding_f1, label_counts
from fedtar_flare.metrics.classification import auc, welch
from fedtar_flare.metrics.language import language_statistics, length_ratio, mismatched_share
from fedtar_flare.metrics.reports import Reports
from fedtar_flare.metrics.significance import compare, holm, mean_score, over_seeds, patient_sums

NAN = float("nan")
ONE, OTHER = mean_score(["a"], [1.0]), mean_score(["b"], [1.0])


def reports(n, named):
    words, sets = [""] * n, [frozenset()] * n
    return Reports(words, [0.0] * n, words, words, "chexpert-rules", [1.0] * n, sets, sets, sets, named)


@pytest.mark.parametrize(
    ("reason", "call"),
    [
        ("no-reports", lambda: length_ratio([], [])),
        ("unequal-lengths", lambda: length_ratio(["a"], [])),
        ("unequal-lengths", lambda: mismatched_share(["p"], ["a"], [])),
        ("unequal-lengths", lambda: mismatched_share([], ["a"], ["a"])),
        ("no-reports", lambda: finding_f1([], [])),
        ("unequal-lengths", lambda: finding_f1([{"nodule"}], [])),
        ("no-reports", lambda: label_counts([], [])),
        ("unequal-classes", lambda: label_counts(["a"], [["b", "bp"]])),
        ("no-reports", lambda: reports(0, [])),
        ("unequal-lengths", lambda: reports(1, [])),
        ("no-reports", lambda: language_statistics([], [])),
        ("unequal-lengths", lambda: language_statistics([[["a"]]], [])),
        ("no-reference", lambda: language_statistics([[]], [["a"]])),
        ("not-tokens", lambda: language_statistics(["a b"], [["a"]])),
        ("not-tokens", lambda: language_statistics([["a b"]], [["a"]])),
        ("not-tokens", lambda: language_statistics([[["a"]]], ["a b"])),
        ("non-finite-score", lambda: auc([0, 1], [0.5, NAN])),
        ("unequal-lengths", lambda: auc([0, 1, 1], [0.5, 0.1])),
        ("too-few-seeds", lambda: welch([0.5], [0.5, 0.6])),
        ("no-reports", lambda: mean_score([], [])),
        ("unequal-lengths", lambda: patient_sums(["a"], [[1.0], [2.0]], lambda sums: sums[:, 0])),
        ("unusable-sums", lambda: mean_score(["a"], [NAN])),
        ("unequal-patients", lambda: compare([ONE], [OTHER])),
        ("unusable-p", lambda: holm({"a": NAN})),
        ("no-reports", lambda: over_seeds([])),
        ("unequal-lengths", lambda: over_seeds([ONE], [])),
        ("unequal-patients", lambda: over_seeds([ONE], [OTHER])),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(reason, call):
    with pytest.raises(DataError) as error:
        call()
    assert error.value.reason == reason
