"""Report text: identifiers left behind, sections, and cleaning as in the literature."""

import csv
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused
from tables import cases

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.curation.identifiers import find_identifiers
from fedtar_flare.data.report_text import (
    SECTIONS,
    check_sections,
    clean_report,
    sections_of,
    select_sections,
    with_headings,
)

TEXTS = cases(__file__, "texts.yaml")


@pytest.mark.parametrize(
    "kind, marked", [(kind, text) for kind, texts in TEXTS["identifiers"].items() for text in texts]
)
def test_identifiers(kind, marked):
    text = marked.replace("[", "").replace("]", "")
    assert find_identifiers(text) == [(kind, (marked.index("["), marked.index("]") - 1))]


@pytest.mark.parametrize("text", TEXTS["harmless"])
def test_harmless_passages(text):
    assert find_identifiers(text) == []


@given(st.text(st.sampled_from("Dr. Smith 12.03.2019 +49@a-/()"), max_size=80))
def test_passages_are_in_order_and_do_not_overlap(text):
    edges = [edge for _, (start, end) in find_identifiers(text) for edge in (start, end) if start < end]
    assert edges == sorted(edges) and all(0 <= edge <= len(text) for edge in edges)


@pytest.mark.shared_data
def test_false_alarms_on_real_reports(shared_data):
    """800 reports of CT-RATE: all 244 hits are dates of earlier examinations (read one by one); no other alarm."""
    for name, column, dates, texts in (
        ("ctrate_reports/train.csv", "report_text", 244, 173), ("covid_chestxray/metadata.csv", "clinical_notes", 9, 9),
    ):  # fmt: skip
        with (shared_data / name).open(encoding="utf-8", errors="replace") as file:
            hits = [find_identifiers(row[column]) for row in csv.DictReader(file)]
        assert Counter(kind for of_text in hits for kind, _ in of_text) == {"date": dates}
        assert sum(map(bool, hits)) == texts


REPORT = """                 FINAL REPORT
 EXAMINATION:  CHEST (PA AND LAT)

 INDICATION:  ___ year old man // eval for infection

 COMPARISON:  Chest radiograph from ___.

 FINDINGS:

 In comparison to the prior study: no change.
 There are no findings of edema.

 IMPRESSION:

 1. No acute process.
"""


def test_a_report_with_headings():
    sections = sections_of(REPORT)
    assert list(sections) == ["examination", "indication", "comparison", "findings", "impression"]
    assert sections["examination"] == "CHEST (PA AND LAT)" and sections["impression"] == "1. No acute process."
    assert all(words in sections["findings"] for words in ("no findings of edema", "prior study: no change"))


@pytest.mark.parametrize("text, expected", TEXTS["headings"])
def test_headings_and_texts_without(text, expected):
    assert sections_of(text) == expected


def test_sections_come_in_the_order_asked_for_and_missing_ones_are_skipped():
    text = "FINDINGS: Clear.\nIMPRESSION: Normal."
    assert select_sections(text, ("impression", "comparison", "findings")) == "Normal.\nClear."
    assert select_sections(text, ()) == text
    with refused("no-section", "no section technique"):
        select_sections(text, ("technique",))
    with pytest.raises(DataError, match="no headings at all"):
        select_sections("Clear.", ("findings",))


def test_names_of_sections():
    assert check_sections("findings", "x") == ("findings",) and check_sections("all", "x") == ()
    assert check_sections(["impression", "findings", "impression"], "x") == ("impression", "findings")
    for value, said in ((["impresion"], "did you mean 'impression'"), *((bad, "must be") for bad in ([], 7, [1]))):
        with pytest.raises(ConfigError, match=said):
            check_sections(value, "x")


WORDS = st.lists(st.sampled_from(["clear", "No effusion.", "nodule 3 mm", "(stable)", "in comparison"]), min_size=1)


@given(st.dictionaries(st.sampled_from(SECTIONS), WORDS, min_size=1))
def test_sections_are_read_back_from_headings(parts):
    texts = {name: " ".join(words) for name, words in parts.items()}
    assert sections_of(with_headings(list(texts.items()))) == texts


DRAWN = st.text(st.sampled_from("aB1234 ._,;:-/\"'()[]@\n"), max_size=60)


@pytest.mark.parametrize("text, cleaned", TEXTS["r2gen"])
def test_r2gen_by_hand(text, cleaned):
    assert clean_report(text, "r2gen-v1").split() == cleaned.split()


@given(DRAWN)
def test_characters_after_cleaning(text):
    cleaned = clean_report(text, "r2gen-v1")
    assert clean_report(text) == text, "by default as stored"
    assert cleaned == cleaned.lower() and "\n" not in cleaned and "  " not in cleaned
    words = [token for token in cleaned.split() if token != "."]  # a full stop stands alone, as in R2Gen
    assert not set("".join(words)) & set('.,;:/"()[]@_')
    assert cleaned.endswith(".")
