"""A site's own pages: examples (only synthetic ones reach the run's page), and what changes over periods."""

import base64
import re
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_dicom import chest, put, write_series
from PIL import Image
from recorded_runs import write_run
from scipy import stats

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Sample, Visit
from fedtar_flare.imaging.batch import PriorBatch, collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.learning.evaluation import Evaluated, report_rows
from fedtar_flare.learning.findings import ReadFinding
from fedtar_flare.metrics import drift
from fedtar_flare.metrics.significance import against_others, mean_score
from fedtar_flare.reporting import examples as module
from fedtar_flare.reporting.examples import EXAMPLES_FILE, Example, SiteExamples, examples_page, write_examples
from fedtar_flare.reporting.page import write_report
from fedtar_flare.reporting.periods import write_periods
from fedtar_flare.synthetic.build import report_of
from fedtar_flare.synthetic.course import CohortOptions, plan_patient, stream, wording_share
from fedtar_flare.synthetic.phantom import draw_anatomy, render, site_scanner

REFERENCE = "There is a moderate right pleural effusion, increased. There is a small left nodule. The heart is normal."
DRAFT = "There is a small right pleural effusion, increased. There is a cavity. The heart is normal."
ONE = Example(1, 1, 1, DRAFT, REFERENCE)
SITE = SiteExamples("east", 2, True, "ct", (ONE,))


def scored(*visits):
    """What an evaluation of ``visits`` (patient, report) gives, and prepared images of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (8, 3, 64, 64), np.uint8)
    made = [Visit(p, f"{p}-{i}", datetime(2020, 3, i + 1), Path("x"), r, "ct") for i, (p, r) in enumerate(visits)]
    samples = [Sample(visit, None, None, 1, "test", None) for visit in made]
    drafts = {visit: f"draft of {visit.report}" for visit in made}
    return Evaluated({}, None, [], samples, drafts), [Prepared(noise, np.zeros(len(noise)))] * len(made)


class Model:
    """Shows every visit one image, and of a visit with one before these changes."""

    cohort = SimpleNamespace(timeline=SimpleNamespace(prior_generated=False))

    def __init__(self, images, read=()):
        self._images, self._read = images, read

    def prepared(self, samples):
        return self._images[: len(samples)]

    def images(self, samples):
        batch = collate(self._images[:1])
        batch.prior = PriorBatch(torch.tensor([9.0]), collate(self._images[1:2]))
        return batch

    def read_findings(self, sample, images, text):
        return self._read


def rows(page):
    """Per finding of the first visit: the class of the row, and (class, text) of presence, side, degree and change."""
    table = next(e for e in ElementTree.fromstring(page).iter("table") if e.get("class") == "grades")
    return {
        row[0].text: (row[0].get("class"), [(cell.get("class"), cell.text or "") for cell in row[1:]])
        for row in table.iter("tr")
        if row[0].get("scope")
    }


def test_each_part_of_a_finding_is_marked_and_counted():
    for site in (SITE, replace(SITE, synthetic=False)):
        marks = {name.lower().split()[-1].split("_")[0]: row for name, row in rows(examples_page(site)).items()}
        correct, side = ("right", "correct"), ("right", "right")
        assert marks["effusion"] == ("part", [correct, side, ("part", "small (moderate)"), ("right", "increased")])
        assert marks["nodule"][0] == "wrong" and marks["nodule"][1][0] == ("wrong", "missed")
    page = examples_page(SITE)
    assert rows(page)["cavity"] == ("wrong", [("wrong", "invented"), ("", ""), ("", ""), ("", "")])
    assert "Presence 1 of 3 correct, side 1 of 1, degree 0 of 1, change 1 of 1" in page
    right = examples_page(replace(SITE, examples=(replace(ONE, draft=REFERENCE),)))
    assert {kind for kind, _ in rows(right).values()} == {"right"}
    page = examples_page(replace(SITE, examples=(Example(1, 1, 1, "A small nodule.", "A large nodule, new."),)))
    assert [e.text for e in ElementTree.fromstring(page).find(".//ol").iter("mark")] == ["small", "large", ", new"]


def test_the_first_patients_are_chosen_visit_by_visit_whatever_was_written():
    assert module.choose([*"aabbbcd"]) == [0, 1, 2, 3, 4, 5]
    assert len(module.choose([*"a" * 99, *"bcdefg"])) == module.VISITS + module.PATIENTS - 1
    found, images = scored(("zoe", "one"), ("zoe", "two"), ("adam", "three"))
    examples = module.examples_of(found, Model(images))
    assert [(e.patient, e.visit, e.reference) for e in examples] == [(1, 1, "one"), (1, 2, "two"), (2, 1, "three")]
    page = examples_page(replace(SITE, examples=examples))
    places = [page.index(part) for part in ("Patient 1", "Visit 2", "Patient 2")]
    assert places == sorted(places)
    assert not re.search("zoe|adam|2020", page)


def read(change, slices=(1, 2), side="right"):
    return ReadFinding("effusion", side, "small", change, {"presence": 0.9, "degree": 0.8, "change": 0.76}, slices)


def test_a_claim_of_change_is_shown_with_the_key_slices_of_both_visits(tmp_path):
    """And of this visit alone where no image before was shown; what is unchanged, uncertain or unknown claims none."""
    found, images = scored(("p", "one"), ("p", "two"))
    first, second = found.samples
    found.samples[1] = replace(second, prior=first.visit)
    stacks = (np.stack([np.full((3, 64, 64), 10 * v + k, np.uint8) for k in range(9)]) for v in (1, 5))
    images = [Prepared(stack, np.zeros(9)) for stack in stacks]
    claims = (read("increased"), read("resolved", (4, None), side=None))
    model = Model(images, (*claims, read("unchanged"), read("uncertain"), read(None)))
    examples = module.examples_of(found, model)
    assert not examples[0].changes, "of a first visit"
    (claim, both), (other, alone) = examples[1].changes
    assert claim == "effusion, right: increased, 0.76; before slice 3 of 9; now slice 2 of 9"
    assert other == "effusion: resolved, 0.76; now slice 5 of 9"

    def shade(address):
        return Image.open(BytesIO(base64.b64decode(address.partition(",")[2]))).convert("L").getpixel((0, 0))

    assert [*map(shade, both), *map(shade, alone)] == [52, 11, 14]
    site = replace(SITE, examples=examples)
    shown = [e.get("src") for e in ElementTree.fromstring(examples_page(site)).iter("img")]
    assert {*both, *alone} <= {*shown}
    page = write_examples(tmp_path, site)
    assert module.read_examples(tmp_path / EXAMPLES_FILE) == site
    assert {path.stat().st_mode & 0o777 for path in (page, tmp_path / EXAMPLES_FILE)} == {0o600}
    (tmp_path / EXAMPLES_FILE).write_text("{}")
    with pytest.raises(FedTARError, match="no examples"):
        module.read_examples(tmp_path / EXAMPLES_FILE)


@settings(max_examples=30)
@given(st.text(max_size=60), st.text(max_size=60))
def test_no_word_is_lost_and_no_text_breaks_the_page(draft, reference):
    page = examples_page(replace(SITE, examples=(Example(1, 1, 1, draft, reference), ONE)))
    paragraphs = [e[1] for e in ElementTree.fromstring(page).iter("div") if len(e) == 2 and e[0].tag == "h5"]
    for text, shown in zip((draft, reference), paragraphs, strict=False):
        plain = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
        assert "".join(shown.itertext()).split() == (plain.split() or ["nothing"])


def test_the_run_s_page_shows_synthetic_examples_and_no_others(tmp_path):
    folder = write_run(tmp_path)
    assert 'id="examples"' not in write_report(folder).read_text()
    (folder / module.EXAMPLES_FOLDER).mkdir(exist_ok=True)
    for site, synthetic in (("east", True), ("west", False)):
        made = write_examples(tmp_path / site, replace(SITE, site=site, synthetic=synthetic))
        (folder / module.EXAMPLES_FOLDER / f"{site}.json").write_bytes(made.with_name(EXAMPLES_FILE).read_bytes())
    page = write_report(folder).read_text()
    assert 'href="#examples"' in page
    section = next(e for e in ElementTree.fromstring(page).iter("section") if e.get("id") == "examples")
    assert [e.text for e in section.iter("h3")] == ["east, after round 2"]
    assert "These are of round 2, the last to be scored; the scores are of round 3." in page


def test_p_is_that_of_a_permutation_test():
    values = np.random.default_rng(3).normal(size=40) + 0.7 * (np.arange(40) < 12)
    groups = values[:12], values[12:]
    expected = stats.permutation_test(groups, lambda a, b: a.mean() - b.mean(), n_resamples=5000, random_state=1).pvalue
    found = against_others(mean_score([f"{i:02d}" for i in range(40)], values), np.arange(40) < 12)
    assert 0.01 < found < 0.5 and found == pytest.approx(expected, abs=0.02)


def test_a_group_whose_drafts_are_worse_is_warned_of_on_the_page(tmp_path):
    """Men's drafts miss what there is; ages and scanners differ by chance alone, and two patients have no sex."""
    write_series(tmp_path / "ct", chest(), edit=put(Manufacturer="Maker"))
    text, samples = "There is a small right pleural effusion. There is a nodule. The heart is normal.", []
    for i, sex in enumerate([*"FM" * 20, None, None]):
        image = tmp_path / ("ct" if i % 5 else "no")
        visit = Visit(f"p{i:02d}", f"v{i}", datetime(2020, 1, 1), image, text, "ct", 30.0 + i)
        samples.append(Sample(visit, None, sex, 1, "test"))
    texts = ["The heart is normal." if sample.sex == "M" else text for sample in samples]
    rows = report_rows(samples, texts, [1.0] * 42, personal=True)
    scores = module.scores_by_group(samples, rows, 5)
    behind = {(of.kind, of.group, of.score) for of in scores if of.behind}
    assert behind == {("sex", "men", score) for score in ("rouge_l", "ctrate_rules_f1")}
    patients = {"scanner MAKER": 33, "scanner unknown": 9, "sex men": 20, "sex women": 20}
    patients |= {"age 40 to 59": 20, "age 60 to 79": 12, "age under 40": 10}
    assert {f"{of.kind} {of.group}": of.patients for of in scores} == patients
    assert {of.patients for of in module.scores_by_group(samples, rows, 2) if of.group == "unknown"} == {2, 9}
    page = examples_page(SiteExamples("s", 1, False, "ct", (), scores))
    assert "sex, men: ROUGE-L" in page and page.count("falls behind.") == 2
    page = examples_page(SiteExamples("s", 1, False, "ct", (), scores[4:]))
    assert "No group falls behind" in page and "no patient of the site is in the test split" in page


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
            grey = np.clip((hu[:, None] + 1000) / 6, 0, 255).astype(np.uint8)
            images[visit.visit_id] = Prepared(grey, np.zeros(len(hu)))
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
    p = [stats.permutation_test(losses.T[[t, 2]], lambda a, b: np.mean(a - b), **exact).pvalue for t in (0, 1)]
    (_, first, difference, low), (_, second, _, high) = drift.falls(rows)
    assert (first, low) == (1, pytest.approx(2 * p[1])) and (second, high) == (0, pytest.approx(max(p[0], 2 * p[1])))
    assert difference.low < np.mean(losses[:, 2] - losses[:, 1]) < difference.high
    assert np.isclose(*(drift.changes(rows * k, ["token_loss"], 1)[0][2] for k in (1, 4)), rtol=0.05), "same patients"
    assert {p for *_, p in drift.falls([{**row, "token_loss": -row["token_loss"]} for row in rows])} == {1.0}, "it rose"


def test_new_phrases_are_those_that_no_other_period_before_the_newest_has():
    texts = ["a b c d e", "a b c d", "b c d e f", "x a b c d e f", "b c d e g"]
    assert drift.unseen_phrases(texts, [1, 1, 2, 3, 3]) == [50.0, 100.0, 50.0, 25.0, 50.0]
