import itertools
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import cases

from fedtar_flare.data.cells import Timeline, split_of, synthetic_key
from fedtar_flare.synthetic import course
from fedtar_flare.synthetic.course import CohortOptions, change_step, plan_patient
from fedtar_flare.synthetic.reading import changes_in, findings_in, planted_changes
from fedtar_flare.synthetic.reports import GENERIC, STYLES, State, wording_of, write_report
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, NEW_FINDINGS


def plan(number, site="site-1", style=1, time_steps=4, seed=0, alignment="visit", **options):
    half_years = tuple(course.FIRST_DAY + timedelta(days=180 * k) for k in range(1, time_steps))
    timeline = Timeline(time_steps, alignment, half_years if alignment == "period" else ())
    return plan_patient(site, style, number, timeline=timeline, seed=seed, options=CohortOptions(**options))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 500), st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(["visit", "period"]), st.booleans()
)
def test_a_plan_is_repeatable_and_consistent(number, seed, time_steps, alignment, untidy):
    patient, again = (plan(number, "s", 1, time_steps, seed, alignment, untidy=float(untidy)) for _ in range(2))
    assert patient == again
    moments = [visit.acquired for visit in patient.visits]
    assert moments == sorted(set(moments)) and 1 <= len(moments) <= time_steps
    before: dict[str, int] = {}
    for i, visit in enumerate(patient.visits):
        assert 1 <= visit.time_step <= time_steps
        assert set(visit.findings) <= set(FINDINGS)
        assert len(visit.findings.keys() & set(KNOWN_FINDINGS)) <= course.MOST_FINDINGS
        assert len(visit.findings.keys() & set(NEW_FINDINGS)) <= course.MOST_NEW
        for name, state in visit.findings.items():
            if i == 0 or name not in before:
                assert state.change == ("new" if i else "first")
            else:
                signs = {"larger": 1, "smaller": -1, "stable": 0}
                assert np.sign(state.size - before[name]) == signs[state.change]
        assert set(visit.resolved) == set(before) - set(visit.findings)
        before = {name: state.size for name, state in visit.findings.items()}


def test_identifiers_give_the_planned_splits_and_say_nothing_about_time():
    patients = [plan(number, site="s") for number in range(40)]
    splits = [split_of(p.patient_id, synthetic_key(0, "s")) for p in patients]
    assert Counter(splits) == {"train": 28, "validation": 4, "test": 8}
    assert set(splits[:3]) == {"train", "validation", "test"}
    assert len({p.patient_id for p in patients}) == 40
    names = [[v.visit_id for v in p.visits] for p in patients if len(p.visits) > 2]
    assert any(visits != sorted(visits) for visits in names)


def test_each_kind_of_drift_changes_one_thing_from_its_step_on():
    steps, numbers = range(1, 7), range(150)
    begin = {"late": [None, 2, 3, 3, 4, 5], "early": [None, 2, 2, 2, 2, 2], "none": [None] * 6}
    assert {c: [change_step(CohortOptions(change=c), t) for t in steps] for c in begin} == begin
    begins = {"change_step": 3, "change_group": "everyone"}
    shares = {"template": [0, 0, 1, 1, 1, 1], "gradual": [0, 0, 0.25, 0.5, 0.75, 1], "reverted": [0, 0, 1, 1, 0, 0]}
    control = [plan(n, time_steps=6, change="none") for n in numbers]
    for change in ("template", "gradual", "reverted", "scanner", "none"):
        options = CohortOptions(change=change, **begins)
        assert [course.wording_share(options, t, 6) for t in steps] == shares.get(change, [0] * 6)
        assert [plan(n, time_steps=6, change=change, **begins) for n in numbers] == control
    spreads = [plan(n, site="site-2", style=2, time_steps=6, change="epidemic", **begins) for n in numbers]
    visits = [visit for patient in spreads for visit in patient.visits]
    share = [np.mean(["cavity" in v.findings for v in visits if v.time_step == t]) for t in steps]
    assert max(share[:2]) < 0.05 and min(share[2:]) > 0.15, "rare, then common, where a style hardly ever has it too"


OPTIONS = CohortOptions()
WORDINGS = [*itertools.chain(*STYLES), GENERIC]
MIXED = [wording_of(style, share, 0.5) for style in range(2, 7) for share in (0.0, 1.0)]
STATES = st.builds(State, st.integers(1, 3), st.sampled_from(["first", "new", "larger", "smaller", "stable"]))


@settings(max_examples=250, deadline=None)
@given(
    wording=st.sampled_from(WORDINGS + MIXED),
    findings=st.dictionaries(st.sampled_from(FINDINGS), STATES),
    gone=st.sets(st.sampled_from(FINDINGS)),
    follow_up=st.booleans(),
    older=st.booleans(),
)
def test_reads_the_truth_back_in_every_style(wording, findings, gone, follow_up, older):
    resolved = [name for name in FINDINGS if name in gone and name not in findings]
    report = write_report(wording, findings, resolved=resolved, follow_up=follow_up, older=older)
    assert findings_in(report) == findings.keys()
    assert findings_in(report.lower()) == findings.keys()
    if follow_up:
        planted = planted_changes(SimpleNamespace(findings=findings, resolved=resolved))
        assert changes_in(report) == planted and len(planted) >= len(resolved)


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "sentences.yaml"))
def test_plain_sentences(text, expected):
    assert findings_in(text) == {*expected}


@given(st.text())
@example("EMPHYSEMA: none.")
@example("There is no new emphysema")
def test_any_text_can_be_read(text):
    assert findings_in(text) <= set(FINDINGS) and changes_in(text) == frozenset()
