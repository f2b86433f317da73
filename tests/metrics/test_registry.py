"""Every score that is computed has its place in the registry, and so on the pages."""

from __future__ import annotations

from fedtar_flare.metrics.clinical import known_and_new
from fedtar_flare.metrics.language import language_scores
from fedtar_flare.metrics.registry import SCORES


def test_every_language_score_is_registered_in_its_order():
    computed = list(language_scores(["no effusion", "a nodule"], ["no effusion", "a nodule"]))
    assert list(SCORES)[: len(computed)] == computed
    clinical = list(known_and_new([set()], [set()], set()))
    assert list(SCORES)[len(computed) :][: 1 + len(clinical)] == ["token_loss", *clinical]


def test_scales_and_directions():
    assert {name for name, score in SCORES.items() if not score.higher_is_better} == {
        "token_loss",
        "contradictions",
        "identical_share",
        "mismatched_share",
    }
    assert {name for name, score in SCORES.items() if score.scale != 100} == {"token_loss", "length_ratio"}
