"""A site's page over periods: planted changes are found and named, and what a fall and a new phrase are."""

from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import permutation_test

from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Visit
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.learning.evaluation import report_rows
from fedtar_flare.metrics import drift
from fedtar_flare.reporting.periods import write_periods
from fedtar_flare.synthetic.build import report_of
from fedtar_flare.synthetic.course import CohortOptions, plan_patient, stream, wording_share
from fedtar_flare.synthetic.phantom import draw_anatomy, render, site_scanner

T = 4
LINE = Timeline(T, "period", tuple(datetime(2019, month, 1) for month in (4, 7, 10)))
SAID = {"template": "cause: wording", "scanner": "cause: images", "epidemic": "cause: prevalence", "none": "No score"}


def hospital(change, seed=0, begins=T):
    """A cohort that changes from a period on, its images (else noise), and drafts by who knows what was before."""
    drawn, patients, images, drafts = change in ("scanner", "none"), [], {}, {}
    options = CohortOptions(change=change, change_step=begins, change_group="everyone")
    for number in range(24 if drawn else 72):  # so many, for a fall by one finding
        one = plan_patient("site-1", 1, number, timeline=LINE, seed=seed, options=options)
        anatomy, visits = draw_anatomy(stream(seed, number)), []
        for visit in one.visits:
            new = change == "scanner" and visit.time_step == T
            sizes = {name: state.size for name, state in visit.findings.items()}
            noise = stream(seed, number, visit.visit_id)
            hu = render(anatomy, sizes, site_scanner(1 + new), noise) if drawn else noise.normal(0, 100, (2, 8, 8))
            images[visit.visit_id] = Prepared(
                np.clip((hu[:, None] + 1000) / 6, 0, 255).astype(np.uint8), np.zeros(len(hu))
            )
            seen = {name: state for name, state in visit.findings.items() if not new and name != "cavity"}
            drafts[visit.visit_id] = report_of(one, replace(visit, findings=seen), 0.0, 1, options)
            report = report_of(one, visit, wording_share(options, visit.time_step, T), 1, options)
            facts = {"findings": frozenset(sizes), "changes": frozenset()}
            visits.append(Visit(one.patient_id, visit.visit_id, visit.acquired, Path("x"), report, "ct", **facts))
        patients.append(Patient(one.patient_id, one.sex, tuple(visits)))
    return Cohort("site-1", patients, key=bytes(16), timeline=LINE), images, drafts


def written(folder, cohort, images, drafts, first=2):
    """The page after each period."""
    model = SimpleNamespace(cohort=cohort, prepared=lambda samples: [images[one.visit.visit_id] for one in samples])
    for t in range(first, T + 1):
        samples = cohort.samples(None, t)
        texts = [drafts[sample.visit.visit_id] for sample in samples]
        yield write_periods(folder, model, report_rows(samples, texts, [1.0] * len(texts), personal=True)).read_text()


@pytest.mark.parametrize("change", SAID)
def test_a_planted_change_raises_the_alarm_with_its_cause(tmp_path, change):
    cohort, images, drafts = hospital(change)
    first, second, last = written(tmp_path, cohort, images, drafts)
    assert "first one that was scored" in first and "No score of period 3 fell" in second
    assert ("Alarm" in last) is (change != "none") and SAID[change] in last
    assert len(ElementTree.fromstring(last)) and not any(one.patient_id in last for one in cohort.patients)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_a_change_that_lasts_is_still_named_next_time_and_neither_who_withdrew_counts_nor_what_came_later(tmp_path):
    cohort, images, drafts = hospital("reverted", begins=T - 1)
    *_, second, last = written(tmp_path, cohort, images, drafts)
    assert SAID["template"] in second and SAID["template"] in last and "had until period 2" in last
    gone = cohort.patients[0].patient_id
    left = cohort.leaving_out(lambda visit: "excluded" if visit.patient_id == gone else None), images, drafts
    (fresh := tmp_path / "fresh").mkdir()
    _, without = islice(written(fresh, *left), 2)
    assert next(written(tmp_path, *left, 3)) == without != second


def test_a_fall_is_a_permutation_test_corrected_for_scores_and_periods(monkeypatch):
    monkeypatch.setattr(drift, "WATCHED", ("token_loss",))
    losses = np.random.default_rng(0).normal([1, 0.6, 1.5], 0.5, (10, 3))
    rows = [{"patient_id": i, "time_step": t, "token_loss": losses[i, t]} for i in range(10) for t in range(3)]
    exact = {"permutation_type": "samples", "n_resamples": np.inf}
    p = [permutation_test(losses.T[[t, 2]], lambda a, b: np.mean(a - b), **exact).pvalue for t in (0, 1)]
    (_, first, difference, low), (_, second, _, high) = drift.falls(rows)
    assert (first, low) == (1, pytest.approx(2 * p[1])) and (second, high) == (0, pytest.approx(max(p[0], 2 * p[1])))
    assert difference.low < np.mean(losses[:, 2] - losses[:, 1]) < difference.high
    assert {p for *_, p in drift.falls([{**row, "token_loss": -row["token_loss"]} for row in rows])} == {1.0}, "it rose"


def test_new_phrases_are_those_that_no_other_period_before_the_newest_has():
    texts = ["a b c d e", "a b c d", "b c d e f", "x a b c d e f", "b c d e g"]
    assert drift.unseen_phrases(texts, [1, 1, 2, 3, 3]) == [50.0, 100.0, 50.0, 25.0, 50.0]
