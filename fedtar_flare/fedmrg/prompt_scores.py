"""How well a site's prompts are predicted, finding by finding, as far as its smallest cell lets it be told."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedtar_flare.data.cohort import Sample, told
from fedtar_flare.learning.labels import POSITIVE


def prompt_scores(
    findings: Sequence[str], samples: Sequence[Sample], said: Tensor, truth: Tensor, min_cell: int
) -> dict[str, dict[str, float]]:
    """Of each finding that at least ``min_cell`` distinct patients have: how many reports state it (down to a multiple
    of ``min_cell``), and its prompt's recall and accuracy (shares).

    Args:
        said, truth: classes (B, D) that the branch predicts, and that the samples' reports have; on the CPU.
    """
    found = {}
    for i, finding in enumerate(findings):
        there = truth[:, i] == POSITIVE
        having = {s.visit.patient_id for s, states in zip(samples, there.tolist(), strict=True) if states}
        if having and len(having) >= min_cell:
            found[finding.replace(" ", "_")] = {
                "n": told(int(there.sum()), min_cell),
                "recall": float((said[there, i] == POSITIVE).float().mean()),
                "accuracy": float((said[:, i] == truth[:, i]).float().mean()),
            }
    return found
