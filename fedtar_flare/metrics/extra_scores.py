"""Scores of other packages, where they are installed: RadEval's (RadGraph F1 and others) and METEOR.

They load models or word lists of their own, from the caches that those packages use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedtar_flare.errors import ConfigError
from fedtar_flare.metrics.language import clean, require_pairs

RADEVAL_METRICS = ("radgraph", "bertscore", "radeval_bertscore", "ratescore", "radcliq", "srrbert", "temporal", "green")
"""Those that compute where they are called. RadEval's others send reports to a service and are refused."""


def radeval_scores(
    references: Sequence[str],
    hypotheses: Sequence[str],
    metrics: Sequence[str] = ("radgraph",),
    *,
    cache_dir: str | None = None,
) -> dict[str, float]:
    """Raw scores of RadEval's ``metrics`` over all reports, under RadEval's names (``radgraph_partial``, ...).

    Raises:
        ConfigError: RadEval is not installed, a metric is not one of :data:`RADEVAL_METRICS`, or RadEval cannot run it
            (offline, the models must lie in its cache).
        DataError: ``unequal-lengths`` or ``no-reports``.
    """
    unknown = [name for name in metrics if name not in RADEVAL_METRICS]
    if unknown or not metrics:
        raise ConfigError(f"RadEval metrics {list(metrics)}: choose from {', '.join(RADEVAL_METRICS)}")
    require_pairs(references, hypotheses)
    try:
        from radeval import RadEval
    except ImportError as error:
        raise _missing("RadGraph F1 and other scores of RadEval", "radeval") from error
    try:
        evaluator = RadEval(metrics=list(metrics), show_progress=False, cache_dir=cache_dir)
        scores: dict[str, Any] = evaluator(refs=list(references), hyps=list(hypotheses))
    except Exception as error:  # whatever a model that is not there makes it raise
        raise ConfigError(
            f"RadEval could not compute {', '.join(metrics)} ({type(error).__name__}: {error}); offline, its models "
            "must lie in its cache"
        ) from error
    return {name: float(value) for name, value in scores.items() if isinstance(value, int | float)}


def meteor_scores(references: Sequence[str], hypotheses: Sequence[str], *, synonyms: bool = True) -> list[float]:
    """METEOR of each report by nltk (alpha 0.9, beta 3, gamma 0.5), on cleaned tokens.

    Words match where they are equal, where their Porter stems are, and with ``synonyms`` where WordNet has them in one
    set of synonyms; nltk's word net must then lie in its data folder. Without, no data is needed, and the score is
    another one: ``meteor_without_synonyms``. Neither is the Java METEOR of pycocoevalcap, whose values differ.

    Raises:
        ConfigError: nltk is missing, or its word net where synonyms are asked for.
        DataError: ``unequal-lengths`` or ``no-reports``.
    """
    require_pairs(references, hypotheses)
    try:
        from nltk.translate.meteor_score import meteor_score
    except ImportError as error:
        raise _missing("METEOR", "nltk") from error
    words: dict[str, Any] = {} if synonyms else {"wordnet": _NoSynonyms()}
    try:
        return [
            float(meteor_score([clean(reference).split()], clean(hypothesis).split(), **words))
            for reference, hypothesis in zip(references, hypotheses, strict=True)
        ]
    except LookupError as error:
        raise ConfigError(
            "METEOR needs nltk's data package 'wordnet'; put it into nltk's data folder, or leave synonyms out"
        ) from error


class _NoSynonyms:
    """A word net for nltk that knows no word."""

    def synsets(self, word: str) -> tuple[()]:
        return ()


def _missing(what: str, package: str) -> ConfigError:
    return ConfigError(f"{what} need {package}, which is not installed: pip install 'fedtar_flare[scores]'")
