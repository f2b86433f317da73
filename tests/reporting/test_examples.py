"""Examples: which are chosen and in which order, their marks, and that only synthetic ones reach the run's page."""

import base64
import re
from dataclasses import replace
from datetime import datetime
from io import BytesIO
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
from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.imaging.batch import PriorBatch, collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.learning.evaluation import Evaluated, report_rows
from fedtar_flare.learning.findings import ReadFinding
from fedtar_flare.metrics.significance import against_others, mean_score
from fedtar_flare.reporting import examples as module
from fedtar_flare.reporting.examples import EXAMPLES_FILE, Example, SiteExamples, examples_page, write_examples
from fedtar_flare.reporting.groups import scores_by_group
from fedtar_flare.reporting.page import write_report

REFERENCE = "There is a moderate right pleural effusion, increased. There is a small left nodule. The heart is normal."
DRAFT = "There is a small right pleural effusion, increased. There is a cavity. The heart is normal."
ONE = Example(1, 1, 1, DRAFT, REFERENCE)
SITE = SiteExamples("east", 2, True, "ct", (ONE,))


def scored(*visits, modality="ct", size=(8, 3, 64, 64)):
    """What an evaluation of ``visits`` (patient, report) gives, and prepared images of noise."""
    day, noise = datetime(2020, 3, 4), np.random.default_rng(0).integers(0, 256, size, np.uint8)
    made = [Visit(p, f"{p}-{i}", day.replace(day=i + 1), Path("x"), r, modality) for i, (p, r) in enumerate(visits)]
    samples = [Sample(visit, None, None, 1, "test", None) for visit in made]
    texts = [f"draft of {visit.report}" for visit in made]
    return Evaluated({}, None, [], samples, texts), [Prepared(noise, np.zeros(len(noise)))] * len(made)


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
        right = ("right", "right")
        assert marks["effusion"] == ("part", [right, right, ("part", "small (moderate)"), ("right", "increased")])
        assert marks["nodule"][0] == "wrong" and marks["nodule"][1][0] == ("wrong", "missed")
    page = examples_page(SITE)
    assert rows(page)["cavity"] == ("wrong", [("wrong", "invented"), ("", ""), ("", ""), ("", "")])
    assert "Presence 1 of 3 right, side 1 of 1, degree 0 of 1, change 1 of 1" in page
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


@pytest.mark.parametrize(
    ("modality", "size", "count"), [("ct", (9, 3, 64, 64), 3), ("radiograph", (1, 3, 400, 300), 1)]
)
def test_pictures_are_small_parts_of_the_prepared_image_and_say_which(modality, size, count):
    visits = [*[("p", str(i)) for i in range(module.VISITS)], ("q", "x"), ("r", "x")]
    found, images = scored(*visits, modality=modality, size=size)
    examples = module.examples_of(found, Model(images))
    assert {len(e.pictures) for e in examples} == {count}
    assert examples[0].caption == ("slices 3, 5, 7 of 9, from feet to head, lung window" if count == 3 else "")
    assert all(len(picture) < module.PIXELS * 1.5 / count for e in examples for picture in e.pictures)
    page = examples_page(SiteExamples("s", 1, False, modality, examples))
    shown = [e.get("src") for e in ElementTree.fromstring(page).iter("img")]
    assert shown == [picture for e in examples for picture in e.pictures] and "img-src data:" in page
    many = [SiteExamples("s", 1, True, modality, examples)] * 100
    assert "<img" not in module.render_examples(many, headed=True)


def read(change, slices=(1, 2), side="right"):
    return ReadFinding("effusion", side, "small", change, {"presence": 0.9, "degree": 0.8, "change": 0.76}, slices)


@pytest.mark.parametrize("colour", [False, True])
def test_a_claim_of_change_is_shown_with_the_key_slices_of_both_visits(tmp_path, colour):
    """And of this visit alone where no image before was shown; what is unchanged, uncertain or unknown claims none."""
    found, images = scored(("p", "one"), ("p", "two"), modality="photograph" if colour else "ct")
    first, second = found.samples
    found.samples[1] = replace(second, prior=first.visit)
    images = [
        Prepared(np.stack([np.full((3, 64, 64), 10 * v + k, np.uint8) for k in range(9)]), np.zeros(9)) for v in (1, 5)
    ]
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
    page = ElementTree.fromstring(examples_page(site))
    figures = [list(e) for box in page.iter("div") if box.get("class") == "changes" for e in box if e.tag == "figure"]
    assert [[e.get("src") for e in figure if e.tag == "img"] for figure in figures] == [list(both), list(alone)]
    assert [figure[-1].text for figure in figures] == [claim, other]
    write_examples(tmp_path, site)
    assert module.read_examples(tmp_path / EXAMPLES_FILE) == site


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


def test_what_is_written_is_read_back_and_anything_else_refused(tmp_path):
    examples = replace(SITE, examples=(ONE, replace(ONE, pictures=("data:image/png;base64,AA==",), caption="slice")))
    page = write_examples(tmp_path, examples)
    assert {path.stat().st_mode & 0o777 for path in (page, tmp_path / EXAMPLES_FILE)} == {0o600}
    assert module.read_examples(tmp_path / EXAMPLES_FILE) == examples
    (tmp_path / EXAMPLES_FILE).write_text("{}")
    with pytest.raises(FedTARError, match="no examples"):
        module.read_examples(tmp_path / EXAMPLES_FILE)


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
    scores = scores_by_group(samples, rows, 5)
    behind = {(of.kind, of.group, of.score) for of in scores if of.behind}
    assert behind == {("sex", "men", score) for score in ("rouge_l", "ctrate_rules_f1")}
    assert {f"{of.kind} {of.group}": of.patients for of in scores} == {
        "scanner MAKER": 33, "scanner unknown": 9, "sex men": 20, "sex women": 20,
        "age 40 to 59": 20, "age 60 to 79": 12, "age under 40": 10,
    }  # fmt: skip
    assert {of.patients for of in scores_by_group(samples, rows, 2) if of.group == "unknown"} == {2, 9}
    page = examples_page(SiteExamples("s", 1, False, "ct", (), scores))
    assert "sex, men: ROUGE-L" in page and page.count("falls behind.") == 2
    assert "No group falls behind" in examples_page(SiteExamples("s", 1, False, "ct", (), scores[4:]))
