"""A report that does not state the prompted findings is searched for once more, and completed."""

from contextlib import contextmanager

import pytest
import torch
from batches import rows
from hypothesis import given
from hypothesis import strategies as st
from test_diagnosis import batch, extended

from fedtar_flare.learning.comparison import UNKNOWN, Comparison
from fedtar_flare.learning.diagnosis import FindingsChoice
from fedtar_flare.learning.labels import Labeler, labeler
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.models.config import preset

FINDINGS = ("nodule", "effusion", "cavity")
PRESENT = ("", "+new", "+persistent")
LABELER = Labeler(
    FINDINGS,
    lambda text: tuple(int(any(f"{finding}{end}" in text.split() for end in PRESENT)) for finding in FINDINGS),
    lambda text: {tuple(part.split("+")) for part in text.split() if "+" in part},
)
"""Reads texts such as ``nodule+new cavity+resolved effusion``."""
PRESENT_NOW = ("new", "persistent")
BEAMS = 5
PROMPTS = {"prompt_classes": "positive", "prompt_place": "memory"}
decode = build_tokenizer(preset("tiny", max_length=20)).decode


class Predicts:
    """A branch that predicts these findings, and these of the visits before."""

    def __init__(self, now, before=None, comparison=None):
        self.now, self.before, self.comparison = torch.tensor(now), before, comparison

    def predict(self, seen):
        return self.now, None if self.before is None else torch.tensor(self.before)


courses = st.lists(st.sampled_from(("absent", "new", "resolved", "persistent")), min_size=3, max_size=3)


@given(stated=courses, true=courses)
def test_texts_are_compared_by_their_findings_and_then_by_the_changes_that_they_state(stated, true):
    """A text has no word for what is still present, nor for what was never present."""
    now, before = ([[int(course in kinds) for course in true]] for kinds in (PRESENT_NOW, ("resolved", "persistent")))
    text = " ".join(f"{name}+{c}" for name, c in zip(FINDINGS, stated, strict=True) if c != "absent")
    comparison = Comparison(LABELER, 4, 0)
    missed = sum((a in PRESENT_NOW) != (b in PRESENT_NOW) for a, b in zip(stated, true, strict=True))
    word = {"new": "new", "resolved": "resolved"}
    misled = sum(word.get(a) != word.get(b) for a, b in zip(stated, true, strict=True))
    for earlier, expected in ((before, 4 * missed + misled), ([[UNKNOWN] * 3], missed), (None, missed)):
        choice = FindingsChoice(Predicts(now, earlier, comparison), LABELER.label, 3)
        [prompted] = choice.prompted_findings(None)
        assert choice.count_differences(text, prompted) == expected
        assert (prompted.changes is None) is (earlier != before)


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
    return extended(**PROMPTS)


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
    assert extended(candidates=1, **PROMPTS).choice is None
    assert extended(candidates=BEAMS, **PROMPTS).choice.candidates == BEAMS
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


def test_the_second_search_runs_in_the_context_of_its_rows(model, plain):
    entered = []

    @contextmanager
    def context(rows):
        entered.append(list(rows))
        yield
        entered.append("left")

    texts_of(model, batch(), Wanted(len(plain[0]), -1), context=context)
    assert entered == [[1], "left"]


NAMES = ("effusion_right", "cavity", "nodule_left")


def stated(text):
    words = ("right effusion", "cavity", "left nodule")
    parts = [part for part in text.lower().split(". ") if not part.startswith("no ")]
    return tuple(int(any(name in part for part in parts)) for name in words)


@pytest.mark.parametrize(
    ("text", "prompted", "completed"),
    [
        ("The heart is normal.", [0, 0, 0], "The heart is normal."),
        ("The heart is normal.", [0, 1, 0], "The heart is normal. There is cavity."),
        ("No effusion. The heart is normal.", [1, 0, 1],
         "The heart is normal. There is right effusion. There is left nodule."),
        ("There is a large cavity. No nodule.", [0, 1, 0], "There is a large cavity. No nodule."),
        ("There is a large cavity.", [0, 0, 1], "There is a large cavity. There is left nodule."),
    ],
)  # fmt: skip
def test_a_report_is_completed_by_its_prompted_findings_and_loses_nothing_that_it_stated(text, prompted, completed):
    choice = FindingsChoice(Predicts([prompted]), stated, 1, NAMES)
    [findings] = choice.prompted_findings(None)
    assert choice.complete(text, findings) == completed
    assert FindingsChoice(Predicts([prompted]), stated, 1).complete(text, findings) == text


def test_a_normal_report_is_completed_and_no_longer_normal():
    rules = labeler("chexpert-rules", "positive")

    def completed(text, *names):
        prompted = [[int(name in names) for name in rules.findings]]
        choice = FindingsChoice(Predicts(prompted), rules.label, 1, rules.findings)
        return choice.complete(text, choice.prompted_findings(None)[0])

    text = completed("No pneumothorax. The heart is normal.", "No Finding", "Pneumothorax")
    assert text == "The heart is normal. There is pneumothorax." == completed(text, "No Finding", "Pneumothorax")
    assert completed("", "No Finding") == "" and completed("A large effusion.", "No Finding") == "A large effusion."


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
