"""All scores of generated reports by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """One score: ``name`` is for records, ``label`` for people.

    ``scale`` turns the raw value into the printed one, which has ``decimals``; ``curve`` asks for a chart over rounds.
    Scores of one ``group`` share a table.
    """

    name: str
    label: str
    scale: float = 100.0
    higher_is_better: bool = True
    decimals: int = 1
    curve: bool = False
    group: str = "Language"


FINDINGS, CONTENT = "Findings", "Classes, change and repetition"

SCORES = {
    score.name: score
    for score in (
        Score("bleu_1", "BLEU-1"),
        Score("bleu_2", "BLEU-2"),
        Score("bleu_3", "BLEU-3"),
        Score("bleu_4", "BLEU-4", curve=True),
        Score("rouge_l", "ROUGE-L"),
        Score("cider", "CIDEr", curve=True),
        Score("token_loss", "token loss", scale=1.0, higher_is_better=False, decimals=3, curve=True),
        Score("finding_f1", "finding F1", curve=True, group=FINDINGS),
        Score("finding_f1_known", "known findings F1", curve=True, group=FINDINGS),
        Score("finding_f1_new", "new findings F1", curve=True, group=FINDINGS),
        Score("finding_recall_new", "new findings recall", group=FINDINGS),
        Score("chexpert_rules_f1", "CheXpert classes F1 (rules)", group=CONTENT),
        Score("ctrate_rules_f1", "CT-RATE classes F1 (rules)", group=CONTENT),
        Score("chexbert_f1", "CheXbert F1", group=CONTENT),
        Score("radbert_f1", "RadBERT F1", group=CONTENT),
        Score("radgraph_partial", "RadGraph F1", group=CONTENT),
        Score("bertscore", "BERTScore"),
        Score("meteor", "METEOR"),
        Score("meteor_without_synonyms", "METEOR without synonyms"),
        Score("change_f1", "change words F1", group=CONTENT),
        Score("finding_change_f1", "finding change F1", group=CONTENT),
        Score("finding_change_micro_f1", "changes named F1", curve=True, group=CONTENT),
        Score("contradictions", "contradictions between visits", higher_is_better=False, group=CONTENT),
        Score("identical_share", "identical reports", higher_is_better=False, group=CONTENT),
        Score("mismatched_share", "other references fit better", higher_is_better=False, group=CONTENT),
        Score("length_ratio", "length ratio", scale=1.0, decimals=2, group=CONTENT),
    )
}
"""In the order in which they are shown."""
