"""Scores of words against independent implementations, in every script, and rules that grade what they can read."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.metrics.language import (
    MOST_REFERENCES,
    clean,
    identical_share,
    language_scores,
    language_statistics,
    length_ratio,
    mismatched_share,
)
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.reports import Reports, TextLabeler
from fedtar_flare.metrics.sentences import readable

WORDS = ["lung", "clear", "no", "effusion", ".", "nodule", "1.5", "cm"]
TOKENS = st.lists(st.sampled_from(WORDS), max_size=9)
CORPUS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8)

CLEANED = yaml.safe_load(Path(__file__).with_name("cleaned.yaml").read_text(encoding="utf-8"))
LANGUAGE_SCORES = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l", "cider")


def pycocoevalcap(references, hypotheses):
    """The oracle's scores, per report too."""
    pytest.importorskip("pycocoevalcap")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    gts = {i: [" ".join(r)] for i, r in enumerate(references)}
    res = {i: [" ".join(h)] for i, h in enumerate(hypotheses)}
    bleu = Bleu().compute_score(gts, res, verbose=0)[0]
    cider, each_cider = Cider().compute_score(gts, res)
    rouge, each_rouge = Rouge().compute_score(gts, res)
    scores = dict(zip(LANGUAGE_SCORES, [*bleu, rouge, cider], strict=True))
    return scores, each_rouge, each_cider


@pytest.mark.shared_data
def test_equals_pycocoevalcap_on_real_captions(shared_data):
    folder = shared_data / "caption_metrics_oracle"
    references, generated = (json.loads((folder / f"{name}.json").read_text()) for name in ("gts", "res"))
    texts = [[side[key][0].split() for key in references] for side in (references, generated)]
    assert language_statistics(*texts).scores() == pytest.approx(pycocoevalcap(*texts)[0], abs=1e-9)


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
    scores = language_scores([r for r, _ in pairs], [h for _, h in pairs])
    assert tuple(scores) == LANGUAGE_SCORES
    for name, value in scores.items():
        assert math.isfinite(value) and 0 <= value <= (10 if name == "cider" else 1) + 1e-9


@pytest.mark.parametrize(("text", "cleaned"), CLEANED)
def test_cleaning(text, cleaned):
    assert clean(text) == cleaned


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(max_codepoint=0x17F), max_size=30))
def test_a_cleaned_text_is_clean(text):
    once = clean(text)
    assert clean(once) == once
    assert "  " not in once and once == once.strip()


VOCABULARY = ["lung", "heart", "effusion", "nodule", "clear", "small", "left", "right", "edema", "no", "mild", "stable"]


def test_shares_at_their_ends():
    generator, patients = np.random.default_rng(0), [str(i) for i in range(60)]
    texts = [" ".join(generator.choice(VOCABULARY, size=8)) for _ in patients]
    assert mismatched_share(patients, texts, texts) < 0.01
    assert mismatched_share(patients, texts, ["no effusion"] * 60) == pytest.approx(0.5)
    assert identical_share(["No effusion.", "no  effusion .", "Nodule"]) == pytest.approx(2 / 3)
    assert identical_share(["a", "b"]) == 0.0 and length_ratio(["a b", "c d"], ["a", "b"]) == 0.5


def test_other_reports_of_the_same_patient_do_not_count():
    assert mismatched_share(["p", "p"], ["a b", "c d"], ["c d", "a b"]) is None
    assert mismatched_share(["p", "p", "q"], ["a b", "c d", "e f"], ["c d", "a b", "e f"]) == pytest.approx(0.5 * 2 / 3)


@settings(max_examples=40)
@given(st.lists(st.text(alphabet="ab ", max_size=8), min_size=2, max_size=6), st.data())
def test_share_by_its_definition(references, data):
    generated = [data.draw(st.text(alphabet="ab ", max_size=8)) for _ in references]
    grams = lambda text: {*text.split(), *zip(text.split(), text.split()[1:], strict=False)}  # noqa: E731
    fit = lambda g, r: 2 * len(grams(g) & grams(r)) / max(1, len(grams(g)) + len(grams(r)))  # noqa: E731
    shares = []
    for i, text in enumerate(generated):
        others = [fit(text, r) - fit(text, references[i]) for j, r in enumerate(references) if j != i]
        shares.append(np.mean([(d > 1e-6) + 0.5 * (abs(d) <= 1e-6) for d in others]))
    got = mismatched_share([str(i) for i in range(len(references))], references, generated)
    assert got == pytest.approx(np.mean(shares))


def test_large_sites_are_sampled_evenly():
    n = 2 * MOST_REFERENCES
    texts = [f"w{i} v{i}" for i in range(n)]
    assert mismatched_share([str(i) for i in range(n)], texts, texts) == 0.0


SCRIPTS = {
    "右肺上叶见5mm结节，边界清楚。": "右 肺 上 叶 见 5mm 结 节 边 界 清 楚 .",
    "両側胸水は減少した、CTで確認。": "両 側 胸 水 は 減 少 し た ct で 確 認 .",
    "ที่ปอดขวา": "ที่ ป อ ด ข ว า",
    "انصباب صغير، القلب طبيعي؟": "انصباب صغير القلب طبيعي",
    "छोटा बहाव।": "छोटा बहाव .",
    "흉수가 감소함.": "흉수가 감소함 .",
}
OTHERS = [
    "Kein Nachweis eines Pneumothorax. Geringer Pleuraerguss rechts.", "Kein Pneumothorax.", "Sans pneumothorax.",
    "Épanchement pleural gauche. Silhouette cardiaque normale.", "Derrame pleural pequeño. Sin consolidaciones.",
    "Lieve versamento pleurico a destra. Cuore normale.", "Sem derrame pleural. Opacidade no lobo inferior.",
    "Geen pneumothorax. Het hart is niet vergroot.", "Sağ plevral efüzyon. Kalp boyutu normal.",
    *SCRIPTS,
]  # fmt: skip
ENGLISH = ["Clear.", "Cardiomegaly.", "Small effusion (胸水).", "No pneumothorax is seen on the left.", "---", ""]
RULED = {"clinical_score", "presence_f1", "side_accuracy", "degree_accuracy", "change_accuracy", "change_coverage",
         "contradictions", "finding_change_micro_f1", "chexpert_rules_f1"}  # fmt: skip
RULED |= {f"chexbert_uncertain_negative_{average}_f1" for average in ("micro", "macro", "example")}


@pytest.mark.parametrize("text", SCRIPTS)
def test_scripts_without_spaces_are_split_by_character(text):
    assert clean(text) == SCRIPTS[text]
    assert language_scores([text] * 2, [text] * 2)["bleu_1"] == pytest.approx(1)


def test_a_draft_that_shares_half_the_characters_is_between():
    scores = language_scores(["右肺上叶见结节", "心影增大"], ["右肺下叶见结节", "心影不大"])
    assert 0 < scores["bleu_2"] < scores["bleu_1"] == pytest.approx(9 / 11) and 0 < scores["rouge_l"] < 1


def test_the_rules_read_english_alone():
    assert not any(map(readable, OTHERS)) and all(map(readable, ENGLISH))


def reports(visits, min_cell=1):
    nothing = [frozenset()] * len(visits)
    patients, references, drafts = zip(*visits, strict=True)
    neural = TextLabeler("chexbert", lambda text: "p" * 14 if "effusion" in text.lower() else "b" * 14)
    return Reports(patients, range(len(visits)), references, drafts, "chexpert-rules", [1.0] * len(visits),
                   *[nothing] * 4, min_cell=min_cell, text_labeler=neural)  # fmt: skip


@pytest.mark.parametrize("draft", ["Small left effusion. Unchanged edema.", "Kleiner Erguss.", "右肺", ""])
@pytest.mark.parametrize("reference", OTHERS[:3] + OTHERS[-6:-4])
def test_what_the_rules_cannot_read_is_not_graded_and_never_zero(reference, draft):
    scores = scores_of(reports([("a", reference, draft), ("a", reference, draft)]))
    assert {name for name in RULED if scores[name] is not None} == set()
    assert scores["bleu_1"] is not None and scores["length_ratio"] is not None


def test_readable_reports_are_graded_as_if_the_others_were_not_there():
    english = [
        ("a", "Small effusion.", "Small effusion."),
        ("b", "Large effusion.", "Clear."),
        ("b", "Edema.", "Edema."),
    ]
    mixed = [*english, ("c", "Kein Erguss.", "Large effusion."), ("b", "右肺", "Unchanged effusion.")]
    alone, both = (scores_of(reports(visits)) for visits in (english, mixed))
    assert {name: both[name] for name in RULED} == {name: alone[name] for name in RULED}
    alone, both = (scores_of(reports(visits, 3)) for visits in (english, mixed))
    assert {name for name in RULED if both[name] is not None} == set(), "two patients' reports can be read"
