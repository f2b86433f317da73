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


def meteor_scores(references: Sequence[str], hypotheses: Sequence[str]) -> list[float]:
    """METEOR of each report by nltk, on cleaned tokens; nltk's word net must lie in its data folder.

    It is not the Java METEOR of pycocoevalcap, whose values differ.

    Raises:
        ConfigError: nltk or its word net is missing.
        DataError: ``unequal-lengths`` or ``no-reports``.
    """
    require_pairs(references, hypotheses)
    try:
        from nltk.translate.meteor_score import meteor_score
    except ImportError as error:
        raise _missing("METEOR", "nltk") from error
    try:
        return [
            float(meteor_score([clean(reference).split()], clean(hypothesis).split()))
            for reference, hypothesis in zip(references, hypotheses, strict=True)
        ]
    except LookupError as error:
        raise ConfigError("METEOR needs nltk's data package 'wordnet'; put it into nltk's data folder") from error


def _missing(what: str, package: str) -> ConfigError:
    return ConfigError(f"{what} need {package}, which is not installed: pip install 'fedtar_flare[scores]'")
