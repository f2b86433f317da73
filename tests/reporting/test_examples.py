"""Generated and reference reports: what is marked, and that only a synthetic cohort's reach the run's page."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import write_run

from fedtar_flare.errors import FedTARError
from fedtar_flare.reporting.examples import (
    EXAMPLES_FILE,
    EXAMPLES_FOLDER,
    Example,
    SiteExamples,
    choose,
    examples_page,
    read_examples,
    write_examples,
)
from fedtar_flare.reporting.page import write_report

REFERENCE = "Right pleural effusion. No nodule. Heart of normal size."
WRITTEN = "There is a right pleural effusion. Nodule in the left lung. The heart is not enlarged."
SYNTHETIC = Example(1, WRITTEN, REFERENCE, ("cardiomegaly", "effusion_right"))
REAL = Example(2, WRITTEN, REFERENCE)


def marks(page, kind):
    tree = ElementTree.fromstring(page)
    table = next(e for e in tree.iter("table") if e.get("class") == "texts")
    return ["".join(e.itertext()).strip() for e in table.iter() if e.get("class") == kind]


def test_right_wrong_and_missed_findings_are_told_apart():
    page = examples_page(SiteExamples("east", 3, True, (SYNTHETIC,)))
    assert marks(page, "right") == ["There is a right pleural effusion.", "right: effusion right"]
    assert marks(page, "wrong") == ["Nodule in the left lung.", "not there: nodule left"]
    assert marks(page, "missed") == ["missed: cardiomegaly"]


def test_real_reports_are_compared_by_words():
    page = examples_page(SiteExamples("east", 3, False, (REAL,)))
    assert "has to stay there" in page
    assert "right pleural effusion." in " ".join(marks(page, "same"))
    assert "There is a" in marks(page, "other")


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_word_of_the_model_is_lost_and_no_text_breaks_the_page(written, reference):
    page = examples_page(SiteExamples("s", 1, False, (Example(1, written, reference),)))
    row = next(iter(next(e for e in ElementTree.fromstring(page).iter("tbody"))))
    shown = "".join(row[1].itertext())
    plain = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in written)
    assert shown.split() == plain.split() or not written.strip()


def test_a_few_of_each_step_in_their_order_are_chosen():
    chosen = choose([1, 2, 1, 1, 2], list("abcde"), list("ABCDE"), [None] * 5, per_step=2)
    assert [(e.time_step, e.written) for e in chosen] == [(1, "a"), (1, "c"), (2, "b"), (2, "e")]


def test_the_run_s_page_shows_synthetic_examples_and_no_others(tmp_path):
    folder = write_run(tmp_path)
    assert 'id="examples"' not in write_report(folder).read_text()
    for site, synthetic in (("east", True), ("west", False)):
        made = write_examples(tmp_path / site, SiteExamples(site, 2, synthetic, (SYNTHETIC,)))
        (folder / EXAMPLES_FOLDER).mkdir(exist_ok=True)
        (folder / EXAMPLES_FOLDER / f"{site}.json").write_bytes(made.with_name(EXAMPLES_FILE).read_bytes())
    page = write_report(folder).read_text()
    assert 'href="#examples"' in page
    section = next(e for e in ElementTree.fromstring(page).iter("section") if e.get("id") == "examples")
    assert [e.text for e in section.iter("h3")] == ["east, after round 2"]


def test_what_is_written_is_read_back_and_anything_else_refused(tmp_path):
    examples = SiteExamples("east", 2, True, (SYNTHETIC, REAL))
    write_examples(tmp_path, examples)
    assert read_examples(tmp_path / EXAMPLES_FILE) == examples
    (tmp_path / EXAMPLES_FILE).write_text("{}")
    with pytest.raises(FedTARError, match="no examples"):
        read_examples(tmp_path / EXAMPLES_FILE)
