from collections import Counter
from datetime import timedelta

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.data.cells import Timeline, split_of, synthetic_key
from fedtar_flare.synthetic import course
from fedtar_flare.synthetic.course import OLDER_FROM, CohortOptions, almost_never, change_step, plan_patient
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, NEW_FINDINGS, NEW_KINDS


def plan(number, site="site-1", style=1, time_steps=4, seed=0, alignment="visit", **options):
    half_years = tuple(course.FIRST_DAY + timedelta(days=180 * k) for k in range(1, time_steps))
    timeline = Timeline(time_steps, alignment, half_years if alignment == "period" else ())
    return plan_patient(site, style, number, timeline=timeline, seed=seed, options=CohortOptions(**options))


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(0, 500),
    seed=st.integers(0, 10**6),
    time_steps=st.integers(1, 6),
    alignment=st.sampled_from(["visit", "period"]),
    untidy=st.sampled_from([0.0, 1.0]),
)
def test_a_plan_is_repeatable_and_consistent(time_steps, **settings):
    patient = plan(time_steps=time_steps, **settings)
    assert patient == plan(time_steps=time_steps, **settings)
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


def rate(patients, name):
    visits = [visit for patient in patients for visit in patient.visits]
    return np.mean([any(finding.startswith(name) for finding in visit.findings) for visit in visits])


def test_planted_effects_on_prevalence():
    patients = [plan(number) for number in range(900)]
    old, young = ([p for p in patients if (p.visits[0].age >= OLDER_FROM) == older] for older in (True, False))
    women, men = ([p for p in patients if p.sex == sex] for sex in "FM")
    assert rate(old, "emphysema") > 1.3 * rate(young, "emphysema")
    assert rate(old, "cardiomegaly") > 1.2 * rate(young, "cardiomegaly")
    assert rate(men, "emphysema") > 1.1 * rate(women, "emphysema")
    assert rate(women, "lymphadenopathy") > 1.15 * rate(men, "lymphadenopathy")
    last = [[plan(n, change=change).visits[-1].findings for n in range(600)] for change in ("late", "none")]
    late, none = (sum(n[:6] == "consol" and s.change == "new" for f in part for n, s in f.items()) for part in last)
    assert late > 1.6 * none


def test_new_findings_are_rare_at_some_sites_and_almost_absent_at_the_others():
    assert {kind for style in range(1, 7) for kind in almost_never(style)} == set(NEW_KINDS)
    shares: dict[str, list[float]] = {kind: [] for kind in NEW_KINDS}
    for style in range(1, 7):
        patients = [plan(n, site=f"x-{style}", style=style, time_steps=3) for n in range(350)]
        for kind in NEW_KINDS:
            if kind in almost_never(style):
                assert rate(patients, kind) < 0.02, (style, kind)
            else:
                shares[kind].append(rate(patients, kind))
    assert all(0.03 < np.mean(share) < 0.08 and min(share) > 0.02 for share in shares.values()), shares


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
