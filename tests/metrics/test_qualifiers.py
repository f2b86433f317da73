import pytest

from fedtar_flare.metrics.labeler import rule_labeler
from fedtar_flare.metrics.qualifiers import claims, finding_changes

CHEXPERT = rule_labeler("chexpert-rules")
SHORT = {"E": "Pleural Effusion", "A": "Atelectasis", "C": "Cardiomegaly", "P": "Pneumothorax", "D": "Support Devices"}


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("Increased right effusion and unchanged cardiomegaly.", "E increased C unchanged"),
        ("Effusion and atelectasis have increased.", "E increased A increased"),
        ("Increased effusion and atelectasis.", "E increased A increased"),
        ("New effusion, cardiomegaly, unchanged.", "E new C unchanged"),
        ("The pneumothorax has resolved, but the effusion is stable.", "P resolved E unchanged"),
        ("No new effusion. Stable cardiomegaly.", "C unchanged"),
        ("The right chest tube is unchanged. Small effusion.", "D unchanged"),
        ("Small effusion.", ""),
        ("No change in effusion.", "E unchanged"),
        ("The effusion has not changed.", "E unchanged"),
        ("Partially resolved effusion.", "E decreased"),
        ("The effusion is no longer seen.", "E resolved"),
        ("The pneumothorax has resolved, but there is an effusion.", "P resolved"),
        ("Resolved: right effusion, pneumothorax.", "E resolved P resolved"),
        ("Cardiomegaly and new effusion, left greater than right.", "E new"),
        ("Heart size has increased. The larger of the effusions is smaller than 5 mm.", ""),
        ("The effusion does not show significant size difference.", "E unchanged"),
    ],
)
def test_which_finding_changed(text, pairs):
    words = pairs.split()
    expected = {(SHORT[f], d) for f, d in zip(words[::2], words[1::2], strict=True)}
    assert finding_changes(text, CHEXPERT) == expected


def visits(*texts, patient="p"):
    return [(patient, i, text) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("first", "second", "contradicted"),
    [
        ("No effusion.", "Unchanged effusion.", [True]),
        ("Clear lungs.", "The effusion has resolved.", [True]),
        ("Small effusion.", "New effusion.", [True]),
        ("Small effusion.", "Unchanged effusion.", [False]),
        ("No effusion.", "New effusion.", [False]),
        ("Possible effusion.", "New effusion.", [False]),
        ("Possible effusion.", "Stable effusion.", [False]),
        ("No effusion.", "No new effusion.", []),
    ],
)
def test_contradictions_between_visits(first, second, contradicted):
    found = [("p", one) for one in contradicted]
    assert claims(visits(first, second), CHEXPERT) == claims(visits(first, second)[::-1], CHEXPERT) == found


def test_only_the_same_patients_next_visit_is_compared():
    several = visits("No effusion.", "Small effusion.", "Stable effusion.") + visits("New effusion.", patient="q")
    assert claims(several, CHEXPERT) == [("p", False)]
