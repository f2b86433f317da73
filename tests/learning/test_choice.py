"""A report that does not state what was read is searched for once more, and completed."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from batches import rows
from hypothesis import given
from hypothesis import strategies as st
from test_diagnosis import batch, extended

from fedtar_flare.learning.choice import Findings, FindingsChoice
from fedtar_flare.learning.comparison import CHANGES, NONE, RESOLVED, UNCERTAIN, UNCHANGED, Reading
from fedtar_flare.learning.labels import NEGATIVE, PRESENT, labeler
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.models.config import preset

BEAMS = 5
decode = build_tokenizer(preset("tiny", max_length=20)).decode
READERS = {name: labeler(name) for name in ("synthetic", "chexpert-rules", "ctrate-rules")}
SENTENCES = (
    "{degree} {a}.", "No {a}.", "No {a} or {b}.", "Possible {a}.", "{degree} {a} and {b}.", "The {a} has increased.",
    "{a} has resolved, {b} is unchanged.", "New {a} and {degree} {b}; no {c}.", "{a}, {degree}.", "Intact bones.",
)  # fmt: skip


def words(name):
    *others, last = name.lower().split("_")
    return " ".join([last, *others] if last in ("left", "right") else [*others, last])


def choice_of(reader, completes=True):
    return FindingsChoice(SimpleNamespace(reader=reader), 1, completes)


@st.composite
def texts(draw, reader):
    """A report of a few sentences on findings of a labeler; the last may be without a stop."""
    names = st.sampled_from(reader.findings).map(words)
    degrees = st.sampled_from(("small", "moderate", "large", ""))
    parts = draw(st.lists(st.tuples(st.sampled_from(SENTENCES), names, names, names, degrees), max_size=5))
    text = " ".join(s.format(a=a, b=b, c=c, degree=degree).strip().capitalize() for s, a, b, c, degree in parts)
    return text.rstrip("." * draw(st.booleans()))


def consistent(level, change):
    """A change that a level allows."""
    return change if (change in (NONE, RESOLVED)) != bool(level) else UNCERTAIN if level else NONE


@st.composite
def cases(draw):
    """A labeler, a report, and what was read: mostly that a finding is absent."""
    reader = READERS[draw(st.sampled_from(sorted(READERS)))]
    names = st.sampled_from([name for name in reader.findings if name != reader.no_finding])
    some = draw(st.dictionaries(names, st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=4))
    pairs = [some.get(name, (0, NONE)) for name in reader.findings]
    read = Findings(tuple(level for level, _ in pairs), tuple(consistent(*pair) for pair in pairs))
    return reader, draw(texts(reader)), read


def claim(change):
    return NONE if change in (UNCHANGED, UNCERTAIN) else change


def agrees(level, change, wanted_level, wanted_change):
    vague = PRESENT in (level, wanted_level) and 0 not in (level, wanted_level)
    return (vague or level == wanted_level) and claim(change) == claim(wanted_change)


@given(cases())
def test_completing_changes_nothing_but_the_findings_that_were_read_otherwise(case):
    """Levels, changes, denials and doubts of all others stay; that the other side is denied may be left out."""
    reader, text, read = case
    choice = choice_of(reader)
    completed = choice.complete(text, read)
    before, after = choice.stated(text), choice.stated(completed)
    rows = zip(reader.findings, *read, *before, *after, reader.label(text), reader.label(completed), strict=True)
    for name, level, change, was, became, now, becomes, label, new in rows:
        if name == reader.no_finding:
            continue
        if (was, became, label) != (now, becomes, new):
            sided = name.endswith(("left", "right")) and (label, new) == (NEGATIVE, 0)
            assert sided or (agrees(now, becomes, level, change) and (level or change == RESOLVED)), (text, completed)
            assert sided or not agrees(was, became, level, change)
    assert choice.count_differences(completed, read) <= choice.count_differences(text, read)
    assert choice_of(reader, completes=False).complete(text, read) == text


@given(cases())
def test_texts_are_compared_by_presence_and_then_by_degree_and_change(case):
    reader, text, read = case
    choice = choice_of(reader)
    rows = list(zip(*choice.stated(text), *read, strict=True))
    presence = sum((level > 0) != (wanted > 0) for level, _, wanted, _ in rows)
    degree = [PRESENT not in (a, b) and a != b and a > 0 and b > 0 for a, _, b, _ in rows]
    other = sum(d or claim(c) != claim(w) for d, (_, c, _, w) in zip(degree, rows, strict=True))
    assert choice.count_differences(text, read) == presence * (len(rows) + 1) + other


@pytest.mark.parametrize("name", READERS)
def test_a_plain_sentence_states_what_was_read(name):
    """Of the classes of real rules that are named by a phrase of a report."""
    reader, count = READERS[name], 0
    choice = choice_of(reader)
    for i, finding in enumerate(reader.findings):
        if finding == reader.no_finding or (name != "synthetic" and not reader.levels(f"{words(finding)}.")[i]):
            continue
        count += 1
        for level, change in product(range(5), range(7)):
            if consistent(level, change) == change and (level or change):
                of_one = torch.eye(len(reader.findings), dtype=torch.long)[i]
                text = choice.complete("", Findings((level * of_one).tolist(), (change * of_one).tolist()))
                stated = choice.stated(text)
                assert text and agrees(stated.levels[i], stated.changes[i], level, change), text
                assert ("not certain" in text) is (change == UNCERTAIN)
    assert count >= 0.7 * (len(reader.findings) - bool(reader.no_finding))


@pytest.mark.parametrize(
    ("name", "text", "read", "completed"),
    [
        ("chexpert-rules", "No effusion or pneumothorax. The heart is normal.", {"Pleural Effusion": (1, "new")},
         "No pneumothorax. The heart is normal. Small pleural effusion, new."),
        ("chexpert-rules", "The effusion has increased. Stable cardiomegaly.", {"Pleural Effusion": (3, "decreased")},
         "Stable cardiomegaly. Large pleural effusion, decreased."),
        ("chexpert-rules", "The effusion has increased.", {"Pleural Effusion": (2, "uncertain")},
         "Moderate pleural effusion. Its course is not certain."),
        ("chexpert-rules", "Possible pneumonia or effusion.", {"Pleural Effusion": (4, "none")},
         "Possible pneumonia or effusion. Pleural effusion."),
        ("synthetic", "No effusion.", {"effusion_right": (2, "none")}, "Moderate right effusion."),
        ("synthetic", "Large right effusion.", {"nodule_left": (0, "resolved")},
         "Large right effusion. Resolution of left nodule."),
        ("synthetic", "Large cavity", {}, "Large cavity"),
        # words that the rules would not read back, or otherwise
        ("synthetic", "Large cavity", {"effusion_right": (1, "new")}, "Large cavity"),
        ("chexpert-rules", "No effusion or pleural thickening.", {"Pleural Effusion": (1, "new")},
         "No effusion or pleural thickening."),
        ("chexpert-rules", "Normal.", {"Pleural Other": (1, "none")}, "Normal."),
    ],
)  # fmt: skip
def test_a_report_says_in_plain_sentences_what_it_leaves_out_or_says_otherwise(name, text, read, completed):
    findings = READERS[name].findings
    pairs = [read.get(finding, (0, "none")) for finding in findings]
    wanted = Findings(tuple(p[0] for p in pairs), tuple(CHANGES.index(p[1]) for p in pairs))
    assert choice_of(READERS[name]).complete(text, wanted) == completed


def test_the_label_of_a_normal_report_is_no_finding_to_be_written():
    reader = READERS["chexpert-rules"]
    ones = torch.ones(1, len(reader.findings))
    reading = Reading((PRESENT * ones).long(), 0 * ones.long(), ones, ones, ones)
    branch = SimpleNamespace(reader=reader, read=lambda seen: reading)
    [findings] = FindingsChoice(branch, 1, True).prompted_findings(None)
    assert findings.levels == (0, *[PRESENT] * 13) and reader.no_finding == reader.findings[0]
    assert FindingsChoice(branch, 1, True).stated("The lungs are clear.").levels == (0,) * 14


class Wanted:
    """A choice by the length of the text, in characters."""

    candidates = BEAMS

    def __init__(self, *lengths):
        self.lengths, self.seen = lengths, []

    def prompted_findings(self, seen):
        return self.lengths

    def complete(self, text, wanted):
        return text

    def count_differences(self, text, wanted):
        self.seen.append(text)
        return abs(len(text) - wanted)


def texts_of(model, b, choice=None, **options):
    model.choice = choice
    return [decode(row) for row in model.generate(b, **options).tolist()]


@pytest.fixture(scope="module")
def model():
    return extended("levels")


@pytest.fixture
def plain(model):
    return texts_of(model, batch())


@pytest.fixture(scope="module")
def beams(model):
    """The beams of the second search for each of two images, the likeliest first."""
    choice = Wanted(-1, -1)
    texts_of(model, batch(), choice)
    first, second = choice.seen[2 : 2 + BEAMS], choice.seen[2 + BEAMS :]
    assert len(second) == BEAMS and len(set(first)) == BEAMS
    assert [first[0], second[0]] == texts_of(model, batch(), num_beams=BEAMS)
    return first, second


def test_a_report_that_states_its_findings_is_not_searched_for_again(model, plain):
    assert extended("levels").choice is None
    assert extended("levels", candidates=BEAMS).choice.candidates == BEAMS
    choice = Wanted(*map(len, plain))
    assert texts_of(model, batch(), choice) == plain == choice.seen


def test_of_a_second_search_the_beam_that_agrees_best_is_taken_whatever_else_is_in_the_batch(model, plain, beams):
    b, lengths = batch(), [len(beams[0][3]), len(beams[1][1])]
    best = [min(row, key=lambda text, n=n: abs(len(text) - n)) for row, n in zip(beams, lengths, strict=True)]
    assert best != plain, "otherwise nothing is shown"
    assert texts_of(model, b, Wanted(*lengths)) == best
    assert [texts_of(model, rows(b, i), Wanted(lengths[i]))[0] for i in range(2)] == best
    assert texts_of(model, b, Wanted(len(plain[0]), lengths[1])) == [plain[0], best[1]], "one is searched for again"
    no_better = Wanted(0, 0)
    no_better.count_differences = lambda text, wanted: 1
    assert texts_of(model, b, no_better) == plain


class Longer(Wanted):
    """Adds as many words to a text as it is given."""

    candidates = 1

    def complete(self, text, wanted):
        return text + " nodule" * wanted


def test_a_completed_report_is_written_if_it_fits_in_the_length(model, plain, monkeypatch):
    b, short = batch(), 8
    first, second = texts_of(model, b, max_length=short)
    assert texts_of(model, b, Longer(0, 500)) == plain
    model.choice = Longer(1, 0)
    ids = model.generate(b, max_length=short)
    assert ids.shape[1] <= short and decode(ids[0].tolist()) in (first, first + " nodule")
    assert decode(ids[1].tolist()) == second
    ends = torch.tensor([[model.bos_id, 40, 41, model.eos_id, model.pad_id]] * 2)
    monkeypatch.setattr(model, "_search", lambda *given: lambda *asked: ends[:, None])
    first, second = texts_of(model, b)
    assert texts_of(model, b, Longer(3, 0)) == [first + " nodule nodule nodule", second]
