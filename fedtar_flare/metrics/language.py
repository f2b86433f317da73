"""BLEU-1..4, ROUGE-L and CIDEr of generated reports, equal to pycocoevalcap's.

Scores are raw: BLEU and ROUGE-L in 0..1, CIDEr in 0..10. CIDEr weighs a phrase by its rarity in the corpus of
references: it is 0 for a corpus of one report, and sites' values must not be pooled (average them, and say so).

References
----------
Papineni et al., BLEU, ACL 2002. Lin, ROUGE, ACL workshop 2004. Vedantam et al., CIDEr, CVPR 2015 (here CIDEr-D's
clipping and Gaussian penalty, as pycocoevalcap's ``Cider`` has them).
"""

import functools
import math
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedtar_flare.core.errors import DataError

_N = 4  # longest n-gram
_ROUGE_BETA = 1.2
_CIDER_SIGMA = 6.0
# pycocoevalcap's guards against empty reports; they show in the scores of very short texts, so they belong to BLEU
_TINY = 1e-15
_SMALL = 1e-9

_NUMBERED = re.compile(r"^\s*\d+[.)]\s+", re.MULTILINE)  # "1. ", "2) " at the start of a line
_DASHES = re.compile(r"[‐‑‒–—―−]")
_LONE_HYPHEN = re.compile(r"(?<![^\W_])-+|-+(?![^\W_])")
_FULL_STOP = re.compile(r"(?<!\d)\.|\.(?!\d)")
_COMMA = re.compile(r"(?<!\d),|,(?!\d)")
_JOINED = re.compile(r"['’‘`]")
_SEPARATORS = re.compile(r"[_;:!?*%^&+()\[\]{}<>\"“”„«»/\\|=~#@$§•·]")
_FULL_STOPS = re.compile(r"(\. )+")

Counts = Counter[tuple[str, ...]]
Array = NDArray[np.float64]


def clean(text: str) -> str:
    """Bring a report into the form that is scored: lower case, tokens separated by one space, ``.`` a token.

    List numbers, underscores left by de-identification, quotes and all other punctuation go; the point or comma inside
    a number and the hyphen inside a word stay.

    >>> clean("1. No   effusion.\\n2. Nodule (1.5 cm), well-defined; follow-up!")
    'no effusion . nodule 1.5 cm well-defined follow-up'
    """
    text = unicodedata.normalize("NFKC", text).lower()
    text = _NUMBERED.sub("", text)
    text = _JOINED.sub("", _DASHES.sub("-", text))
    text = _COMMA.sub(" ", _SEPARATORS.sub(" ", text))
    text = _FULL_STOP.sub(" . ", _LONE_HYPHEN.sub(" ", text))
    text = " ".join(text.split()) + " "
    return _FULL_STOPS.sub(". ", text).strip()


def require_pairs(references: Sized, hypotheses: Sized) -> None:
    """Raise DataError (``unequal-lengths``, ``no-reports``) unless each of some reports has its reference."""
    if len(references) != len(hypotheses):
        raise DataError(
            f"{len(references)} reference(s) but {len(hypotheses)} generated report(s): they must go in pairs",
            reason="unequal-lengths",
        )
    if not len(references):
        raise DataError("there is no report to score", reason="no-reports")


def language_scores(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, float]:
    """Raw ``bleu_1`` to ``bleu_4``, ``rouge_l`` and ``cider`` of N texts, which are cleaned first (:func:`clean`).

    An empty hypothesis scores 0; all scores are finite. DataError: ``no-reports``, or ``unequal-lengths``.
    """
    return language_statistics(
        [[clean(text).split()] for text in references], [clean(text).split() for text in hypotheses]
    ).scores()


@dataclass(frozen=True)
class LanguageStatistics:
    """What each of N reports adds to the corpus scores."""

    matches: Array
    """(N, 4): n-grams of the hypothesis that a reference has too, clipped, n = 1..4."""
    guesses: Array
    """(N, 4): n-grams of the hypothesis."""
    hypothesis_length: Array
    reference_length: Array
    """(N,): tokens; of the reference nearest in length."""
    rouge_l: Array
    cider: Array
    """(N,): the report's own score; document frequencies are those of all N."""

    def __len__(self) -> int:
        return len(self.cider)

    def scores(self) -> dict[str, float]:
        """``bleu_1`` to ``bleu_4``, ``rouge_l``, ``cider`` of the corpus."""
        every = np.ones((1, len(self)))
        columns = (self.matches, self.guesses, self.hypothesis_length, self.reference_length)
        bleu = bleu_of_sums(*(every @ column for column in columns))[0].tolist()
        rouge_l, cider = (float((every @ column)[0] / len(self)) for column in (self.rouge_l, self.cider))
        return {f"bleu_{n}": score for n, score in enumerate(bleu, start=1)} | {"rouge_l": rouge_l, "cider": cider}


def language_statistics(
    references: Sequence[Sequence[Sequence[str]]], hypotheses: Sequence[Sequence[str]]
) -> LanguageStatistics:
    """Statistics of N tokenised reports, each with at least one reference.

    DataError: ``no-reports``, ``unequal-lengths``, ``no-reference``, or ``not-tokens`` (a text instead of tokens).
    """
    require_pairs(references, hypotheses)
    texts = list(zip(hypotheses, references, strict=True))
    for i, (tokens, group) in enumerate(texts):
        if isinstance(group, str) or isinstance(tokens, str) or any(isinstance(r, str) for r in group):
            raise DataError(f"report {i}: a text where a list of tokens belongs; split it first", reason="not-tokens")
        if not group:
            raise DataError(f"report {i} has no reference", reason="no-reference")
    counted = [_ngrams(tokens) for tokens in hypotheses]
    counted_references = [[_ngrams(tokens) for tokens in group] for group in references]
    pairs = list(zip(counted, counted_references, strict=True))
    return LanguageStatistics(
        matches=np.array([_matches(own, group) for own, group in pairs], dtype=np.float64),
        guesses=np.array([[max(0, len(h) - n) for n in range(_N)] for h in hypotheses], dtype=np.float64),
        hypothesis_length=np.array([len(h) for h in hypotheses], dtype=np.float64),
        reference_length=np.array(
            [min((abs(len(r) - len(h)), len(r)) for r in group)[1] for h, group in texts], dtype=np.float64
        ),
        rouge_l=np.array([_rouge_l(h, group) for h, group in texts]),
        cider=_cider(pairs),
    )


def bleu_of_sums(matches: Array, guesses: Array, hypothesis_length: Array, reference_length: Array) -> Array:
    """Corpus BLEU-1..4 (..., 4) from counts (..., 4) and lengths (...) summed over reports, also of several sites.

    The geometric mean of clipped precisions times the brevity penalty (Papineni et al., 2002, Section 2.3).
    """
    precision = (matches + _TINY) / (guesses + _SMALL)
    bleu = np.cumprod(precision, axis=-1) ** (1 / np.arange(1, _N + 1))
    ratio = (hypothesis_length + _TINY) / (reference_length + _SMALL)
    brevity = np.exp(np.minimum(0.0, 1 - 1 / ratio))
    return np.asarray(bleu * brevity[..., None], dtype=np.float64)


def _ngrams(tokens: Sequence[str]) -> list[Counts]:
    """Per n = 1..4, how often each n-gram occurs."""
    return [Counter(zip(*(tokens[i:] for i in range(n)), strict=False)) for n in range(1, _N + 1)]


def _matches(hypothesis: Sequence[Counts], references: Sequence[Sequence[Counts]]) -> list[int]:
    """Per n, the n-grams found in a reference, each at most as often as in the reference that has most of it."""
    most = (functools.reduce(operator.or_, counts) for counts in zip(*references, strict=True))
    return [(own & others).total() for own, others in zip(hypothesis, most, strict=True)]


def _rouge_l(hypothesis: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """F-measure (beta 1.2) of the references' best precision and recall; as in pycocoevalcap, two empty texts agree."""
    own = hypothesis or [""]
    common = [(_lcs(reference or [""], own), max(1, len(reference))) for reference in references]
    precision = max(length for length, _ in common) / len(own)
    recall = max(length / tokens for length, tokens in common)
    if not precision:
        return 0.0
    return (1 + _ROUGE_BETA**2) * precision * recall / (recall + _ROUGE_BETA**2 * precision)


def _lcs(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, bit-parallel: one integer operation stands for a whole row."""
    where: dict[str, int] = {}
    for i, token in enumerate(a):
        where[token] = where.get(token, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full
    for token in b:
        hits = row & where.get(token, 0)
        row = (row + hits | row - hits) & full
    return len(a) - row.bit_count()


def _cider(pairs: Sequence[tuple[list[Counts], list[list[Counts]]]]) -> Array:
    """CIDEr of each report: tf-idf cosine of n-grams (clipped), with a Gaussian penalty on the difference in length."""
    frequency: Counter[tuple[str, ...]] = Counter()
    for _, references in pairs:
        frequency.update(set().union(*(counts for reference in references for counts in reference)))
    log_n = math.log(len(pairs))
    idf = {gram: log_n - math.log(count) for gram, count in frequency.items()}
    scores = []
    for hypothesis, references in pairs:
        norms = [_norm(counts, idf, log_n) for counts in hypothesis]
        total = 0.0
        for reference in references:
            cosines = 0.0
            for own, other, norm in zip(hypothesis, reference, norms, strict=True):
                both = [gram for gram in own if gram in other]  # a set's order differs from process to process
                dot = sum(min(own[gram], other[gram]) * other[gram] * idf[gram] ** 2 for gram in both)
                if dot:  # then neither norm is 0
                    cosines += dot / (norm * _norm(other, idf, log_n))
            # pycocoevalcap takes a text's length in 2-grams
            difference = sum(hypothesis[1].values()) - sum(reference[1].values())
            total += cosines * math.exp(-(difference**2) / (2 * _CIDER_SIGMA**2))
        scores.append(10 * total / _N / len(references))
    return np.array(scores)


def _norm(counts: Counts, idf: Mapping[tuple[str, ...], float], unseen: float) -> float:
    """Length of the tf-idf vector; an n-gram that no reference has weighs log N."""
    return math.hypot(*(count * idf.get(gram, unseen) for gram, count in counts.items()))
