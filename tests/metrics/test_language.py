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

WORDS = ["lung", "clear", "no", "effusion", ".", "nodule", "1.5", "cm"]
TOKENS = st.lists(st.sampled_from(WORDS), max_size=9)
CORPUS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=3), TOKENS), min_size=1, max_size=8)

CLEANED = yaml.safe_load(Path(__file__).with_name("cleaned.yaml").read_text(encoding="utf-8"))
LANGUAGE_SCORES = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l", "cider")


def pycocoevalcap(references, hypotheses):
    """The oracle's scores, per report too."""
    pytest.importorskip("pycocoevalcap")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    gts = {i: [" ".join(r) for r in group] for i, group in enumerate(references)}
    res = {i: [" ".join(h)] for i, h in enumerate(hypotheses)}
    bleu = Bleu().compute_score(gts, res, verbose=0)[0]
    cider, each_cider = Cider().compute_score(gts, res)
    rouge, each_rouge = Rouge().compute_score(gts, res)
    scores = dict(zip(LANGUAGE_SCORES, [*bleu, rouge, cider], strict=True))
    return scores, each_rouge, each_cider


@pytest.mark.shared_data
def test_published_scores_of_real_captions_are_reproduced(shared_data):
    folder = shared_data / "caption_metrics_oracle"
    references, generated, expected = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("gts", "res", "expected")
    )
    statistics = language_statistics(
        [[text.split() for text in references[key]] for key in references],
        [generated[key][0].split() for key in references],
    )
    scores = {name.replace("bleu_", "bleu"): value for name, value in statistics.scores().items()}
    assert expected.pop("n") == len(statistics.cider)
    assert scores == pytest.approx(expected, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(CORPUS)
def test_equals_pycocoevalcap_on_random_corpora(corpus):
    references, hypotheses = [group for group, _ in corpus], [h for _, h in corpus]
    if not any(token for group in references for r in group for token in r):
        references[0] = [["lung"]]  # pycocoevalcap's CIDEr fails where no reference has a word
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
