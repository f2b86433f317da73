"""Grades and the clinical score against texts whose findings, sides, degrees and changes are known."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_registry import reports

from fedtar_flare.metrics.clinical import abnormal, clinical_score
from fedtar_flare.metrics.grades import DEGREES, PARTS, claims, finding_changes, grade, statements
from fedtar_flare.metrics.labeler import rule_labeler
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.reports import Reports
from fedtar_flare.synthetic.reading import kind_labeler
from fedtar_flare.synthetic.reports import GENERIC, STYLES, State, write_report
from fedtar_flare.synthetic.vocabulary import FINDINGS, kind_of, side_of

KINDS = kind_labeler()


def data(name):
    """The lines of a file beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()


WORDINGS = [*(wording for style in STYLES for wording in style), GENERIC]
CHANGES = {"new": "new", "larger": "increased", "smaller": "decreased"}
STATES = st.builds(State, st.integers(1, 3), st.sampled_from(["first", "stable", *CHANGES]))


@pytest.mark.parametrize("line", data("graded_sentences.txt")[1:])
def test_what_reports_say_of_their_findings(line):
    text, expected = line.split(" =>")
    stated = []
    for one in statements(text, rule_labeler("ctrate-rules" if text.startswith("CT") else "chexpert-rules")):
        side = ["both"] if len(one.side) == 2 else one.side
        stated.append(" ".join([one.finding[:2], *side, *sorted(one.degree), *one.change]))
    assert "; ".join(stated) == expected.strip()


@st.composite
def visits(draw):
    """A wording, and findings of which no kind has two sides."""
    findings = draw(st.dictionaries(st.sampled_from(FINDINGS), STATES, min_size=1))
    return draw(st.sampled_from(WORDINGS)), {
        name: findings[name] for name in {kind_of(n): n for n in findings}.values()
    }


@settings(max_examples=200, deadline=None)
@given(visits(), st.sets(st.sampled_from(FINDINGS)))
def test_reads_what_was_planted_in_every_style(visit, gone):
    wording, findings = visit
    resolved = [name for name in FINDINGS if name in gone and kind_of(name) not in map(kind_of, findings)]
    found = statements(write_report(wording, findings, resolved=resolved, follow_up=True), KINDS)
    said = {(one.finding, *one.side, *one.degree, *one.change) for one in found if one.degree or one.resolved}
    expected = {(kind_of(name), *filter(None, [side_of(name)]), "resolved") for name in resolved}
    for name, state in findings.items():
        kind, change = kind_of(name), CHANGES.get(state.change)
        words = [side_of(name), wording.sizes[kind].split("|")[state.size - 1].lower(), change]
        expected.add((kind, *filter(None, words)))
    assert said == expected and {one.finding for one in found if not one.resolved} == set(map(kind_of, findings))


@settings(max_examples=100, deadline=None)
@given(visits(), st.data())
def test_a_mistake_is_graded_where_it_is(visit, data):
    wording, findings = visit
    wrong = data.draw(st.sampled_from(sorted(findings)))
    kind, state = kind_of(wrong), findings[wrong]
    reference = write_report(wording, findings, follow_up=True)
    right = {kind_of(name): ("right", True if side_of(name) else None, True, True if s.change in CHANGES else None)
             for name, s in findings.items()}  # fmt: skip

    def graded(draft, style=wording):
        grades = grade(write_report(style, draft, follow_up=True), reference, KINDS)
        return {one.finding: (one.presence, *(getattr(one, part) for part in PARTS)) for one in grades}

    assert graded(findings) == graded(findings, GENERIC) == right
    others = {name: one for name, one in findings.items() if name != wrong}
    assert graded(others) == right | {kind: ("missed", None, None, None)}
    assert graded(others | {wrong: replace(state, size=state.size % 3 + 1)})[kind][1:3] == (right[kind][1], False)
    if state.change in CHANGES:
        for change in {"stable", *CHANGES} - {state.change}:
            assert graded(others | {wrong: replace(state, change=change)}) == right | {kind: (*right[kind][:3], False)}
    if side_of(wrong):
        other = wrong.replace("left", "RIGHT").replace("right", "left").replace("RIGHT", "right")
        assert graded(others | {other: state}) == right | {kind: ("right", False, *right[kind][2:])}


WORDS = [*DEGREES, "right", "left", "both", "new", "stable", "effusion", "no", "nodule", "atelectasis", ",", "and", "."]


@settings(max_examples=100, deadline=None)
@given(*[st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join)] * 2)
def test_of_any_texts_presence_is_symmetric_and_a_text_agrees_with_itself(one, other):
    rules = rule_labeler("chexpert-rules")
    assert all((g.presence, g.side, g.degree, g.change).count(False) == 0 for g in grade(one, one, rules))
    mine, theirs = ({g.finding: g.presence for g in grade(*both, rules)} for both in ((one, other), (other, one)))
    turned = {"missed": "invented", "invented": "missed", "right": "right"}
    assert mine == {finding: turned[presence] for finding, presence in theirs.items()}


def test_scores_are_shares_of_what_is_graded_and_rest_on_enough_patients():
    large = [("p", 0, "Small left effusion, new.", "Large left effusion, new. Cardiomegaly.")]
    rows = [*large, ("q", 0, "Mild effusion.", "Mild effusion."), ("r", 0, "Clear.", "Clear.")]
    found = {cell: scores_of(reports(rows, min_cell=cell)) for cell in (1, 2)}
    names = ("presence_f1", "side_accuracy", "degree_accuracy", "change_accuracy", "change_coverage")
    assert [found[1][name] for name in names] == [pytest.approx(4 / 5), 1.0, 0.5, 1.0, 1.0]
    assert [found[2][name] for name in names] == [1.0, None, 0.5, None, None]  # shares of two patients' reports: halves


CLAIMS = {"increased": (1, 1), "decreased": (1, 0), "not certain": (0, 0), "": (0, 0)}


@given(st.lists(st.sampled_from([*CLAIMS]), min_size=1, max_size=9), st.integers(1, 4))
def test_a_draft_claims_a_change_unless_it_calls_it_not_certain_or_is_silent(drafts, cell):
    plain = {word: f"Effusion, {word}." for word in ("increased", "decreased")}
    plain |= {"": "Effusion.", "not certain": "Effusion. Its course is not certain."}
    rows = [(f"p{i}", 0, "Effusion, increased.", plain[draft]) for i, draft in enumerate(drafts)]
    scores, n = scores_of(reports(rows, min_cell=cell)), len(drafts) // cell * cell
    counts = [sum(column) / len(drafts) for column in zip(*map(CLAIMS.get, drafts), strict=True)]
    shown = [None if not n else round(count * n) / n if cell > 1 else count for count in counts]
    assert [scores["change_coverage"], scores["change_accuracy"]] == pytest.approx(shown)


CHEXPERT = rule_labeler("chexpert-rules")
SHORT = {"E": "Pleural Effusion", "A": "Atelectasis", "C": "Cardiomegaly", "P": "Pneumothorax", "D": "Support Devices"}


@pytest.mark.parametrize("line", data("changed_findings.txt")[1:])
def test_which_finding_changed(line):
    text, words = line.split(" =>")[0], line.split(" =>")[1].split()
    expected = {(SHORT[f], d) for f, d in zip(words[::2], words[1::2], strict=True)}
    assert finding_changes(text, CHEXPERT) == expected


def reports_of(*texts, patient="p"):
    return [(patient, i, text, text) for i, text in enumerate(texts)]


@pytest.mark.parametrize("line", data("contradictions.txt")[1:])
def test_contradictions_between_reports_of(line):
    texts, words = line.split(" =>")
    contradicted = [("p", "Pleural Effusion", word == "yes") for word in words.split()]
    rows = reports_of(*texts.split(" | "))
    assert claims(rows, CHEXPERT) == claims(rows[::-1], CHEXPERT) == contradicted


def test_only_the_same_patients_next_visit_is_compared():
    several = reports_of("No effusion.", "Small effusion.", "Stable effusion.") + reports_of(
        "New effusion.", patient="q"
    )
    assert claims(several, CHEXPERT) == [("p", "Pleural Effusion", False)]


REFERENCE = "Large left pneumothorax. 12 mm nodule in the right upper lobe. Mild scoliosis. No effusion."
BETTER = {  # the first draft of a pair is the better one
    "urgent before benign": ("Large left pneumothorax.", "Mild scoliosis."),
    "side": ("Large left pneumothorax.", "Large right pneumothorax."),
    "degree": ("Large left pneumothorax.", "Small left pneumothorax."),
    "size": ("14 mm nodule in the right upper lobe.", "2.2 cm nodule in the right upper lobe."),
    "unit": ("1.2 cm nodule in the right upper lobe.", "12 cm nodule in the right upper lobe."),
    "zone": ("Nodule in the right upper lobe.", "Nodule in the right lower lobe."),
    "related": ("Right upper lobe mass.", "Right upper lobe scar."),
    "denied": ("Left pneumothorax.", "No left pneumothorax."),
    "invented": ("Left pneumothorax.", "Left pneumothorax. Rib fracture."),
    "invented, by significance": ("Left pneumothorax. Osteophytes.", "Left pneumothorax. Pulmonary embolism."),
}


@pytest.mark.parametrize("pair", BETTER.values(), ids=BETTER)
def test_the_worse_mistake_costs_more(pair):
    better, worse = (clinical_score(REFERENCE, draft) for draft in pair)
    assert 0 < worse < better < 1


@pytest.mark.parametrize(
    "more", ["", " The heart is normal in size.", " No fracture. No free air.", " Trachea midline."]
)
def test_a_report_agrees_with_itself_and_normal_sentences_do_not_count(more):
    assert clinical_score(REFERENCE, REFERENCE + more) == clinical_score(REFERENCE + more, REFERENCE) == 1
    assert clinical_score("Lungs are clear.", "No pneumothorax." + more) == 1


def test_age_and_indication_say_how_much_a_finding_matters():
    child, adult = (clinical_score("Rib fracture.", "Clear.", age) for age in (4, 50))
    young, old = (clinical_score("Aortic atherosclerosis.", "Clear.", age) for age in (25, 82))
    hurt, operated = (clinical_score("There is free air.", "Clear.", None, of) for of in ("Accident", "After surgery."))
    assert child < adult and young < old and hurt < operated


def test_the_longest_phrase_counts_and_other_languages_are_not_graded():
    assert set(abnormal("Pericardial effusion.")) == {"pericardial effusion"}
    assert clinical_score("Kein Pneumothorax.", "Clear.") is None


@pytest.mark.parametrize("having", range(7))
def test_findings_of_fewer_patients_than_a_cell_do_not_show(having):
    def score(rare):
        references = [rare] * having + ["Small left effusion."] * 20
        n = len(references)
        patients, nothing = [*map(str, range(n))], [frozenset()] * n
        drafts = ["Left effusion. Left pneumothorax."] * n
        made = Reports(patients, [0.0] * n, references, drafts, "chexpert-rules", [1.0] * n, *[nothing] * 4, min_cell=5)
        return scores_of(made)["clinical_score"]

    assert (score("Large pneumothorax.") == score("Clear lungs.")) is (having in range(5))
