"""Whether a site's scores of the newest period fell beyond chance, and what of its visits changed; both stay there."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from fedtar_flare.metrics import significance
from fedtar_flare.metrics.language import clean
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import SUMS, Interval, PatientSums, Row, SumsOf, mean_of, patient_sums

CHANCE = 0.05  # below this corrected p, a fall or a change is beyond chance
WATCHED = ("bleu_4", "token_loss", "finding_f1", "chexpert_rules_f1", "ctrate_rules_f1")
"""Scores that are tested, as far as reports have them."""
Fall = tuple[str, int, Interval, float]
"""A score, an earlier period, the newest one's score less that one's, and corrected p: 1 where it did not fall."""
Change = tuple[str, Mapping[int, Interval], float, float]
"""A measure, its mean by period, the newest one's z, and p corrected for the measures of its kind."""


def falls(rows: Sequence[Row]) -> list[Fall]:
    """The newest period's scores against those of the four before, by p of a permutation of reports (Holm)."""
    steps, tests = sorted({row["time_step"] for row in rows}), {}
    for t, name in product(steps[-2:-6:-1], WATCHED):
        now, then = (SUMS[name]([row for row in rows if row["time_step"] == step]) for step in (steps[-1], t))
        if now is not None and then is not None:
            everyone = sorted({*now.patients, *then.patients})
            test = significance.compare([_among(everyone, now)], [_among(everyone, then)])
            fell = (test.difference.value < 0) == bool(SCORES[name].higher_is_better) and test.p <= 1
            tests[f"{name} {t}"] = name, t, test.difference, test.p if fell else 1.0
    corrected = significance.holm({key: test[-1] for key, test in tests.items()})
    return sorted(((*test[:3], corrected[key]) for key, test in tests.items()), key=itemgetter(-1))


def _among(everyone: Sequence[str], scores: PatientSums) -> PatientSums:
    """The same over more patients, who have no report."""
    nothing = dict.fromkeys(everyone, np.zeros(scores.sums.shape[1]))
    sums = nothing | dict(zip(scores.patients, scores.sums, strict=True))
    return PatientSums(tuple(everyone), np.array([*sums.values()]), scores.score)


def changes(rows: Sequence[Row], names: Sequence[str], until: int, rising: bool = False) -> list[Change]:
    """Measures that rows of visits have by name, what moved most first; with ``rising``, only a rise counts.

    z is in units of how far the means of periods ``until`` one lie apart, or of chance, over patients, if it is more.
    """
    newest = max(row["time_step"] for row in rows)
    steps = sorted({row["time_step"] for row in rows if row["time_step"] in {*range(until + 1), newest}})
    periods = [[row for row in rows if row["time_step"] == t] for t in steps]
    if len(periods) < 2 or not names:
        return []
    values = [np.array([[row[n] for n in names] for row in of], np.float64) for of in periods]
    means, n = np.array([period.mean(axis=0) for period in values]), [len(period) for period in values]
    patients = [(t, row["patient_id"]) for t, of in enumerate(periods) for row in of]
    apart = patient_sums(patients, np.vstack([x - x.mean(axis=0) for x in values]), significance.share_of_sums).sums
    within = np.square(apart).sum(axis=0) / max(1, sum(n) - len(values))
    between = means[:-1].var(axis=0, ddof=1) if len(values) > 2 else 0.0
    spread = np.sqrt(np.maximum(between, within / n[-1]) + within / sum(n[:-1]))
    moved = means[-1] - np.average(means[:-1], axis=0, weights=n[:-1])
    z = np.divide(np.maximum(moved, 0.0) if rising else moved, spread, out=np.zeros_like(moved), where=spread > 0)
    p = np.minimum(1.0, 2 * norm.sf(np.abs(z)) * len(names))
    moves = [(name, by_period(rows, partial(mean_of, name)), float(z[k]), float(p[k])) for k, name in enumerate(names)]
    return sorted(moves, key=lambda change: -abs(change[2]))


def by_period(rows: Sequence[Row], sums: SumsOf, scale: float = 1.0) -> dict[int, Interval]:
    """By period the score of rows, times ``scale``, with its interval over patients, where it is defined."""
    steps = sorted({row["time_step"] for row in rows})
    parts = {t: sums([row for row in rows if row["time_step"] == t]) for t in steps}
    intervals = {t: significance.over_seeds([part], replicates=1_000) for t, part in parts.items() if part is not None}
    return {t: Interval(*(scale * end for end in ends)) for t, ends in intervals.items() if np.isfinite(ends.value)}


def likely_cause(kinds: Mapping[str, Sequence[Change]]) -> str:
    """The kind that moved most beyond chance, Holm-corrected for the kinds; empty where none did."""
    p = significance.holm({kind: changes[0][3] for kind, changes in kinds.items() if changes})
    beyond = sorted((p[kind], -abs(kinds[kind][0][2]), kind) for kind in p if p[kind] < CHANCE)
    return beyond[0][2] if beyond else ""


def unseen_phrases(texts: Sequence[str], periods: Sequence[int]) -> list[float]:
    """Percent of each text's phrases of four words that no other period has, but for the newest."""
    words, holders = [clean(text).split() for text in texts], dict[tuple[str, ...], set[int]]()
    phrases = [{tuple(text[i : i + 4]) for i in range(len(text) - 3)} for text in words]
    for of_text, t in zip(phrases, periods, strict=True):
        for phrase in of_text:
            holders.setdefault(phrase, set()).add(t)
    newest, pairs = max(periods, default=0), zip(phrases, periods, strict=True)
    return [100 * sum(holders[phrase] <= {t, newest} for phrase in of) / max(1, len(of)) for of, t in pairs]


def image_measures(image: NDArray[np.uint8]) -> dict[str, float]:
    """Of a prepared image (S, C, H, W): mean and standard deviation of pixels, and mean absolute first and second
    difference of neighbours in a row."""
    x = image.astype(np.float32)
    edges, grain = (float(np.abs(np.diff(x, n)).mean()) for n in (1, 2))
    return {"brightness": float(x.mean()), "contrast": float(x.std()), "sharpness": edges, "grain": grain}
