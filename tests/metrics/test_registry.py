"""Every score has its entry in the registry, with its function; what is computed and written of it comes from there."""

import re

import pytest
from refused import refused

from fedtar_flare.metrics.agreement import label_counts
from fedtar_flare.metrics.classification import auc
from fedtar_flare.metrics.registry import SCORES, scores_of
from fedtar_flare.metrics.reports import Reports
from fedtar_flare.metrics.significance import compare, holm, mean_score, over_seeds

VISITS = [  # patient, time, reference, generated
    ("p", 0, "Stable effusion.", "No effusion."),
    ("p", 1, "Stable effusion.", "Unchanged effusion."),
    ("q", 0, "Stable effusion.", "Small effusion."),
]


def reports(visits=VISITS, rules="chexpert-rules", *, changes=(), draft_changes=(), findings=(), drafted=(), **more):
    """Drafts of visits; ``draft_changes`` and ``drafted`` are what the drafts say changed, and is there."""
    nothing = [frozenset()] * len(visits)
    sets = (of or nothing for of in (changes, draft_changes, findings, drafted))
    return Reports(*zip(*visits, strict=True), rules, [1.0] * len(visits), *sets, **more)


@pytest.mark.parametrize("rules", ["chexpert-rules", "ctrate-rules"])
@pytest.mark.parametrize("known", [None, frozenset()])
def test_every_score_is_computed_where_the_reports_have_what_it_needs(rules, known):
    wanted = {"", rules} | (set() if known is None else {"findings"})
    assert list(scores_of(reports(rules=rules, known=known))) == [n for n, s in SCORES.items() if s.needs in wanted]
    by_step = [name for name, score in SCORES.items() if score.needs in wanted and score.by_step]
    assert list(scores_of(reports(rules=rules, known=known), by_step=True)) == by_step


def test_values_are_those_by_hand_and_none_where_not_defined_or_of_fewer_patients_than_a_cell():
    said = frozenset({("Pleural Effusion", "unchanged")})
    scores = scores_of(reports(changes=[said] * 3, draft_changes=[frozenset(), said, frozenset()]))
    assert scores["finding_change_micro_f1"] == pytest.approx(0.5)
    assert scores["chexpert_rules_f1"] == pytest.approx(2 / 3) and scores["contradictions"] == 0.0
    assert (scores["token_loss"], scores["length_ratio"]) == (1.0, 1.0)
    values = {n: scores_of(reports(changes=[frozenset(), said, said], min_cell=n)) for n in (1, 2, 3)}
    assert [values[n]["contradictions"] for n in values] == [0.0, None, None]  # p's reports alone claim anything
    assert [values[n]["finding_change_micro_f1"] for n in values] == [0.0, 0.0, None]
    nothing = scores_of(reports([("p", 0, "---", "Clear.")]))
    assert nothing["contradictions"] is nothing["length_ratio"] is nothing["mismatched_share"] is None
    assert nothing["finding_change_micro_f1"] is None


def test_the_documents_table_is_the_registrys(repository):
    """A row may have alternatives in braces."""
    text = (repository / "docs" / "reference" / "metrics.md").read_text()
    table = [re.split(r" *\| *", row)[2:-1] for row in text.splitlines() if row.count("|") == 7][2:]
    better = {True: "higher", False: "lower", None: "nearest to 1"}
    rows = {re.sub(r"\{(.*?)\}", lambda m: f"({m[1].replace(',', '|')})", row[0].strip("`")): row[1:] for row in table}
    found = {name: [pattern for pattern in rows if re.fullmatch(pattern, name)] for name in SCORES}
    assert {pattern for patterns in found.values() for pattern in patterns} == {*rows}
    for name, s in SCORES.items():
        (pattern,) = found[name]
        assert rows[pattern] == [s.unit, better[s.higher_is_better], "yes" if s.by_step else "no", s.needs or "–"], name


NAN = float("nan")
ONE, OTHER = mean_score(["a"], [1.0]), mean_score(["b"], [1.0])


@pytest.mark.parametrize(
    ("reason", "function", "arguments"),
    [("no-reports", label_counts, ([], [])), ("unequal-classes", label_counts, (["a"], [["b", "bp"]])),
     ("no-reports", Reports, (*[[]] * 4, "chexpert-rules", *[[]] * 5)), ("no-reports", mean_score, ([], [])),
     ("non-finite-score", auc, ([0, 1], [0.5, NAN])), ("unusable-sums", mean_score, (["a"], [NAN])),
     ("unequal-patients", compare, ([ONE], [OTHER])), ("unusable-p", holm, ({"a": NAN},)),
     ("no-reports", over_seeds, ([],)), ("unequal-lengths", lambda: reports(findings=[frozenset()]), ())],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused_by_name(reason, function, arguments):
    with refused(reason):
        function(*arguments)
