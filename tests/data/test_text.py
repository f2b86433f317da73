"""Report text: identifiers left behind, sections, and cleaning as in the literature."""

import csv
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

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

IDENTIFIERS = {
    "name": [
        "Discussed with [Dr. Smith] by phone.", "Discussed with [Dr J. van Dyke]", "[Mrs. O'Brien] has a nodule.",
        "Seen by [Prof. Ana Müller-Lüdenscheidt] today.", "SEEN BY [DR. SMITH]", "[Patient name: JANE DOE]",
        "Electronically [signed by John Doe].",
    ],
    "date": [
        "CT dated [27.03.2019].", "CT of [2019-03-27] shows", "since [3/27/2019], stable", "since [3/27/19], stable",
        "[January 25, 2020]", "on the [25th of Jan 2020] at night", "in [May 2016] the",
    ],
    "phone": [
        "call [617-555-0123] now", "call [(617) 555-0123] now", "[pager 31234] at 5 pm", "[Tel: 030 / 450 50]",
        "[+49 30 450 500 00]",
    ],
    "id": ["[MRN: 00123456]", "[Accession number 12-AB-3456] was", "[Patient ID #A12345]"],
    "email": ["write to [jane.doe@hospital.example.org]."],
}  # fmt: skip


@pytest.mark.parametrize("kind, marked", [(kind, text) for kind, texts in IDENTIFIERS.items() for text in texts])
def test_identifiers(kind, marked):
    text = marked.replace("[", "").replace("]", "")
    assert find_identifiers(text) == [(kind, (marked.index("["), marked.index("]") - 1))]


@pytest.mark.parametrize(
    "text",
    [
        "A 13x9.3 mm lymph node at T12/L1, 1.5 x 2.3 cm, 10/15 slices, HU -600/1500.",
        "Grade 3/4 stenosis; ratio 12/25; C5-6-7; 1.2.3 cm",
        "Discussed with Dr. ___ on ___ at ___.",
        "Discussed with Dr. XXXX on XXXX.",
        "The patient may 2 weeks later return; in march he walked.",
        "MR angiography; MS plaques; MR Angiography; DR Chest; doctor was informed",
        "Version 1.2.840.10008, BI-RADS 4, TNM T2N1M0",
        "Accession to the request; patient identity confirmed; tel aviv",
        "No 30.02. fracture, segments 2019 to 2020",
        "32.13.2020 and 2020.45.67",
        "",
    ],
)
def test_harmless_passages(text):
    assert find_identifiers(text) == []


@given(st.text(st.sampled_from("Dr. Smith 12.03.2019 +49@a-/()"), max_size=80))
def test_passages_are_in_order_and_do_not_overlap(text):
    edges = [edge for _, (start, end) in find_identifiers(text) for edge in (start, end) if start < end]
    assert edges == sorted(edges) and all(0 <= edge <= len(text) for edge in edges)


@pytest.mark.shared_data
def test_false_alarms_on_real_reports(shared_data):
    """800 reports of CT-RATE: all 244 hits are dates of earlier examinations (read one by one); no other alarm."""
    with (shared_data / "ctrate_reports" / "train.csv").open(encoding="utf-8") as file:
        found = [find_identifiers(row["report_text"]) for row in csv.DictReader(file)]
    assert Counter(kind for hits in found for kind, _ in hits) == {"date": 244}
    assert sum(bool(hits) for hits in found) == 173
    with (shared_data / "covid_chestxray" / "metadata.csv").open(encoding="utf-8", errors="replace") as file:
        found = [find_identifiers(row["clinical_notes"]) for row in csv.DictReader(file)]
    assert Counter(kind for hits in found for kind, _ in hits) == {"date": 9}  # real ones too


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
    found = sections_of(REPORT)
    assert list(found) == ["examination", "indication", "comparison", "findings", "impression"]
    assert found["examination"] == "CHEST (PA AND LAT)" and found["impression"] == "1. No acute process."
    assert "no findings of edema" in found["findings"] and "prior study: no change" in found["findings"]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Findings: Clear.\nConclusion: Normal.", {"findings": "Clear.", "impression": "Normal."}),
        ("PA and lateral.  FINDINGS: Clear.  IMPRESSION: Normal.", {"findings": "Clear.", "impression": "Normal."}),
        ("The findings: were clear. My impression: fine.", {}),
        ("WET READ\n Something.\n IMPRESSION: Normal.\n FINAL REPORT\n No more.", {"impression": "Normal."}),
        ("FINDINGS AND IMPRESSION: Clear.", {"findings": "Clear."}),
        ("Clinical   information: Cough.\nFinding: Clear.", {"findings": "Clear."}),
        ("FINDINGS: A.\nADDENDUM: B.\nFINDINGS: C.", {"findings": "A.\nC.", "addendum": "B."}),
        ("FINDINGS:\nIMPRESSION: Normal.", {"impression": "Normal."}),
        ("CHEST, TWO VIEWS: Clear.\nIMPRESSION: Normal.", {"findings": "Clear.", "impression": "Normal."}),
        ("PA and lateral views of the chest:\nClear.", {"findings": "Clear."}),
        ("CHEST: Clear.", {}),
        *((f"IMPRESSION: A.\n{end}: B.", {"impression": "A."}) for end in ("COMMENT", "DATE", "Comments")),
        ("FINDINGS: A.\nCOMPARISON FILM: None.", {"findings": "A.", "comparison": "None."}),
        ("IMPRESSION: A.\nRECOMMENDATION(S): B.", {"impression": "A.", "recommendation": "B."}),
        ("IMPRESSION: A.\nFINAL ADDENDUM: B.", {"impression": "A.", "addendum": "B."}),
        ("", {}),
    ],
)
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


TEXTS = st.text(st.sampled_from("aB1234 ._,;:-/\"'()[]@\n"), max_size=60)


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("The heart is normal. No effusion.", "the heart is normal . no effusion ."),
        ("1. Clear.\n2. No effusion.\n3. Old fracture.", "clear . no effusion . old fracture ."),
        ("Compared to ____ ___, stable..", "compared to  stable ."),
        ('Size 1.5 cm, well-defined: (right/left) "scar"', "size 15 cm well-defined rightleft scar ."),
        ("A  nodule...  It's  new!", "a nodule . its new ."),
        ("Seen in 11. ribs", "seen in 1ribs ."),  # R2Gen's own oddity
    ],
)
def test_r2gen_by_hand(text, cleaned):
    assert clean_report(text, "r2gen-v1").split() == cleaned.split()


@given(TEXTS)
def test_characters_after_cleaning(text):
    cleaned = clean_report(text, "r2gen-v1")
    assert clean_report(text) == text, "by default as stored"
    assert cleaned == cleaned.lower() and "\n" not in cleaned and "  " not in cleaned
    words = [token for token in cleaned.split() if token != "."]  # a full stop stands alone, as in R2Gen
    assert not set("".join(words)) & set('.,;:/"()[]@_')
    assert cleaned.endswith(".")


@pytest.mark.shared_data
def test_real_reports_keep_their_words(shared_data):
    with (shared_data / "ctrate_reports" / "train.csv").open(encoding="utf-8") as file:
        texts = [row["report_text"] for row in csv.DictReader(file)]
    assert len(texts) == 800
    for text in texts:
        letters = sum(c.isalpha() for c in text)
        assert sum(c.isalpha() for c in clean_report(text, "r2gen-v1")) == pytest.approx(letters, rel=0.01)
