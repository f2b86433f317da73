"""Reports in other languages than English: tokens of every script, and rules that grade only what they can read."""

import pytest

from fedtar_flare.metrics.language import clean, language_scores
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.reports import Reports, TextLabeler
from fedtar_flare.metrics.sentences import readable

TOKENS = {
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
    *TOKENS,
]  # fmt: skip
ENGLISH = ["Clear.", "Cardiomegaly.", "Small effusion (胸水).", "No pneumothorax is seen on the left.", "---", ""]
RULED = {"clinical_score", "presence_f1", "side_accuracy", "degree_accuracy", "change_accuracy", "change_coverage",
         "contradictions", "finding_change_micro_f1", "chexpert_rules_f1"}  # fmt: skip
RULED |= {f"chexbert_uncertain_negative_{average}_f1" for average in ("micro", "macro", "example")}


@pytest.mark.parametrize("text", TOKENS)
def test_scripts_without_spaces_are_split_by_character(text):
    assert clean(text) == TOKENS[text]
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
