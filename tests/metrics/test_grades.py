"""Grades and the clinical score against texts whose findings, sides, degrees and changes are known."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import cases, lines
from test_registry import reports

from fedtar_flare.learning.comparison import CHANGES, stated_changes
from fedtar_flare.learning.labels import LEVELS, UNKNOWN, labeler
from fedtar_flare.metrics.clinical import clinical_score
from fedtar_flare.metrics.grades import DEGREES, PARTS, claims, finding_changes, grade, statements
from fedtar_flare.metrics.labeler import rule_labeler
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.synthetic.reading import kind_labeler
from fedtar_flare.synthetic.reports import GENERIC, STYLES, State, write_report
from fedtar_flare.synthetic.vocabulary import FINDINGS, kind_of, side_of

KINDS = kind_labeler()
WORDINGS = [*(wording for style in STYLES for wording in style), GENERIC]
WAYS = {"new": "new", "larger": "increased", "smaller": "decreased"}
STATES = st.builds(State, st.integers(1, 3), st.sampled_from(["first", "stable", *WAYS]))


@pytest.mark.parametrize("line", lines(__file__, "graded_sentences.txt"))
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
    one_of_each_kind = {kind_of(name): name for name in findings}.values()
    return draw(st.sampled_from(WORDINGS)), {name: findings[name] for name in one_of_each_kind}


@settings(max_examples=200, deadline=None)
@given(visits(), st.sets(st.sampled_from(FINDINGS)))
def test_reads_what_was_planted_in_every_style(visit, gone):
    wording, findings = visit
    resolved = [name for name in FINDINGS if name in gone and kind_of(name) not in map(kind_of, findings)]
    found = statements(write_report(wording, findings, resolved=resolved, follow_up=True), KINDS)
    said = {(one.finding, *one.side, *one.degree, *one.change) for one in found if one.degree or one.resolved}
    expected = {(kind_of(name), *filter(None, [side_of(name)]), "resolved") for name in resolved}
    for name, state in findings.items():
        kind, change = kind_of(name), WAYS.get(state.change)
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
    right = {kind_of(name): ("right", True if side_of(name) else None, True, True if s.change in WAYS else None)
             for name, s in findings.items()}  # fmt: skip

    def graded(draft, style=wording):
        grades = grade(write_report(style, draft, follow_up=True), reference, KINDS)
        return {one.finding: (one.presence, *(getattr(one, part) for part in PARTS)) for one in grades}

    assert graded(findings) == graded(findings, GENERIC) == right
    others = {name: one for name, one in findings.items() if name != wrong}
    assert graded(others) == right | {kind: ("missed", None, None, None)}
    assert graded(others | {wrong: replace(state, size=state.size % 3 + 1)})[kind][1:3] == (right[kind][1], False)
    if state.change in WAYS:
        for change in {"stable", *WAYS} - {state.change}:
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


@pytest.mark.parametrize("line", lines(__file__, "changed_findings.txt"))
def test_which_finding_changed(line):
    text, words = line.split(" =>")[0], line.split(" =>")[1].split()
    expected = {(SHORT[f], d) for f, d in zip(words[::2], words[1::2], strict=True)}
    assert finding_changes(text, CHEXPERT) == expected


@pytest.mark.parametrize("line", lines(__file__, "contradictions.txt"))
def test_contradictions_between_reports_of_one_patient(line):
    texts, words = line.split(" =>")
    contradicted = [("p", "Pleural Effusion", word == "yes") for word in words.split()]
    rows = [("p", i, text, text) for i, text in enumerate(texts.split(" | "))]
    with_another = [*rows[::-1], *[("q", len(rows), "New effusion.", "New effusion.")] * 2]  # two films of one moment
    assert claims(rows, CHEXPERT) == claims(with_another, CHEXPERT) == contradicted


REFERENCE = "Large left pneumothorax. 12 mm nodule in the right upper lobe. Mild scoliosis. No effusion."
BETTER = cases(__file__, "mistakes.yaml")


@pytest.mark.parametrize("pair", BETTER.values(), ids=BETTER)
def test_the_worse_mistake_costs_more(pair):
    better, worse = (clinical_score(REFERENCE, draft) for draft in pair)
    assert 0 < worse < better < 1


@pytest.mark.parametrize("more", ["", " The heart is normal.", " No fracture. No free air.", " Trachea midline."])
def test_a_report_agrees_with_itself_and_normal_sentences_do_not_count(more):
    assert clinical_score(REFERENCE, REFERENCE + more) == clinical_score(REFERENCE + more, REFERENCE) == 1
    assert clinical_score("Lungs are clear.", "No pneumothorax." + more) == 1


@pytest.mark.parametrize("having", range(7))
def test_findings_of_fewer_patients_than_a_cell_do_not_show(having):
    def score(rare):
        references = [rare] * having + ["Small left effusion."] * 20
        rows = [(f"{i}", 0, reference, "Left effusion. Left pneumothorax.") for i, reference in enumerate(references)]
        return scores_of(reports(rows, min_cell=5))["clinical_score"]

    assert (score("Large pneumothorax.") == score("Clear lungs.")) is (having in range(5))


FOLLOW_UPS = cases(__file__, "follow_ups.yaml")
DEGREES, SIGNS = dict(zip("smlp", LEVELS[1:], strict=True)), dict(zip("n+-=r", CHANGES[1:6], strict=True))


def gold_of(marks, findings):
    """By finding its level, its change by the words, and by both reports; None for a part that is not counted."""
    gold = dict.fromkeys(findings.values(), ("absent", "", ""))
    for code, *mark in (part.split() for part in marks.split(", ") if part):
        text = mark[0] if mark else ""
        sign = next((SIGNS[letter] for letter in text if letter in SIGNS), "")
        open_, alone = "~" in text, "" if "(" in text else sign
        level = None if text == "~" else DEGREES.get(text[0], "absent")
        gold[findings[code]] = (level, None if open_ else alone, None if open_ else sign)
    return gold


def count(counts, part, read, true):
    """Count a part that was read as right, wrong or missed."""
    if read and read == true:
        counts[part, "right"] += 1
    elif read or true:
        counts[part, "wrong"] += bool(read)
        counts[part, "missed"] += bool(true)


def counts_of(rules, half):
    reader, counts = labeler(rules), Counter()
    for text, marks, *before in FOLLOW_UPS[rules][half]:
        gold, stated = gold_of(marks, FOLLOW_UPS[rules]["findings"]), reader.stated_levels
        both = [stated_changes(text, stated(text), stated(b), reader) for b in before]
        rows = {"words": stated_changes(text, stated(text), None, reader)} | ({"two reports": both[0]} if both else {})
        for i, name in enumerate(reader.findings):
            if name == reader.no_finding:
                continue
            level, *changes = gold[name]
            read = LEVELS[reader.levels(text)[i]]
            if level is not None:
                count(counts, "presence", read != "absent", level != "absent")
                if "absent" not in (read, level):
                    counts["degree", "right" if read == level else "wrong"] += 1
            for (part, row), true in zip(rows.items(), changes, strict=False):
                if true is not None:
                    count(counts, part, CHANGES[row[i]] if row[i] > 0 else "", true)
    return counts


@pytest.mark.parametrize("half", ["tuned", "held_out"])
@pytest.mark.parametrize("rules", ["chexpert-rules", "ctrate-rules"])
def test_what_a_reader_takes_from_follow_ups_is_read(rules, half):
    counts = counts_of(rules, half)
    for part, precise, complete in (("presence", 0.95, 0.95), ("words", 0.94, 0.75), ("two reports", 0.99, 0.99)):
        right, wrong, missed = (counts[part, kind] for kind in ("right", "wrong", "missed"))
        assert right >= precise * (right + wrong) and right >= complete * (right + missed), (part, counts)
    right, wrong = counts["degree", "right"], counts["degree", "wrong"]
    assert right > 20 and right >= 0.93 * (right + wrong), counts


@pytest.mark.parametrize(("before", "text", "expected"), cases(__file__, "two_reports.yaml"))
def test_two_reports_tell_a_change_only_where_both_speak(before, text, expected):
    reader = labeler("chexpert-rules")
    changes = stated_changes(text, reader.stated_levels(text), reader.stated_levels(before), reader)
    name = "Support Devices" if "tube" in text else "Pleural Effusion"
    assert changes[reader.findings.index(name)] == (UNKNOWN if expected is None else CHANGES.index(expected))
    assert changes[reader.findings.index(reader.no_finding)] == UNKNOWN
