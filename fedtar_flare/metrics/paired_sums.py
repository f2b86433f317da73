"""Candidates compared on the same patients of several sites, from each site's guarded sums alone.

A score here is a ratio of sums over patients, A / B. A site gives each candidate's A and B, and the sums over patients
of all products of two columns: the candidates' b, and their residuals of a about the site's own ratio. All add up over
sites, so that what follows from them is what follows from all patients in one place. Intervals are by the delta method
(Cochran, Sampling Techniques, 1977, Section 6.4), as single patients cannot be drawn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from fedtar_flare.data.minimum_cell import enough, round_loss, round_to_cell
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.reports import Reports
from fedtar_flare.metrics.significance import Array, Interval, PatientSums, holm, patient_sums, share_of_sums
from fedtar_flare.metrics.text_sums import text_sums

RATIOS = ("finding_f1", "presence_f1", "side_accuracy", "degree_accuracy", "change_accuracy", "rouge_l")
Result = tuple[float, float, float, float | None]
"""A value with the ends of its 95 % interval; of a difference also p."""
ROUNDED = 5.0  # rounding at most halves each of two B, and raises a square by a quarter
NORMAL = 1.959963984540054  # standard deviations of a 95 % interval


def ratio_sums(reports: Reports) -> dict[str, PatientSums]:
    """Each score's (a, b) by patient, where a minimum cell of patients has it; rare findings do not count."""
    sums = text_sums(reports)
    if reports.known is not None:
        sides = zip(*reports.counted(reports.findings, reports.draft_findings), strict=True)
        pairs = [(2 * len(true & named), len(true) + len(named)) for true, named in sides]
        sums["finding_f1"] = patient_sums(reports.patients, pairs, share_of_sums)
    return {name: sums[name] for name in RATIOS if name in sums and enough(_having(sums[name]), reports.min_cell)}


def guarded_sums(score: str, candidates: Sequence[PatientSums], reports: int, least: int) -> dict[str, Any]:
    """Sum one score over a site's patients, as it may leave the site.

    Parameters
    ----------
    score : str
        A name of :data:`RATIOS`.
    candidates : sequence of PatientSums
        (a, b) of each patient, by candidate (C); the same P patients in the same order.
    reports : int
        Number of reports.
    least : int
        The minimum cell. Above 1 a ratio is rounded to ``1 / n``, as this score always is.

    Returns
    -------
    dict
        ``n`` (0: not rounded), ``sums`` (A of each candidate, then B; 2 C) and ``products`` (2 C rows of 2 C).
    """
    sums = np.stack([of.sums for of in candidates])  # (C, P, 2)
    above, below = sums.sum(axis=1).T
    ratios, n = above / below, 0
    table = np.concatenate([sums[..., 0] - ratios[:, None] * sums[..., 1], sums[..., 1]])  # (2 C, P)
    products = table @ table.T
    if least > 1:
        count = reports if SCORES[score].concerned is None else min(len(_having(of)) for of in candidates)
        n = round_to_cell(count, least)
        below, ratios = below - below % least, np.round(ratios * n) / n
        spread = np.sqrt(products.diagonal()).clip(min=1e-12)
        correlations = np.round(n * products / np.outer(spread, spread)) / n
        rounded = np.sqrt([round_loss(square, n, least) for square in products.diagonal()])
        products = correlations * np.outer(rounded, rounded)
    rows = {str(i): row for i, row in enumerate(products.tolist())}
    return {"n": n, "sums": [*(ratios * below).tolist(), *below.tolist()], "products": rows}


def _having(of: PatientSums) -> list[str]:
    """Patients who add anything to a score."""
    return [patient for patient, (_, b) in zip(of.patients, of.sums, strict=True) if b > 0]


@dataclass(frozen=True)
class SiteSums:
    """What :func:`guarded_sums` gave of each score at a site, of the candidates that it scored, in their order.

    ``most`` is the largest B that counts, by score: a site with a larger one is scaled down to it.
    """

    candidates: Sequence[str]
    scores: Mapping[str, Mapping[str, Any]]
    most: Mapping[str, float] = field(default_factory=dict)

    def largest(self) -> dict[str, float]:
        """The largest B of each score."""
        number = len(self.candidates)
        return {score: max(of["sums"][number : 2 * number]) for score, of in self.scores.items() if number}

    def parts(self, score: str, names: Sequence[str]) -> tuple[Array, Array, Array, float] | None:
        """A (C,), B (C,), products (2 C, 2 C) and n of some candidates; None where the site has not all of them.

        ValueError for sums that no patients have: below 0 they would undo those of other sites, and products beyond
        those of one patient who has it all would make every interval as wide as one likes.
        """
        if score not in self.scores or not {*names} <= {*self.candidates}:
            return None
        of, places = self.scores[score], [self.candidates.index(name) for name in names]
        both = [*places, *(len(self.candidates) + place for place in places)]
        products = np.array([[of["products"][str(i)][j] for j in both] for i in both])
        above, below = np.array(of["sums"])[both].reshape(2, -1)
        most = ROUNDED * np.outer(np.tile(below, 2), np.tile(below, 2))
        if not (
            (abs(products) <= most).all() and above.min() >= 0 and below.min() >= 1 and of["n"] == int(of["n"]) >= 0
        ):
            raise ValueError(f"{score}: no sums of patients")
        share = np.minimum(1, self.most.get(score, math.inf) / below)
        return share * above, share * below, products * np.outer(np.tile(share, 2), np.tile(share, 2)), of["n"]


def combined(sites: Sequence[SiteSums], score: str, weights: Mapping[str, float]) -> tuple[Interval, float] | None:
    """Compute a weighted sum of candidates' scores over the patients of all sites, by the delta method.

    Parameters
    ----------
    sites : sequence of SiteSums
        A site without one of the candidates does not count.
    score : str
        A name of :data:`RATIOS`.
    weights : mapping of str to float
        By candidate: 1 for a score, 1 and -1 for a difference.

    Returns
    -------
    tuple of Interval and float, or None
        The value with its 95 % interval, and p of its being 0 (two-sided, normal); None where no site counts.
    """
    parts = [part for site in sites if (part := site.parts(score, [*weights])) is not None]
    if not parts:
        return None
    above, below = np.sum([part[:2] for part in parts], axis=0)
    signs, ratios, variance = np.array([*weights.values()]), above / below, 0.0
    for own_above, own_below, products, n in parts:
        lift = np.concatenate([signs / below, signs / below * (own_above / own_below - ratios)])
        variance += max(0.0, float(lift @ products @ lift))
        if n:  # what rounding adds
            variance += float(np.square(signs * own_below / below).sum()) / 12 / n**2
    value, error = float(signs @ ratios), math.sqrt(variance)
    p = math.erfc(abs(value) / error / math.sqrt(2)) if error else float(value == 0)
    return Interval(value, value - NORMAL * error, value + NORMAL * error), p


def compared(sites: Sequence[SiteSums], names: Sequence[str]) -> dict[str, dict[str, Result]]:
    """Compare candidates pairwise over the patients of all sites.

    Parameters
    ----------
    sites : sequence of SiteSums
        What each site sent.
    names : sequence of str
        The candidates.

    Returns
    -------
    dict of str to dict of str to Result
        By score: each candidate's value, and ``a - b`` of each pair with p after Holm's correction over the pairs.
    """
    weights = {name: {name: 1.0} for name in names}
    weights |= {f"{a} - {b}": {a: 1.0, b: -1.0} for a, b in combinations(names, 2)}
    results: dict[str, dict[str, Result]] = {}
    for score in RATIOS:
        known = {label: of for label in weights if (of := combined(sites, score, weights[label])) is not None}
        if known:
            p = holm({label: tested for label, (_, tested) in known.items() if len(weights[label]) > 1})
            results[score] = {label: (*value, p.get(label)) for label, (value, _) in known.items()}
    return results
