"""The clinical score: worse mistakes cost more, normal sentences nothing, and rare findings do not leave a site."""

import pytest

from fedtar_flare.metrics.clinical import abnormal, clinical_score
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.reports import Reports

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
