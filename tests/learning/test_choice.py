"""A report that does not say what the decoder was told is searched for once more."""

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

WORDS = ("nodule", "effusion", "cavity")
BEAMS = 5
LABELER = Labeler(
    WORDS,
    lambda text: tuple(
        int(any(f"{word}{end}" in text.split() for end in ("", "+new", "+persistent"))) for word in WORDS
    ),
    lambda text: {tuple(part.split("+")) for part in text.split() if "+" in part},
)
"""Reads texts such as ``nodule+new cavity+resolved effusion``."""
PROMPTS = {"prompt_classes": "positive", "prompt_place": "memory"}
decode = build_tokenizer(preset("tiny", max_length=20)).decode


class Sees:
    """A reader that finds in the images what ``now`` says, and of the visits before what ``before`` says."""

    def __init__(self, now, before=None, comparison=None):
        self.now, self.before, self.comparison = torch.tensor(now), before, comparison

    def predict(self, seen):
        return self.now, None if self.before is None else torch.tensor(self.before)


@given(st.sets(st.sampled_from(WORDS)), st.sets(st.sampled_from(WORDS)))
def test_a_text_differs_by_the_findings_of_which_it_says_something_else(said, told):
    choice = FindingsChoice(Sees([[int(word in told) for word in WORDS]]), LABELER.label, 3)
    [classes] = choice.prompted_findings(None)
    assert choice.count_differences(" ".join(said), classes) == len(said ^ told)


@given(*[st.lists(st.sampled_from(("absent", "new", "resolved", "persistent")), min_size=3, max_size=3)] * 2)
def test_of_texts_with_the_same_findings_the_one_that_tells_their_changes_differs_less(said, true):
    """A text has no word for what is still there, nor for what was never there."""
    there, was = ("new", "persistent"), ("resolved", "persistent")
    now, before = ([[int(one in kinds) for one in true]] for kinds in (there, was))
    text = " ".join(f"{word}+{one}" for word, one in zip(WORDS, said, strict=True) if one != "absent")
    comparison = Comparison(LABELER, 4, 0)
    choice = FindingsChoice(Sees(now, before, comparison), LABELER.label, 3)
    missed = sum((a in there) != (b in there) for a, b in zip(said, true, strict=True))
    told = {one: one if one in ("new", "resolved") else "" for one in ("absent", "new", "resolved", "persistent")}
    misled = sum(told[a] != told[b] for a, b in zip(said, true, strict=True))
    [known] = choice.prompted_findings(None)
    assert choice.count_differences(text, known) == 4 * missed + misled
    [unknown] = FindingsChoice(Sees(now, [[UNKNOWN] * 3], comparison), LABELER.label, 3).prompted_findings(None)
    assert choice.count_differences(text, unknown) == missed and unknown.changes is None


class Wanted:
    """A choice by the length of the text, in characters, of which each report is told one."""

    candidates = BEAMS

    def __init__(self, *lengths):
        self.lengths, self.seen = lengths, []

    def prompted_findings(self, seen):
        return self.lengths

    def complete(self, text, told):
        return text

    def count_differences(self, text, told):
        self.seen.append(text)
        return abs(len(text) - told)


def texts_of(model, b, choice=None, **options):
    model.choice = choice
    return [decode(row) for row in model.generate(b, **options).tolist()]


@pytest.fixture(scope="module")
def model():
    return extended(**PROMPTS)


@pytest.fixture(scope="module")
def beams(model):
    """The beams of the second search for each of two images, the likeliest first."""
    choice = Wanted(-1, -1)
    texts_of(model, batch(), choice)
    first, second = choice.seen[2 : 2 + BEAMS], choice.seen[2 + BEAMS :]
    assert len(second) == BEAMS and len(set(first)) == BEAMS
    assert [first[0], second[0]] == texts_of(model, batch(), num_beams=BEAMS)
    return first, second


def test_without_a_second_search_nothing_is_chosen():
    assert extended(**PROMPTS).choice is None
    assert extended(candidates=1, **PROMPTS).choice is None
    assert extended(candidates=BEAMS, **PROMPTS).choice.candidates == BEAMS


def test_a_report_that_says_what_it_was_told_is_not_searched_for_again(model):
    plain = texts_of(model, batch())
    choice = Wanted(*map(len, plain))
    assert texts_of(model, batch(), choice) == plain == choice.seen


def test_of_a_second_search_the_beam_that_agrees_best_is_taken_whatever_else_is_in_the_batch(model, beams):
    plain, b = texts_of(model, batch()), batch()
    lengths = [len(beams[0][3]), len(beams[1][1])]
    best = [min(own, key=lambda text, n=n: abs(len(text) - n)) for own, n in zip(beams, lengths, strict=True)]
    assert best != plain, "otherwise nothing is shown"
    assert texts_of(model, b, Wanted(*lengths)) == best
    assert [texts_of(model, rows(b, i), Wanted(lengths[i]))[0] for i in range(2)] == best
    # one report alone is searched for again
    assert texts_of(model, b, Wanted(len(plain[0]), lengths[1])) == [plain[0], best[1]]


def test_a_report_stays_where_no_beam_agrees_better(model):
    plain = texts_of(model, batch())
    unhappy = Wanted(0, 0)
    unhappy.count_differences = lambda text, told: 1
    assert texts_of(model, batch(), unhappy) == plain


def test_the_second_search_runs_in_the_context_of_its_rows_alone(model):
    plain, entered = texts_of(model, batch()), []

    @contextmanager
    def context(rows):
        entered.append(list(rows))
        yield
        entered.append("left")

    texts_of(model, batch(), Wanted(len(plain[0]), -1), context=context)
    assert entered == [[1], "left"]


NAMES = ("right_effusion", "cavity", "nodule_left")


def stated(text):
    words = {"right_effusion": "right effusion", "cavity": "cavity", "nodule_left": "left nodule"}
    found = [part for part in text.lower().split(". ") if not part.startswith("no ")]
    return tuple(int(any(words[name] in part for part in found)) for name in NAMES)


@pytest.mark.parametrize(
    ("text", "told", "completed"),
    [
        ("The heart is normal.", [0, 0, 0], "The heart is normal."),
        ("The heart is normal.", [0, 1, 0], "The heart is normal. There is cavity."),
        ("No effusion. The heart is normal.", [1, 0, 1],
         "The heart is normal. There is right effusion. There is left nodule."),
        ("There is a large cavity. No nodule.", [0, 1, 0], "There is a large cavity. No nodule."),
        ("There is a large cavity.", [0, 0, 1], "There is a large cavity. There is left nodule."),
    ],
)  # fmt: skip
def test_a_report_is_completed_by_what_it_was_told_and_loses_nothing_that_it_stated(text, told, completed):
    names = ("effusion_right", "cavity", "nodule_left")
    choice = FindingsChoice(Sees([told]), stated, 1, names)
    [was_told] = choice.prompted_findings(None)
    assert choice.complete(text, was_told) == completed
    assert FindingsChoice(Sees([told]), stated, 1).complete(text, was_told) == text


def test_a_normal_report_is_completed_and_no_longer_normal():
    rules = labeler("chexpert-rules", "positive")
    told = [[int(name in ("No Finding", "Pneumothorax")) for name in rules.findings]]
    choice = FindingsChoice(Sees(told), rules.label, 1, rules.findings)
    [was_told] = choice.prompted_findings(None)
    text = choice.complete("No pneumothorax. The heart is normal.", was_told)
    assert text == "The heart is normal. There is pneumothorax."
    assert choice.complete(text, was_told) == text
    nothing = choice.prompted_findings(None)[0]._replace(classes=[int(name == "No Finding") for name in rules.findings])
    assert choice.complete("", nothing) == "" and choice.complete("A large effusion.", nothing) == "A large effusion."


class Longer(Wanted):
    """Adds as many words to a text as it was told."""

    candidates = 1

    def complete(self, text, told):
        return text + " nodule" * told


def test_a_completed_report_fits_in_the_length_or_stays_as_it_was(model):
    b = batch()
    short = 8
    plain = texts_of(model, b, max_length=short)
    assert texts_of(model, b, Longer(0, 500)) == texts_of(model, b)
    model.choice = Longer(1, 0)
    ids = model.generate(b, max_length=short)
    assert ids.shape[1] <= short and decode(ids[0].tolist()) in (plain[0], plain[0] + " nodule")
    assert decode(ids[1].tolist()) == plain[1]


def test_what_is_added_is_written(model, monkeypatch):
    ends = torch.tensor([[model.bos_id, 40, 41, model.eos_id, model.pad_id]] * 2)
    monkeypatch.setattr(model, "_search", lambda *given: lambda *asked: ends[:, None])
    plain = texts_of(model, batch())
    assert texts_of(model, batch(), Longer(3, 0)) == [plain[0] + " nodule nodule nodule", plain[1]]
