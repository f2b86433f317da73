import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.metrics.alarms import alarms
from fedtar_flare.metrics.language import MOST_REFERENCES, identical_share, length_ratio, mismatched_share

WORDS = ["lung", "heart", "effusion", "nodule", "clear", "small", "left", "right", "edema", "no", "mild", "stable"]


def reports(n, seed=0):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=8)) for _ in range(n)]


def test_shares_at_their_ends():
    texts, patients = reports(60), [str(i) for i in range(60)]
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


def raised(references, generated, natural=None, **shares):
    patients = [str(i) for i in range(len(references))]
    scores = {
        "identical_share": identical_share(generated),
        "mismatched_share": mismatched_share(patients, references, generated),
        "length_ratio": length_ratio(references, generated),
        "contradictions": 0.3,
    }
    found = alarms(scores, {"identical_share": identical_share(references), "contradictions": natural}, **shares)
    return {alarm.name for alarm in found if alarm.raised}


def test_what_raises_which_alarm():
    texts = reports(60)
    assert raised(texts, ["no effusion is seen today here or there"] * 60) == {"identical_share", "mismatched_share"}
    assert raised(texts, [text * 2 for text in texts]) == {"length_ratio"}
    assert raised(texts, [text.split()[0] for text in texts]) >= {"length_ratio"}
    same = ["no effusion"] * 60  # where the references are alike, so may the reports be
    assert "identical_share" not in raised(same, same)
    assert raised(texts, texts, recall=(0.9, 0.5)) == {"finding_recall"}
    for recall in ((None, None), (0.9, 0.89), (None, 0.5)):
        assert raised(texts, texts, recall=recall) == set()
    assert raised(texts, texts, invented=(0.03, 0.15)) == {"invented_findings"}
    assert raised(texts, texts, invented=(0.03, 0.04)) == raised(texts, texts, invented=(None, 0.5)) == set()
    assert raised(texts, texts, natural=0.1) == {"contradictions"} and raised(texts, texts, natural=0.25) == set()
    assert alarms({"mismatched_share": None, "identical_share": 1.0}, {}) == [], "without its numbers it is left out"
