"""What reports say, scored at the site: nothing under the minimum cell, and the same by hand."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.learning.evaluation import finding_scores, report_rows, reports_of
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.suite.results import COMPARED, SUMS

DAY = datetime(2020, 1, 1)
EFFUSION = "There is a small left pleural effusion, decreased. The heart is enlarged."


def sample(number, report=EFFUSION, findings=("effusion_left",), changes=(), step=1, modality="ct", patient=None):
    about = (f"v{number}", DAY + timedelta(days=number), Path(f"{number}.png"), report, modality)
    facts = {"findings": None if findings is None else frozenset(findings), "changes": frozenset(changes)}
    return Sample(Visit(patient or f"p{number}", *about, **facts), None, "F", step, "test")


def reports(samples, texts, min_cell=1):
    return reports_of(samples, texts, [1.0] * len(samples), range(len(samples)), min_cell)


def test_what_each_report_adds_makes_up_the_sites_scores():
    """Scores from rows, by which suites test, are those of the registry."""
    texts = [EFFUSION, "There is a large left pleural effusion, increased.", "There is a cavity.", "Clear lungs."]
    changes = [("effusion_left", "decreased")]
    shown = [("effusion_left", "cavity")[: i % 2 + 1] for i in range(12)]
    samples = [sample(i, texts[-i % 3], shown[i], changes, patient=f"p{i // 3}") for i in range(12)]
    drafts = [texts[i * 5 % 4] for i in range(12)]
    rows = report_rows(samples, drafts, [1.0] * 12, personal=True)
    rows = [row | {"site": "a", "when": "end"} for row in rows]
    whole = scores_of(reports(samples, drafts))
    assert set(COMPARED) <= set(whole) and all(0 < whole[name] < 1 for name in ("degree_accuracy", "contradictions"))
    for name in {*COMPARED, "finding_f1_macro", "finding_f1_known_macro"} - {"cider"}:
        for units in ("patients", "studies"):
            assert SUMS[name](rows, units).value() == pytest.approx(whole[name]), name


def test_a_mean_of_findings_counts_those_of_enough_patients_alone():
    samples = [sample(i, findings=("cavity", *["effusion_left"] * (i < 2))) for i in range(4)]
    drafts = ["There is a cavity.", EFFUSION, "There is a cavity.", "There is a cavity."]
    values = [scores_of(reports(samples, drafts, least))["finding_f1_macro"] for least in (1, 3, 5)]
    assert values == [pytest.approx((6 / 7 + 2 / 3 + 0) / 3), 1.0, None], "6 / 7 in thirds; one heart is invented"


def test_known_new_and_stated_findings_apart():
    samples = [sample(i, findings=("effusion_left", "cavity")) for i in range(4)]
    texts = [EFFUSION, EFFUSION, "Nothing.", "There is a cavity."]
    assert finding_scores(reports(samples, texts, 4)) == {
        "known": {"effusion_left": {"n": 4, "recall": 0.5}},  # two reports name it, too few for its precision
        "new": {"cavity": {"n": 4, "recall": 0.25}},
    }
    half = {"n": 4, "recall": 0.5, "named": 2, "precision": 1.0}
    assert finding_scores(reports(samples, texts, 2))["known"] == {"effusion_left": half}
    assert finding_scores(reports(samples, texts, 1))["known"]["cardiomegaly"] == {"n": 0, "named": 2, "precision": 0.0}
    assert finding_scores(reports(samples, texts, 5)) == {"known": {}, "new": {}}
    real = [sample(i, findings=None) for i in range(4)]
    assert finding_scores(reports(real, texts, 1))["stated"] == {"Cardiomegaly": half, "Pleural_effusion": half}
