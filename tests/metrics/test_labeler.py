"""The rule-based labeler: sentences by hand, real labels, planted truth, and texts that are made to be slow."""

import csv
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.metrics import sentences as sentences_module
from fedtar_flare.metrics.agreement import label_counts
from fedtar_flare.metrics.labeler import Observation, RuleLabeler, rule_labeler
from fedtar_flare.metrics.sentences import GAP, Phrasebook, sentences
from fedtar_flare.synthetic.reports import STYLES

CHEXPERT, CTRATE = rule_labeler("chexpert-rules"), rule_labeler("ctrate-rules")
WORDS = "no not small effusion , and but is was observed may (? ) . nodule heart enlarged normal no change in vs"
CODES = "EC CM LO LL ED CO PN AT PX PE PO FX SD"
FILE = Path(__file__).with_name("labeled_sentences.txt").read_text(encoding="utf-8")
SENTENCES = [line.replace("\\n", "\n").split(" | ", 1)[::-1] for line in FILE.splitlines() if not line.startswith("#")]
CLASSES = dict(zip(CODES.split(), CHEXPERT.names[1:], strict=True))
SIGNS = {"+": "positive", "-": "negative", "?": "uncertain"}


@pytest.mark.parametrize(("text", "marks"), SENTENCES, ids=[text[:40] for text, _ in SENTENCES])
def test_sentences_by_hand(text, marks):
    labels = {name: label for name, label in CHEXPERT(text).items() if label != "blank" and name != "No Finding"}
    assert labels == {CLASSES[mark[:2]]: SIGNS[mark[2]] for mark in marks.split() if mark != "-"}


def test_no_finding_follows_from_the_others():
    for text in ("The lungs are clear. No effusion.", "The endotracheal tube is in place."):
        assert CHEXPERT(text)["No Finding"] == "positive"
    for text in ("Small effusion.", "Possible pneumonia.", "", " \n "):
        assert CHEXPERT(text)["No Finding"] == "blank"


@pytest.mark.shared_data
def test_labels_of_the_published_sample(shared_data):
    names = {"1.0": "positive", "0.0": "negative", "-1.0": "uncertain", "": "blank"}
    rows = list(csv.DictReader((shared_data / "chexpert_labeler_sample/labeled_reports.csv").open(encoding="utf-8")))
    assert len(rows) == 4
    for row in rows:
        text = row.pop("Reports")
        assert CHEXPERT(text) == {name: names[value] for name, value in row.items()}


@pytest.mark.shared_data
def test_labels_of_ct_rate_reports_that_no_phrase_was_chosen_on(shared_data):
    """The first 400 reports were read when the phrases were chosen; a fifth of the others is scored here, for speed."""
    rows = list(csv.DictReader((shared_data / "ctrate_reports/train.csv").open(encoding="utf-8")))
    read = {row["report_text"] for row in rows[:400]}
    others = [row for row in rows[400:] if row["report_text"] not in read]
    assert len(others) == 391
    codes = [
        ["".join("bp"[row[name] == "1"] for name in CTRATE.names), CTRATE.code(row["report_text"])]
        for row in others[::5]
    ]
    means = label_counts(CTRATE.names, codes).averages()
    assert means["micro"]["f1"] > 0.9 and means["macro"]["f1"] > 0.85


PLANTED = {"effusion": "Pleural effusion", "consolidation": "Consolidation", "nodule": "Lung nodule"}
PLANTED |= {"emphysema": "Emphysema", "cardiomegaly": "Cardiomegaly", "lymphadenopathy": "Lymphadenopathy"}


@pytest.mark.shared_data
def test_a_finding_planted_in_a_real_report_is_read_and_changes_no_other_label(shared_data):
    rows = list(csv.DictReader((shared_data / "ctrate_reports/train.csv").open(encoding="utf-8")))
    for text, (kind, name) in product([row["report_text"] for row in rows[::40]], PLANTED.items()):
        sentence = (
            STYLES[0][0].sentences[kind].format(size=STYLES[0][0].sizes[kind].split("|")[1], side="right", change="")
        )
        assert CTRATE(f"{text}\n\n{sentence}") == CTRATE(text) | {name: "positive"}


@given(st.lists(st.sampled_from(WORDS.split()), max_size=40).map(" ".join))
def test_any_words_get_a_label_of_every_class(text):
    for labeler in (CHEXPERT, CTRATE):
        labels = labeler(text)
        assert tuple(labels) == labeler.names
        assert set(labels.values()) <= {"positive", "negative", "uncertain", "blank"}
        assert labeler(text.upper()) == labels


@given(st.text(max_size=60))
def test_any_text_is_labelled(text):
    CHEXPERT(text)


@given(st.sampled_from([t for t, _ in SENTENCES]), st.sampled_from([t for t, _ in SENTENCES]))
def test_a_sentence_does_not_reach_into_the_next(first, second):
    strength = ["blank", "negative", "uncertain", "positive"]
    one, two, both = CHEXPERT(first), CHEXPERT(second), CHEXPERT(f"{first}\n\n{second}")
    for name in set(both) - {"No Finding"}:
        assert both[name] == max(one[name], two[name], key=strength.index)


ADVERSARIAL = (
    "no effusion |heart is is is |no |effusion, |( |?|a|1.|1|\n |\n|not observed |calcified plaques in the the "
)
ADVERSARIAL += "|increase in |which was observed in the previous |and the |- |vs. "


@pytest.mark.parametrize("piece", ADVERSARIAL.split("|"))
def test_work_grows_with_the_length_and_no_faster(piece, monkeypatch):
    """Counts the looks at the tree of phrases, which are all the work that is not one step per word."""
    looks = 0
    after = sentences_module._Node.after

    def counted(self, word):
        nonlocal looks
        looks += 1
        return after(self, word)

    monkeypatch.setattr(sentences_module._Node, "after", counted)
    needed = []
    for n in (400, 800):
        looks = 0
        list(map(CTRATE.mentions, sentences(piece * n)))
        needed.append(looks)
    assert needed[1] <= 2.1 * needed[0] + 500


@pytest.mark.timeout(120)  # a quadratic expression would take hours
@pytest.mark.parametrize("piece", ["1", "1.", "\n ", "a'", "a", " ", "\n"])
def test_words_are_cut_in_one_pass(piece):
    assert sum(map(len, sentences(piece * (200_000 // len(piece)) + "x"))) > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Nodule of 1.5 cm, pneumonia vs. edema.", [["nodule", "of", "1.5", "cm", ",", "pneumonia", "vs", "edema"]]),
        ("Ground-glass\nopacity", [["ground", "glass", "opacity"]]),
        ("Edema?\n\nNone", [["edema", "?"], ["none"]]),
        ("- effusion\n- nodule", [["effusion"], ["nodule"]]),
        ("(edema?) in", [["(", "edema", "?", ")", "in"]]),
    ],
)
def test_sentences_and_words(text, words):
    assert list(sentences(text)) == words


def test_phrases():
    book = Phrasebook([("a|b c", 1), ("a _ d*", 2), ("e __ f", 3)])
    assert [match.tag for match in book.find(["x", "b", "c"])] == [1]
    assert book.find(["a", "w", "w", "w", "dog", "dig"]) == [(0, 5, 2)]
    assert book.find(["a", *["w"] * (GAP + 1), "d"]) == [] == book.find(["a", ",", "d"])
    assert book.find(["e", ",", "w", "f"]) == [(0, 4, 3)] and book.find(["e", "no", "f"]) == []


@pytest.mark.parametrize("phrase", ["", "_ a", "a __"])
def test_a_phrase_without_ends_is_refused(phrase):
    with pytest.raises(ConfigError):
        Phrasebook([(phrase, 1)])


def test_tables_of_an_observation():
    tables = {"absent": "clean", "unsure": "perhaps odd", "ignore": "spotless", "elsewhere": "liver", "here": "lung"}
    labeler = RuleLabeler([Observation("X", "spot*", **tables)])
    positive, negative = ("spots", "not clean", "spots in liver and lung"), ("no spots", "clean")
    expected = dict.fromkeys(positive, "positive") | dict.fromkeys(negative, "negative")
    expected |= {"perhaps odd": "uncertain", "spotless": "blank", "spots in the liver": "blank"}
    assert {text: labeler(text)["X"] for text in expected} == expected
