"""Every score that is computed has its place in the registry, and so on the pages."""

from __future__ import annotations

from fedtar_flare.metrics.clinical import finding_f1
from fedtar_flare.metrics.language import language_scores
from fedtar_flare.metrics.registry import SCORES


def test_every_language_score_is_registered_in_its_order():
    computed = list(language_scores(["no effusion", "a nodule"], ["no effusion", "a nodule"]))
    assert list(SCORES)[: len(computed)] == computed
    assert set(SCORES) - set(computed) >= {"token_loss", "finding_f1"}
    assert "finding_f1" in finding_f1([set()], [set()])


def test_scales_and_directions():
    assert {name for name, score in SCORES.items() if not score.higher_is_better} == {
        "token_loss",
        "contradictions",
        "identical_share",
        "mismatched_share",
    }
    assert {name for name, score in SCORES.items() if score.scale != 100} == {"token_loss", "length_ratio"}
