"""Scoring 5,000 reports compared with pycocoevalcap, and 5,000 bootstraps."""

from __future__ import annotations

import random

import numpy as np

from fedtar_flare.metrics.language import clean, language_scores, language_statistics
from fedtar_flare.metrics.significance import REPLICATES, bleu_score, bootstrap
from tests.benchmarks.result import Absent, Result, alternated
from tools.corpus import text_corpus


def _reports(count: int) -> tuple[list[str], list[str]]:
    """References of the warm start's words, and as generated ones the same with a tenth of the words changed."""
    draw = random.Random(0)
    references = text_corpus(count, 0)
    words = sorted({word for text in references for word in text.split()})
    written = [
        " ".join(draw.choice(words) if draw.random() < 0.1 else word for word in text.split()) for text in references
    ]
    return references, written


def scores(quick: bool) -> Result:
    """BLEU-1 to 4, ROUGE-L and CIDEr of the same cleaned texts, which must agree."""
    try:
        from pycocoevalcap.bleu.bleu import Bleu
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.rouge.rouge import Rouge
    except ImportError:
        raise Absent("pycocoevalcap is not installed") from None
    count = 20 if quick else 5000
    references, written = _reports(count)
    truth = {i: [clean(text)] for i, text in enumerate(references)}
    told = {i: [clean(text)] for i, text in enumerate(written)}

    def theirs() -> list[float]:
        bleu = Bleu(4).compute_score(truth, told, verbose=0)[0]
        return [*bleu, Rouge().compute_score(truth, told)[0], Cider().compute_score(truth, told)[0]]

    def ours() -> list[float]:
        return list(language_scores(references, written).values())

    np.testing.assert_allclose(ours(), theirs(), rtol=1e-9)
    seconds = alternated({"ours": ours, "theirs": theirs}, 2 if quick else 3, warm=0)
    what = f"BLEU-1 to 4, ROUGE-L and CIDEr of {count:,} reports"
    return Result("scores", what, "pycocoevalcap", "s", seconds["ours"], seconds["theirs"], ("at least", 3.0),
                  "ours cleans the texts too")  # fmt: skip


def bootstraps(quick: bool) -> Result:
    """Percentile interval of corpus BLEU-4 over patients, two reports each."""
    count = 20 if quick else 5000
    references, written = _reports(count)
    statistics = language_statistics([[clean(t).split()] for t in references], [clean(t).split() for t in written])
    sums = bleu_score([i // 2 for i in range(count)], statistics)
    replicates = 50 if quick else REPLICATES
    seconds = alternated({"ours": lambda: bootstrap(sums, replicates=replicates)}, 2 if quick else 3, warm=0)
    what = f"{replicates:,} bootstraps of BLEU-4, {count:,} reports of {count // 2:,} patients"
    return Result("bootstraps", what, "", "s", seconds["ours"], asked=("at most", 5.0))


COMPARISONS = {"scores": scores, "bootstraps": bootstraps}
