from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from fedtar_flare.data.text.sections import SECTIONS, check_sections, sections_of, select_sections, with_headings
from fedtar_flare.errors import ConfigError, DataError

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
        ("", {}),
    ],
)
def test_headings_and_what_is_none(text, expected):
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
    for value, said in (
        (["impresion"], "did you mean 'impression'"),
        ([], "must be"),
        (7, "must be"),
        ([1], "must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_sections(value, "x")


WORDS = st.lists(st.sampled_from(["clear", "No effusion.", "nodule 3 mm", "(stable)", "in comparison"]), min_size=1)


@given(st.dictionaries(st.sampled_from(SECTIONS), WORDS, min_size=1))
def test_what_is_written_with_headings_is_read_back(parts):
    texts = {name: " ".join(words) for name, words in parts.items()}
    assert sections_of(with_headings(list(texts.items()))) == texts
