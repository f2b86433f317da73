"""Agreement of findings: those that a generated report names against those that are there."""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from fedtar_flare.metrics.language import require_pairs


def finding_f1(
    truth: Sequence[AbstractSet[object]], predicted: Sequence[AbstractSet[object]]
) -> dict[str, float | None]:
    """Micro averages of the findings (or pairs of a finding and a direction) of N reports.

    ``finding_precision``, ``finding_recall`` and ``finding_f1`` are over all (report, finding) pairs; None where
    undefined: precision if nothing is named, recall if nothing is there, F1 if both. Raises DataError ``no-reports`` or
    ``unequal-lengths``.
    """
    require_pairs(truth, predicted)
    there = sum(len(findings) for findings in truth)
    named = sum(len(findings) for findings in predicted)
    hits = sum(len(t & p) for t, p in zip(truth, predicted, strict=True))
    return {
        "finding_precision": hits / named if named else None,
        "finding_recall": hits / there if there else None,
        "finding_f1": 2 * hits / (there + named) if there + named else None,
    }


def known_and_new(
    truth: Sequence[AbstractSet[str]], predicted: Sequence[AbstractSet[str]], known: AbstractSet[str]
) -> dict[str, float | None]:
    """F1 over all findings, over those that the start had seen (``known``) and over the others, which are new to it.

    ``finding_f1``, ``finding_f1_known``, ``finding_f1_new`` and ``finding_recall_new``: micro averages, None where
    undefined, see :func:`finding_f1`.
    """
    of_known = finding_f1([t & known for t in truth], [p & known for p in predicted])
    of_new = finding_f1([t - known for t in truth], [p - known for p in predicted])
    return {
        "finding_f1": finding_f1(truth, predicted)["finding_f1"],
        "finding_f1_known": of_known["finding_f1"],
        "finding_f1_new": of_new["finding_f1"],
        "finding_recall_new": of_new["finding_recall"],
    }


def finding_counts(
    truth: Sequence[AbstractSet[str]], predicted: Sequence[AbstractSet[str]]
) -> dict[str, tuple[int, int, int]]:
    """Per finding of any side, sorted: how many reports have it, how many name it, and how many of these have it."""
    there, named = (Counter(name for findings in side for name in findings) for side in (truth, predicted))
    right = Counter(name for t, p in zip(truth, predicted, strict=True) for name in t & p)
    return {name: (there[name], named[name], right[name]) for name in sorted(there | named)}
