import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import cases

from fedtar_flare.data.cells import Timeline
from fedtar_flare.synthetic.build import report_of
from fedtar_flare.synthetic.course import CohortOptions, plan_patient
from fedtar_flare.synthetic.reading import changes_in, findings_in, planted_changes
from fedtar_flare.synthetic.reports import GENERIC, STYLES, State, style_of, wording_of, write_report
from fedtar_flare.synthetic.vocabulary import FINDINGS, KINDS, kind_of, side_of

OPTIONS = CohortOptions()
WORDINGS = [*itertools.chain(*STYLES), GENERIC]
MIXED = [wording_of(style, share, 0.5) for style in range(2, 7) for share in (0.0, 1.0)]
STATES = st.builds(State, st.integers(1, 3), st.sampled_from(["first", "new", "larger", "smaller", "stable"]))


def grams(texts):
    """Three words that follow each other."""
    texts = (re.findall(r"\w+", text.lower()) for text in texts)
    return {gram for words in texts for gram in zip(words, words[1:], words[2:], strict=False)}


def test_styles_differ_strongly_in_wording():
    phrases = {"generic": grams([write_report(GENERIC, {"nodule_left": State(1)}), write_report(GENERIC, {})])}
    for style, share in itertools.product(range(1, 7), (0.0, 1.0)):
        plans = [plan_patient("s", style, n, timeline=Timeline(3), seed=5, options=OPTIONS) for n in range(80)]
        phrases[style, share] = grams(report_of(p, v, share, style, OPTIONS) for p in plans for v in p.visits)
    for (first, a), (second, b) in itertools.combinations(phrases.items(), 2):
        assert len(a & b) / min(len(a), len(b)) < 0.2, (first, second)


def test_age_group_changes_one_sentence():
    for wording in itertools.chain(*STYLES):
        young, old = (write_report(wording, {}, older=older).split(". ") for older in (False, True))
        assert len(young) == len(old)
        assert sum(a.rstrip(".") != b.rstrip(".") for a, b in zip(young, old, strict=True)) == 1
    assert write_report(GENERIC, {}, older=True) == write_report(GENERIC, {}, older=False)


def test_a_site_s_style_follows_from_its_name():
    numbered = {"site-1": 1, "site-6": 6, "site-7": 1, "hospital12": 6, "s0": 6, "7": 1}
    assert {site: style_of(site) for site in numbered} == numbered
    assert {style_of(f"hospital {chr(97 + i)}") for i in range(26)} == set(range(1, 7))


@pytest.mark.parametrize("second", [0.0, 1.0])
@pytest.mark.parametrize("style", range(2, 7))
def test_a_share_of_the_kinds_is_in_the_style_s_words(style, second):
    site, common = wording_of(style, second), wording_of(1, second)
    assert wording_of(style, second, 1.0) is site and wording_of(style, second, 0.0) == common
    for share in (0.3, 0.5, 0.8):
        mixed = wording_of(style, second, share)
        of_site = [k for k in KINDS if (mixed.sentences[k], mixed.sizes[k]) == (site.sentences[k], site.sizes[k])]
        assert len(of_site) == int(len(KINDS) * share)
        assert all(mixed.sentences[kind] == common.sentences[kind] for kind in KINDS if kind not in of_site)
        assert mixed.sections == (site if share >= 0.5 else common).sections


@pytest.mark.parametrize("style", range(len(STYLES) + 1))
def test_planted_changes_can_be_read_back_from_the_reports_of_every_style(style):
    seen = set()
    for number in range(40):
        patient = plan_patient("site-1", 1, number, timeline=Timeline(4), seed=5, options=OPTIONS)
        assert not planted_changes(patient.visits[0])
        for visit in patient.visits:
            texts = [report_of(patient, visit, share, style, OPTIONS) for share in (0.0, 0.3, 0.6, 1.0) if style]
            texts = texts or [write_report(GENERIC, visit.findings, resolved=visit.resolved, follow_up=True)]
            planted = planted_changes(visit)
            assert all(changes_in(text) == planted for text in texts), (planted, texts)
            seen |= {change.direction for change in planted}
    assert seen == {"new", "increased", "decreased", "resolved"}


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


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("name", FINDINGS)
def test_every_sentence_states_its_finding(wording, name):
    """The impression must not be what saves the reading."""
    kind, side = kind_of(name), side_of(name)
    for size in wording.sizes[kind].split("|"):
        for change in ["", *wording.changes.split("|")]:
            sentence = wording.sentences[kind].format(size=size, side=side, change=change)
            assert findings_in(sentence) == {name}, sentence


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "sentences.yaml"))
def test_plain_sentences(text, expected):
    assert findings_in(text) == {*expected}


@given(st.text())
@example("EMPHYSEMA: none.")
@example("There is no new emphysema")
def test_any_text_can_be_read(text):
    assert findings_in(text) <= set(FINDINGS) and changes_in(text) == frozenset()
