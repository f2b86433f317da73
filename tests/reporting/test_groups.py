"""Scores by group of patients, and the warning on the hospital's page."""

from datetime import datetime

import numpy as np
import pytest
from make_dicom import chest, put, write_series
from scipy import stats

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.learning.evaluation import report_rows
from fedtar_flare.metrics.significance import against_others, mean_score
from fedtar_flare.reporting.examples import SiteExamples, examples_page
from fedtar_flare.reporting.groups import scores_by_group

TEXT = "There is a small right pleural effusion. There is a nodule. The heart is normal."


def test_p_is_that_of_a_permutation_test():
    values = np.random.default_rng(3).normal(size=40) + 0.7 * (np.arange(40) < 12)
    groups = values[:12], values[12:]
    expected = stats.permutation_test(groups, lambda a, b: a.mean() - b.mean(), n_resamples=5000, random_state=1).pvalue
    found = against_others(mean_score([f"{i:02d}" for i in range(40)], values), np.arange(40) < 12)
    assert 0.01 < found < 0.5 and found == pytest.approx(expected, abs=0.02)


def test_a_group_whose_drafts_are_worse_is_warned_of_on_the_page(tmp_path):
    """Men's drafts miss what there is; ages and scanners differ by chance alone, and two patients have no sex."""
    write_series(tmp_path / "ct", chest(), edit=put(Manufacturer="Maker"))
    images, day = [tmp_path / ("ct" if i % 5 else "no") for i in range(42)], datetime(2020, 1, 1)
    visits = [Visit(f"p{i:02d}", f"v{i}", day, image, TEXT, "ct", 30.0 + i) for i, image in enumerate(images)]
    sexes = [*"FM" * 20, None, None]
    samples = [Sample(visit, None, sex, 1, "test") for visit, sex in zip(visits, sexes, strict=True)]
    texts = ["The heart is normal." if sample.sex == "M" else TEXT for sample in samples]
    rows = report_rows(samples, texts, [1.0] * 42, personal=True)
    found = scores_by_group(samples, rows, 5)
    assert {(one.kind, one.group, one.score) for one in found if one.behind} == {
        ("sex", "men", score) for score in ("rouge_l", "ctrate_rules_f1")
    }
    counts = {f"{one.kind} {one.group}": one.patients for one in found}
    assert counts.pop("scanner MAKER") == 33 and counts.pop("scanner unknown") == 9
    assert counts == {"sex men": 20, "sex women": 20, "age 40 to 59": 20, "age 60 to 79": 12, "age under 40": 10}
    assert {one.patients for one in scores_by_group(samples, rows, 2) if one.group == "unknown"} == {2, 9}
    page = examples_page(SiteExamples("s", 1, False, "ct", (), found))
    assert "sex, men: ROUGE-L" in page and page.count("falls behind.") == 2
    assert "No group falls behind" in examples_page(SiteExamples("s", 1, False, "ct", (), found[:0] + found[4:]))
