"""Planted changes can be read back from the reports of every style."""

from __future__ import annotations

import pytest

from fedtar_flare.data.timeline import Timeline
from fedtar_flare.synthetic.build import report_of
from fedtar_flare.synthetic.changes import changes_in, planted_changes
from fedtar_flare.synthetic.course import CohortOptions, plan_patient
from fedtar_flare.synthetic.reports import write_report
from fedtar_flare.synthetic.styles import GENERIC, STYLES

PATIENTS = [
    plan_patient("site-1", 1, number, timeline=Timeline(4), seed=5, options=CohortOptions()) for number in range(40)
]


@pytest.mark.parametrize("style", range(len(STYLES) + 1))
def test_a_report_states_what_was_planted(style):
    seen = set()
    for patient in PATIENTS:
        for visit in patient.visits:
            if style:
                texts = [report_of(patient, visit, phase, style, CohortOptions()) for phase in ("before", "after")]
            else:
                texts = [write_report(GENERIC, visit.findings, resolved=visit.resolved, follow_up=True)]
            planted = planted_changes(visit)
            assert all(changes_in(text) == planted for text in texts), (planted, texts)
            seen |= {change.direction for change in planted}
    assert seen == {"new", "increased", "decreased", "resolved"}


def test_a_first_visit_has_no_change():
    assert not any(planted_changes(patient.visits[0]) for patient in PATIENTS)


@pytest.mark.parametrize("text", ["", "Follow-up.", "EMPHYSEMA: none.", "There is no new emphysema", "Emphysema."])
def test_a_text_without_change(text):
    assert changes_in(text) == frozenset()
