from __future__ import annotations

import csv
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.data.text.identifiers import KINDS, find_identifiers


@pytest.mark.parametrize(
    "text, kind, passage",
    [
        ("Discussed with Dr. Smith by phone.", "name", "Dr. Smith"),
        ("Discussed with Dr J. van Dyke", "name", "Dr J. van Dyke"),
        ("Seen by Prof. Ana Müller-Lüdenscheidt today.", "name", "Prof. Ana Müller-Lüdenscheidt"),
        ("SEEN BY DR. SMITH", "name", "DR. SMITH"),
        ("Mrs. O'Brien has a nodule.", "name", "Mrs. O'Brien"),
        ("Patient name: JANE DOE", "name", "Patient name: JANE DOE"),
        ("Electronically signed by John Doe.", "name", "signed by John Doe"),
        ("CT dated 27.03.2019.", "date", "27.03.2019"),
        ("CT of 2019-03-27 shows", "date", "2019-03-27"),
        ("since 3/27/2019, stable", "date", "3/27/2019"),
        ("since 3/27/19, stable", "date", "3/27/19"),
        ("January 25, 2020", "date", "January 25, 2020"),
        ("on the 25th of Jan 2020 at night", "date", "25th of Jan 2020"),
        ("in May 2016 the", "date", "May 2016"),
        ("call 617-555-0123 now", "phone", "617-555-0123"),
        ("call (617) 555-0123 now", "phone", "(617) 555-0123"),
        ("pager 31234 at 5 pm", "phone", "pager 31234"),
        ("Tel: 030 / 450 50", "phone", "Tel: 030 / 450 50"),
        ("+49 30 450 500 00", "phone", "+49 30 450 500 00"),
        ("MRN: 00123456", "id", "MRN: 00123456"),
        ("Accession number 12-AB-3456 was", "id", "Accession number 12-AB-3456"),
        ("Patient ID #A12345", "id", "Patient ID #A12345"),
        ("write to jane.doe@hospital.example.org.", "email", "jane.doe@hospital.example.org"),
    ],
)
def test_what_is_found(text, kind, passage):
    ((found, (start, end)),) = find_identifiers(text)
    assert found == kind and kind in KINDS
    assert text[start:end] == passage


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
def test_what_is_none(text):
    assert find_identifiers(text) == []


@given(st.text(st.sampled_from("Dr. Smith 12.03.2019 +49@a-/()"), max_size=80))
def test_passages_are_in_order_and_do_not_overlap(text):
    found = find_identifiers(text)
    edges = [place for _, span in found for place in span]
    assert edges == sorted(edges) and all(0 <= start < end <= len(text) for _, (start, end) in found)


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
