from __future__ import annotations

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.data.text.cleaning import CLEANINGS, clean_report
from fedtar_flare.errors import ConfigError

TEXTS = st.text(st.sampled_from("aB1234 ._,;:-/\"'()[]@\n"), max_size=60)


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("The heart is normal. No effusion.", "the heart is normal . no effusion ."),
        ("1. Clear.\n2. No effusion.\n3. Old fracture.", "clear . no effusion . old fracture ."),
        ("Compared to ____ ___, stable..", "compared to  stable ."),
        (
            'Size 1.5 cm, well-defined; see above: (right/left) "scar"',
            "size 15 cm well-defined see above rightleft scar .",
        ),
        ("A  nodule...  It's  new!", "a nodule . its new ."),
        ("Seen in 11. ribs", "seen in 1ribs ."),  # R2Gen's own oddity
    ],
)
def test_r2gen_by_hand(text, cleaned):
    assert clean_report(text, "r2gen-v1").split() == cleaned.split()


def test_none_is_the_text_as_stored_and_others_are_refused():
    assert clean_report(" As\nStored.. ") == " As\nStored.. "
    with pytest.raises(ConfigError, match="r2gen-v2"):
        clean_report("x", "r2gen-v2")
    assert CLEANINGS[0] == "none"


@given(TEXTS)
def test_what_cleaning_leaves(text):
    cleaned = clean_report(text, "r2gen-v1")
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
