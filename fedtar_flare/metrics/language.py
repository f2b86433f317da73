"""BLEU-1..4, ROUGE-L and CIDEr of drafts, equal to pycocoevalcap's, and how often drafts repeat each other.

Scores are raw: BLEU and ROUGE-L in 0..1, CIDEr in 0..10. CIDEr weighs a phrase by its rarity in the corpus of
references: it is 0 for a corpus of one report, and sites' values must not be pooled (average them, and say so).

Papineni et al., BLEU, ACL 2002. Lin, ROUGE, ACL workshop 2004. Vedantam et al., CIDEr, CVPR 2015 (here CIDEr-D's
clipping and Gaussian penalty, as pycocoevalcap's ``Cider`` has them).
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MOST_REFERENCES = 500  # that :func:`mismatched_share` compares, spread evenly over those given
_N, _ROUGE_BETA, _CIDER_SIGMA = 4, 1.2, 6.0  # the longest n-gram has 4 tokens
# pycocoevalcap's guards against empty reports; they show in the scores of very short texts, so they belong to BLEU
_TINY, _SMALL = 1e-15, 1e-9

_NUMBERED = re.compile(r"^\s*\d+[.)]\s+", re.MULTILINE)  # "1. ", "2) " at the start of a line
_DASHES = re.compile(r"[‐‑‒–—―−]")
_LONE_HYPHEN = re.compile(r"(?<![^\W_])-+|-+(?![^\W_])")
_FULL_STOP = re.compile(r"(?<!\d)\.|\.(?!\d)|[。।۔።]")
_COMMA = re.compile(r"(?<!\d),|,(?!\d)")
_JOINED = re.compile(r"['’‘`]")
_SEPARATORS = re.compile(r"[_;:!?*%^&+()\[\]{}<>\"“”„«»/\\|=~#@$§•·、・「」『』【】《》〈〉،؛؟]")
# Chinese, Japanese, Thai, Lao, Burmese and Khmer have no spaces between words: a character, with its marks, is a token
_UNSPACED = re.compile(
    "[\u3041-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]"
    f"[{''.join(chr(i) for i in range(0x0E00, 0x1800) if unicodedata.category(chr(i))[0] == 'M')}\u3099\u309a]*"
)
_FULL_STOPS = re.compile(r"(\. )+")

Counts = Counter[tuple[str, ...]]
Array = NDArray[np.float64]


def clean(text: str) -> str:
    """Bring a report into the form that is scored: lower case, tokens separated by one space, ``.`` a token, no other
    punctuation but the point or comma within a number and the hyphen within a word. In scripts that do not separate
    words by spaces each character is a token.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    text = _UNSPACED.sub(r" \g<0> ", _NUMBERED.sub("", text))
    text = _JOINED.sub("", _DASHES.sub("-", text))
    text = _COMMA.sub(" ", _SEPARATORS.sub(" ", text))
    text = _FULL_STOP.sub(" . ", _LONE_HYPHEN.sub(" ", text))
    text = " ".join(text.split()) + " "
    return _FULL_STOPS.sub(". ", text).strip()


@dataclass(frozen=True)
class LanguageStatistics:
    """What each of N reports adds to the corpus scores; document frequencies of CIDEr are those of all N."""

    matches: Array  # (N, 4): n-grams of the draft that the reference has too, clipped, n = 1..4
    guesses: Array  # (N, 4): n-grams of the draft
    hypothesis_length: Array  # (N,): tokens of the draft
    reference_length: Array  # (N,): tokens of the reference
    rouge_l: Array  # (N,): the report's score
    cider: Array  # (N,): the report's score

    def scores(self) -> dict[str, float]:
        """``bleu_1`` to ``bleu_4``, ``rouge_l``, ``cider`` of the corpus."""
        every = np.ones((1, len(self.cider)))
        lengths = every @ self.hypothesis_length, every @ self.reference_length
        bleu = bleu_of_sums(every @ self.matches, every @ self.guesses, *lengths)[0].tolist()
        scores = {f"bleu_{n}": value for n, value in enumerate(bleu, start=1)}
        for name in ("rouge_l", "cider"):
            scores[name] = float((every @ getattr(self, name))[0] / len(self.cider))
        return scores


def report_statistics(references: Sequence[str], drafts: Sequence[str]) -> LanguageStatistics:
    """Clean N reports and take the statistics that their language scores follow from."""
    return language_statistics([clean(text).split() for text in references], [clean(text).split() for text in drafts])


def language_statistics(references: Sequence[Sequence[str]], drafts: Sequence[Sequence[str]]) -> LanguageStatistics:
    """Statistics of N tokenised drafts and references."""
    pairs = [(_ngrams(draft), _ngrams(reference)) for draft, reference in zip(drafts, references, strict=True)]
    # a match counts at most as often as the reference has it
    matches = [[(ours & theirs).total() for ours, theirs in zip(*pair, strict=True)] for pair in pairs]
    guesses = [[max(0, len(draft) - n) for n in range(_N)] for draft in drafts]
    return LanguageStatistics(
        matches=np.array(matches, dtype=np.float64),
        guesses=np.array(guesses, dtype=np.float64),
        hypothesis_length=np.array([*map(len, drafts)], dtype=np.float64),
        reference_length=np.array([*map(len, references)], dtype=np.float64),
        rouge_l=np.array([*map(_rouge_l, drafts, references)]),
        cider=_cider(pairs),
    )


def bleu_of_sums(matches: Array, guesses: Array, draft_length: Array, reference_length: Array) -> Array:
    """Corpus BLEU-1..4 (..., 4) from sums of n-grams (..., 4) and lengths (...) over reports (Papineni et al., 2.3)."""
    precision = (matches + _TINY) / (guesses + _SMALL)
    bleu = np.cumprod(precision, axis=-1) ** (1 / np.arange(1, _N + 1))
    ratio = (draft_length + _TINY) / (reference_length + _SMALL)
    brevity = np.exp(np.minimum(0.0, 1 - 1 / ratio))
    return np.asarray(bleu * brevity[..., None], dtype=np.float64)


def identical_share(texts: Sequence[str]) -> float:
    """Share of reports whose cleaned text occurs more than once."""
    unique = list(Counter(map(clean, texts)).values()).count(1)
    return (len(texts) - unique) / len(texts)


def mismatched_share(patients: Sequence[str], references: Sequence[str], drafts: Sequence[str]) -> float | None:
    """Mean share of others' references that a draft fits better (Dice of words and pairs); None with one patient."""
    chosen = np.unique(np.linspace(0, len(drafts) - 1, min(len(drafts), MOST_REFERENCES)).astype(int))
    words = [clean(texts[i]).split() for texts in (drafts, references) for i in chosen]
    rows = [{*zip(text), *pairwise(text)} for text in words]
    grams = list(set().union(*rows))
    column = dict(zip(grams, range(len(grams)), strict=True))
    matrix = np.zeros((len(rows), len(column)), dtype=np.float32)
    for i, row in enumerate(rows):
        matrix[i, [*map(column.__getitem__, row)]] = 1
    draft, reference = np.split(matrix, 2)
    fit = 2 * (draft @ reference.T) / np.maximum(draft.sum(1)[:, None] + reference.sum(1)[None], 1)
    to_reference = np.diagonal(fit)[:, None]
    names = np.array([str(patients[i]) for i in chosen])
    others = names[:, None] != names[None]
    if not others.any():
        return None
    better = ((fit > to_reference) + 0.5 * (fit == to_reference)) * others
    counted = others.sum(1)
    return float((better.sum(1)[counted > 0] / counted[counted > 0]).mean())


def length_ratio(references: Sequence[str], drafts: Sequence[str]) -> float | None:
    """Words of all drafts per word of the references; None where no reference has a word."""
    words = len(" ".join(map(clean, references)).split())
    return len(" ".join(map(clean, drafts)).split()) / words if words else None


def _ngrams(tokens: Sequence[str]) -> list[Counts]:
    """Per n = 1..4, how often each n-gram occurs."""
    counts, shifted = [], []
    for n in range(_N):
        shifted.append(tokens[n:])
        counts.append(Counter(zip(*shifted, strict=False)))
    return counts


def _rouge_l(draft: Sequence[str], reference: Sequence[str]) -> float:
    """F-measure (beta 1.2) of precision and recall; as in pycocoevalcap, two empty texts agree."""
    tokens, expected = draft or [""], reference or [""]
    if not (common := _lcs(expected, tokens)):
        return 0.0
    precision, recall = common / len(tokens), common / len(expected)
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


def _cider(pairs: Sequence[tuple[list[Counts], list[Counts]]]) -> Array:
    """CIDEr of each report: tf-idf cosine of n-grams (clipped), with a Gaussian penalty on the difference in length."""
    frequency: Counter[tuple[str, ...]] = Counter()
    for _, reference in pairs:
        frequency.update(set().union(*reference))
    log_n = math.log(len(pairs))
    idf = {gram: log_n - math.log(count) for gram, count in frequency.items()}
    scores = []
    for draft, reference in pairs:
        cosines = 0.0
        for ours, theirs in zip(draft, reference, strict=True):
            dot = 0.0
            for gram, count in ours.items():  # not a set, whose order differs from process to process
                if gram in theirs:
                    dot += min(count, theirs[gram]) * theirs[gram] * idf[gram] ** 2
            if dot:  # then neither norm is 0
                cosines += dot / (_norm(ours, idf, log_n) * _norm(theirs, idf, log_n))
        # pycocoevalcap takes a text's length in 2-grams
        difference = draft[1].total() - reference[1].total()
        penalty = math.exp(-(difference**2) / (2 * _CIDER_SIGMA**2))
        scores.append(10 * (cosines * penalty) / _N)
    return np.array(scores)


def _norm(counts: Counts, idf: Mapping[tuple[str, ...], float], unseen: float) -> float:
    """Length of the tf-idf vector; an n-gram that no reference has weighs log N."""
    return math.hypot(*[count * idf.get(gram, unseen) for gram, count in counts.items()])
