import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.metrics.language import bleu_of_sums, clean, language_scores, language_statistics

WORDS = ["lung", "clear", "no", "effusion", ".", "nodule", "1.5", "cm"]
TOKENS = st.lists(st.sampled_from(WORDS), max_size=9)
CORPUS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=3), TOKENS), min_size=1, max_size=8)

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


def test_the_bleu_of_several_parts_follows_from_their_sums():
    generator = np.random.default_rng(0)
    draw = lambda: [[WORDS[i] for i in generator.integers(len(WORDS), size=7)] for _ in range(12)]  # noqa: E731
    references, hypotheses = draw(), draw()
    whole, *parts = (language_statistics([[r] for r in references[of]], hypotheses[of])
                     for of in (slice(12), slice(6), slice(6, 12)))  # fmt: skip
    columns = ("matches", "guesses", "hypothesis_length", "reference_length")
    sums = [sum(getattr(part, name).sum(axis=0) for part in parts) for name in columns]
    assert bleu_of_sums(*sums).tolist() == pytest.approx([whole.scores()[f"bleu_{n}"] for n in range(1, 5)])


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (
            "1. No   effusion.\n2. Nodule (1.5 cm), well-defined; follow-up!",
            "no effusion . nodule 1.5 cm well-defined follow-up",
        ),
        ("FINDINGS: The lungs are clear.", "findings the lungs are clear ."),
        ("Knoten von 1,5 cm, glatt begrenzt.", "knoten von 1,5 cm glatt begrenzt ."),
        ("compared to ___, unchanged...", "compared to unchanged ."),
        ("- mild 'tree-in-bud' – the patient's", "mild tree-in-bud the patients"),
        ("SUV 3.2.", "suv 3.2 ."),
        ("L1/L2 at 50%", "l1 l2 at 50"),
        ("measures 5.", "measures 5 ."),
        ("Tree‑in–bud  opacities\nof 1.5\u00a0cm .No effusion.", "tree-in-bud opacities of 1.5 cm . no effusion ."),
        ("両肺に異常なし。", "両肺に異常なし。"),
        ("", ""),
        (" .. ! ", "."),
    ],
)
def test_cleaning(text, cleaned):
    assert clean(text) == cleaned


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(max_codepoint=0x17F), max_size=30))
def test_a_cleaned_text_is_clean(text):
    once = clean(text)
    assert clean(once) == once
    assert "  " not in once and once == once.strip()
