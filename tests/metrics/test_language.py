"""Scores of words against independent implementations, in every script, and rules that grade what they can read."""

import csv
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge
from tables import cases, lines
from test_registry import reports

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.metrics import sentences as sentences_module
from fedtar_flare.metrics.agreement import label_counts
from fedtar_flare.metrics.labeler import rule_labeler
from fedtar_flare.metrics.language import clean, language_statistics, mismatched_share, report_statistics
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.reports import TextLabeler
from fedtar_flare.metrics.sentences import GAP, Phrasebook, readable, sentences

WORDS = ["lung", "clear", "no", "effusion", ".", "nodule", "1.5", "cm"]
TOKENS = st.lists(st.sampled_from(WORDS), max_size=9)
CORPUS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8)

CLEANED = cases(__file__, "cleaned.yaml")
LANGUAGE_SCORES = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l", "cider")


def pycocoevalcap(references, hypotheses):
    """The oracle's scores, per report too."""
    gts = {i: [" ".join(r)] for i, r in enumerate(references)}
    res = {i: [" ".join(h)] for i, h in enumerate(hypotheses)}
    bleu = Bleu().compute_score(gts, res, verbose=0)[0]
    cider, each_cider = Cider().compute_score(gts, res)
    rouge, each_rouge = Rouge().compute_score(gts, res)
    scores = dict(zip(LANGUAGE_SCORES, [*bleu, rouge, cider], strict=True))
    return scores, each_rouge, each_cider


@settings(max_examples=150, deadline=None)
@given(CORPUS)
def test_equals_pycocoevalcap_on_random_corpora(corpus):
    references, hypotheses = [r for r, _ in corpus], [h for _, h in corpus]
    if not any(references):
        references[0] = ["lung"]  # pycocoevalcap's CIDEr fails where no reference has a word
    statistics = language_statistics(references, hypotheses)
    expected, rouge, cider = pycocoevalcap(references, hypotheses)
    assert statistics.scores() == pytest.approx(expected, abs=1e-9)
    assert statistics.rouge_l == pytest.approx(rouge, abs=1e-12)
    assert statistics.cider == pytest.approx(cider, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=40), st.text(max_size=40)), min_size=1, max_size=5))
def test_any_text_gives_finite_scores_within_their_range(pairs):
    scores = report_statistics([r for r, _ in pairs], [h for _, h in pairs]).scores()
    assert tuple(scores) == LANGUAGE_SCORES
    for name, value in scores.items():
        assert math.isfinite(value) and 0 <= value <= (10 if name == "cider" else 1) + 1e-9


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(max_codepoint=0x17F), max_size=30))
def test_a_cleaned_text_is_clean(text):
    once = clean(text)
    assert clean(once) == once
    assert "  " not in once and once == once.strip()


@settings(max_examples=40)
@given(st.lists(st.text(alphabet="ab ", max_size=8), min_size=2, max_size=6), st.data())
def test_share_by_its_definition_without_other_reports_of_the_same_patient(references, data):
    patients = [data.draw(st.sampled_from("pqrs")) for _ in references]
    generated = [data.draw(st.text(alphabet="ab ", max_size=8)) for _ in references]
    grams = lambda text: {*text.split(), *zip(text.split(), text.split()[1:], strict=False)}  # noqa: E731
    fit = lambda g, r: 2 * len(grams(g) & grams(r)) / max(1, len(grams(g)) + len(grams(r)))  # noqa: E731
    shares = []
    for i, text in enumerate(generated):
        of_others = [r for r, patient in zip(references, patients, strict=True) if patient != patients[i]]
        others = [fit(text, r) - fit(text, references[i]) for r in of_others]
        shares += [np.mean([(d > 1e-6) + 0.5 * (abs(d) <= 1e-6) for d in others])] if others else []
    got = mismatched_share(patients, references, generated)
    assert got == (pytest.approx(np.mean(shares)) if shares else None)


LANGUAGES = cases(__file__, "languages.yaml")
SCRIPTS = LANGUAGES["scripts"]
OTHERS, ENGLISH = [*LANGUAGES["others"], *SCRIPTS], LANGUAGES["english"]
RULED = {"clinical_score", "presence_f1", "side_accuracy", "degree_accuracy", "change_accuracy", "change_coverage",
         "contradictions", "finding_change_micro_f1", "chexpert_rules_f1"}  # fmt: skip
RULED |= {f"chexbert_uncertain_negative_{average}_f1" for average in ("micro", "macro", "example")}


@pytest.mark.parametrize(("text", "cleaned"), [*CLEANED, *SCRIPTS.items()])
def test_cleaning_also_by_character_in_scripts_without_spaces(text, cleaned):
    assert clean(text) == cleaned


def scores(visits, min_cell=1):
    neural = TextLabeler("chexbert", lambda text: "p" * 14 if "effusion" in text.lower() else "b" * 14)
    rows = [(patient, i, *texts) for i, (patient, *texts) in enumerate(visits)]
    return scores_of(reports(rows, min_cell=min_cell, text_labeler=neural))


@pytest.mark.parametrize("draft", ["Small left effusion. Unchanged edema.", "Kleiner Erguss.", "右肺", ""])
@pytest.mark.parametrize("reference", OTHERS[:3] + OTHERS[-6:-4])
def test_what_the_rules_cannot_read_is_not_graded_and_never_zero(reference, draft):
    found = scores([("a", reference, draft), ("a", reference, draft)])
    assert {name for name in RULED if found[name] is not None} == set()
    assert found["bleu_1"] is not None and found["length_ratio"] is not None


def test_readable_reports_are_those_in_english_and_graded_as_if_the_others_were_not_there():
    assert not any(map(readable, OTHERS)) and all(map(readable, ENGLISH))
    english = [("a", *["Small effusion."] * 2), ("b", "Large effusion.", "Clear."), ("b", "Edema.", "Edema.")]
    mixed = [*english, ("c", "Kein Erguss.", "Large effusion."), ("b", "右肺", "Unchanged effusion.")]
    alone, both = (scores(visits) for visits in (english, mixed))
    assert {name: both[name] for name in RULED} == {name: alone[name] for name in RULED}
    few = scores(mixed, 3)
    assert {name for name in RULED if few[name] is not None} == set(), "two patients' reports can be read"


CHEXPERT, CTRATE = rule_labeler("chexpert-rules"), rule_labeler("ctrate-rules")
VOCABULARY = "no not small effusion , and but is was observed may (? ) . nodule heart enlarged normal no change in vs"
CODES = "EC CM LO LL ED CO PN AT PX PE PO FX SD"
MARKED = lines(__file__, "labeled_sentences.txt")
SENTENCES = [line.replace("\\n", "\n").split(" | ", 1)[::-1] for line in MARKED]
CLASSES = dict(zip(CODES.split(), CHEXPERT.names[1:], strict=True))
SIGNS = {"+": "positive", "-": "negative", "?": "uncertain"}


@pytest.mark.parametrize(("text", "marks"), SENTENCES, ids=[text[:40] for text, _ in SENTENCES])
def test_sentences_by_hand(text, marks):
    labels = {name: label for name, label in CHEXPERT(text).items() if label != "blank" and name != "No Finding"}
    assert labels == {CLASSES[mark[:2]]: SIGNS[mark[2]] for mark in marks.split() if mark != "-"}


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
    truth = ["".join("bp"[row[name] == "1"] for name in CTRATE.names) for row in others[::5]]
    codes = [[code, CTRATE.code(row["report_text"])] for code, row in zip(truth, others[::5], strict=True)]
    means = label_counts(CTRATE.names, codes).averages()
    assert means["micro"]["f1"] > 0.9 and means["macro"]["f1"] > 0.85


@given(st.lists(st.sampled_from(VOCABULARY.split()), max_size=40).map(" ".join))
def test_any_words_get_a_label_of_every_class(text):
    for labeler in (CHEXPERT, CTRATE):
        labels = labeler(text)
        assert tuple(labels) == labeler.names
        assert set(labels.values()) <= {"positive", "negative", "uncertain", "blank"}
        assert labeler(text.upper()) == labels


@given(st.sampled_from([t for t, _ in SENTENCES]), st.sampled_from([t for t, _ in SENTENCES]))
def test_a_sentence_does_not_reach_into_the_next(first, second):
    strength = ["blank", "negative", "uncertain", "positive"]
    one, two, both = CHEXPERT(first), CHEXPERT(second), CHEXPERT(f"{first}\n\n{second}")
    for name in set(both) - {"No Finding"}:
        assert both[name] == max(one[name], two[name], key=strength.index)


ADVERSARIAL = "no effusion |heart is is is |no |effusion, |( |?|a|1.|1|\n |\n|not observed "
ADVERSARIAL += "|calcified plaques in the the |increase in |which was observed in the previous |and the |- |vs. "


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


def test_phrases():
    book = Phrasebook([("a|b c", 1), ("a _ d*", 2), ("e __ f", 3)])
    assert [match.tag for match in book.find(["x", "b", "c"])] == [1]
    assert book.find(["a", "w", "w", "w", "dog", "dig"]) == [(0, 5, 2)]
    assert book.find(["a", *["w"] * (GAP + 1), "d"]) == [] == book.find(["a", ",", "d"])
    assert book.find(["e", ",", "w", "f"]) == [(0, 4, 3)] and book.find(["e", "no", "f"]) == []
    for without_ends in ("", "_ a", "a __"):
        with pytest.raises(ConfigError):
            Phrasebook([(without_ends, 1)])
