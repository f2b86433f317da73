import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.synthetic.reading import findings_in
from fedtar_flare.synthetic.reports import State, write_report
from fedtar_flare.synthetic.styles import GENERIC, STYLES, wording_of
from fedtar_flare.synthetic.vocabulary import FINDINGS, kind_of, side_of

MIXED = [wording_of(style, share, 0.5) for style in range(2, 7) for share in (0.0, 1.0)]
WORDINGS = [*(wording for style in STYLES for wording in style), GENERIC]
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


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("name", FINDINGS)
def test_every_sentence_states_its_finding(wording, name):
    """The impression must not be what saves the reading."""
    kind, side = kind_of(name), side_of(name)
    for size in wording.sizes[kind].split("|"):
        for change in ["", *wording.changes.split("|")]:
            sentence = wording.sentences[kind].format(size=size, side=side, change=change)
            assert findings_in(sentence) == {name}, sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        ("Small effusion and consolidation on the right.", {"effusion_right", "consolidation_right"}),
        ("Effusion on the right and consolidation on the left.", {"effusion_right", "consolidation_left"}),
        ("Bilateral pleural effusions, no nodule.", {"effusion_right", "effusion_left"}),
        ("Nodules in the right and left lung.", {"nodule_right", "nodule_left"}),
        ("Right lung: consolidation, nodule.", {"consolidation_right", "nodule_right"}),
        ("No change of the small left effusion.", {"effusion_left"}),
        ("The right effusion has resolved; left nodule.", {"nodule_left"}),
        ("The right effusion is no longer seen.", set()),
        ("Heart mildly enlarged but no enlarged nodes.", {"cardiomegaly"}),
        ("Heart and lymph nodes are not enlarged.", set()),
        ("Lungs free of infiltrate or nodule on the right.", set()),
        ("Pericardial effusion, more on the left.", {"pericardial_effusion"}),
        ("Small pericardial and left pleural effusions.", {"effusion_left"}),
        ("Pneumothorax on the left, cavity in the right lung, no fibrotic change.", {"pneumothorax_left", "cavity"}),
        ("The pleural cavities are free.", set()),
        ("Pleural effusion.", set()),
        ("effusion effusion right right right", {"effusion_right"}),
    ],
)
def test_plain_sentences(text, expected):
    assert findings_in(text) == expected


@given(st.text())
def test_never_fails(text):
    assert findings_in(text) <= set(FINDINGS)
