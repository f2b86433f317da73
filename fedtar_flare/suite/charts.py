"""The figures of a comparison, from the results of its arms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.suite.against import COMPARED
from fedtar_flare.suite.figures import COLOURS, FADED, INK, OTHERS, Figure, Line, Panel
from fedtar_flare.suite.results import Done
from fedtar_flare.suite.summary import Summary

Points = Mapping[float, Sequence[float]]
"""Values at each place on the x axis."""
AGES = ((0, 50, "under 50"), (50, 65, "50 to 64"), (65, 80, "65 to 79"), (80, math.inf, "80 and over"))
SEXES = (("F", "women"), ("M", "men"), (None, "sex unknown"))
MOST_SITES, MOST_ALPHAS = 8, 6
"""Panels of a figure at most."""


def figures(
    results: Sequence[Done], arms: Sequence[Summary], reference: str, texts: Mapping[str, Any] | None
) -> list[Figure]:
    """All figures that the results have something for."""
    by_arm = {arm.name: [one.result for one in results if one.cell.name == arm.name] for arm in arms}
    labels = {arm.name: arm.label for arm in arms}
    colours = arm_colours(arms, by_arm, reference)
    made = [
        _per_hospital(by_arm, labels, colours),
        _scores(arms, colours),
        _validation(by_arm, labels, colours),
        _alphas(by_arm, labels),
        _embedding(by_arm, labels),
        _texts(texts),
        _costs(arms),
    ]
    return [figure for figure in made if figure.panels]


def arm_colours(
    arms: Sequence[Summary], by_arm: Mapping[str, Sequence[dict[str, Any]]], reference: str
) -> dict[str, str]:
    """A colour per arm. Of more than seven, the reference, the first FedTAR, and those that are best have one.

    These are the best in each score in which arms are compared, and then those with the best CIDEr.
    """
    names = [arm.name for arm in arms]
    means = {score: {arm.name: arm.mean("members", score) or 0.0 for arm in arms} for score in COMPARED}
    first = [n for n in names if n == reference] + [n for n in names if by_arm[n][0]["method"] == "fedtar"][:1]
    leading = [max(names, key=lambda name, of=of: of[name]) for of in means.values()]  # type: ignore[misc]
    return colours_of(names, [*first, *leading], means["cider"])


def colours_of(names: Sequence[str], first: Sequence[str], best: Mapping[str, float]) -> dict[str, str]:
    """A colour per name; of more names than colours, the ``first`` and those with the ``best`` values have one."""
    if len(names) > len(COLOURS):
        chosen = list(dict.fromkeys([*first, *sorted(names, key=lambda n: -best[n])]))[: len(COLOURS) - 1]
        names = [name for name in names if name in chosen]
    return dict(zip(names, COLOURS, strict=False))


def arm_line(name: str, labels: Mapping[str, str], colours: Mapping[str, str], points: Points) -> Line:
    """An arm's means over seeds, with the least and the largest of several seeds; faded without a colour."""
    places = sorted(points)
    several = any(len(points[x]) > 1 for x in places)
    return Line(
        labels[name] if name in colours else OTHERS,
        places,
        [statistics.fmean(points[x]) for x in places],
        colours.get(name, FADED),
        [min(points[x]) for x in places] if several else (),
        [max(points[x]) for x in places] if several else (),
    )


def broken_where_not_scored(lines: Sequence[Line]) -> list[Line]:
    """Lines with a gap at each round that others were scored in and they were not, so that none is drawn through it."""
    places = sorted({x for line in lines for x in line.x})

    def spread(line: Line, values: Sequence[float]) -> list[float]:
        there = dict(zip(line.x, values, strict=True))
        return [there.get(x, math.nan) for x in places]

    return [
        replace(
            line,
            x=places,
            y=spread(line, line.y),
            low=spread(line, line.low) if line.low else (),
            high=spread(line, line.high) if line.high else (),
        )
        for line in lines
    ]


def _collected(
    results: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], Sequence[tuple[float, Any]]]
) -> Points:
    found: dict[float, list[float]] = {}
    for result in results:
        for x, y in of(result):
            if y is not None:
                found.setdefault(x, []).append(y)
    return found


def _per_hospital(by_arm: Mapping[str, Any], labels: Mapping[str, str], colours: Mapping[str, str]) -> Figure:
    """CIDEr of each hospital (Fig. 4, 5)."""
    sites = sorted({site for results in by_arm.values() for result in results for site in result["sites"]})
    panels = []
    for site in sites[:MOST_SITES]:
        lines = []
        for name, results in by_arm.items():
            points = _collected(results, lambda r, site=site: _scores_at(r, site, "cider"))  # type: ignore[misc]
            if points:
                lines.append(arm_line(name, labels, colours, points))
        if lines:
            panels.append(Panel(site, "round", "CIDEr × 100", broken_where_not_scored(lines)))
    about = "Test patients, with the personal part where there is one. Mean of seeds; the shade is their range."
    columns = 2 if len(panels) == 4 else 3
    return Figure("cider_per_hospital", "CIDEr per hospital over rounds", about, panels, columns, share_y=True)


def _scores_at(result: dict[str, Any], site: str, score: str) -> list[tuple[float, float | None]]:
    events = [event for event in result["evaluations"] if site in event["sites"]]
    values = [(event["round"], event["sites"][site]["all"].get(score)) for event in events]
    return [(r, None if v is None else v * SCORES[score].scale) for r, v in values]


def _scores(arms: Sequence[Summary], colours: Mapping[str, str]) -> Figure:
    """Means of the hospitals."""
    panels = []
    for name, kind in SCORES.items():
        if kind.curve and any(name in arm.rounds for arm in arms):
            lines = [
                arm_line(
                    arm.name,
                    {arm.name: arm.label},
                    colours,
                    {r: [v * kind.scale] for r, v in arm.rounds.get(name, [])},
                )
                for arm in arms
                if arm.rounds.get(name)
            ]
            better = "higher" if kind.higher_is_better else "lower"
            unit = " × 100" if kind.scale == 100 else ""
            panels.append(
                Panel(
                    f"{kind.label} ({better} is better)", "round", f"{kind.label}{unit}", broken_where_not_scored(lines)
                )
            )
    about = "Mean of the hospitals that took part and of seeds. Arms scored in some rounds alone are points there."
    return Figure("scores", "Scores over rounds", about, panels)


def _validation(by_arm: Mapping[str, Any], labels: Mapping[str, str], colours: Mapping[str, str]) -> Figure:
    """Validation loss, and its variance over hospitals, beside c / sqrt(round) (Fig. 3a)."""
    losses, spreads, first = [], [], []
    for name, results in by_arm.items():
        points = _collected(results, lambda r: [(event["round"], event["loss"]) for event in r["validation"]])
        if points:
            losses.append(arm_line(name, labels, colours, points))
            first.append(statistics.fmean(points[min(points)]))
        if spread := _collected(results, lambda r: [(e["round"], _variance(e["sites"])) for e in r["validation"]]):
            spreads.append(arm_line(name, labels, colours, spread))
    rounds = sorted({x for line in losses for x in line.x})
    if first and len(rounds) > 1:
        scale = statistics.fmean(first) * math.sqrt(rounds[0])
        guide = [scale / math.sqrt(r) for r in rounds]
        losses.append(Line("c / √round", rounds, guide, INK, kind="guide"))
    panels = [Panel("Validation loss", "round", "mean loss per token", losses)] if losses else []
    if spreads:
        panels.append(Panel("Its variance over hospitals", "round", "variance of the loss", spreads))
    about = "Validation patients of all hospitals. The dashed line falls as O(1/√t) from the mean of the first round."
    return Figure("validation_loss", "Validation loss over rounds", about, panels, columns=2)


def _variance(sites: Mapping[str, Any]) -> float | None:
    values = [site["validation_loss"] for site in sites.values() if site["validation_loss"] is not None]
    return statistics.variance(values) if len(values) > 1 else None


def _alphas(by_arm: Mapping[str, Any], labels: Mapping[str, str]) -> Figure:
    """Alpha of each time step (Fig. 7)."""
    panels: list[Panel] = []
    for name, results in by_arm.items():
        steps = max((len(row) - 1 for result in results for row in result["alphas"]), default=0)
        lines = []
        for t in range(1, steps + 1):
            points = _collected(results, lambda r, t=t: [(row[0], row[t]) for row in r["alphas"]])  # type: ignore[misc]
            colour = COLOURS[(t - 1) % len(COLOURS)]
            lines.append(arm_line(f"visit {t}", {f"visit {t}": f"visit {t}"}, {f"visit {t}": colour}, points))
        if lines and len(panels) < MOST_ALPHAS:
            panels.append(Panel(labels[name], "round", "alpha", lines))
    about = "How much of each visit step's residual enters the shared adapter. Mean of seeds; the shade is their range."
    return Figure("alpha", "Alpha over rounds", about, panels)


def _embedding(by_arm: Mapping[str, Any], labels: Mapping[str, str]) -> Figure:
    """Patients' embeddings, site by site: components do not align across sites (Fig. 3b)."""
    drawn = next((name for name, results in by_arm.items() if results[0]["embedding"]), None)
    points = by_arm[drawn][0]["embedding"] if drawn else []
    sites = list(dict.fromkeys(point["site"] for point in points))[:4]
    panels: list[Panel] = []
    for what in ("age", "sex"):
        for site in sites:
            here = [point for point in points if point["site"] == site]
            if what == "age":
                groups = [
                    (name, [p for p in here if p["age"] is not None and low <= p["age"] < high])
                    for low, high, name in AGES
                ]
            else:
                groups = [(name, [p for p in here if p["sex"] == sex]) for sex, name in SEXES]
            colours = COLOURS[:4] if what == "age" else COLOURS[4:]
            lines = [
                Line(name, [p["x"] for p in group], [p["y"] for p in group], colour, kind="points")
                for (name, group), colour in zip(groups, colours, strict=False)
                if group
            ]
            panels.append(Panel(f"{site}, by {what}", "t-SNE 1", "t-SNE 2", lines, map=True))
    about = (
        f"t-SNE of each patient's embedding in the arm '{labels[drawn] if drawn else ''}', one point a patient at the "
        "first visit. Made at each hospital from its own patients; synthetic hospitals alone."
    )
    return Figure("patient_embeddings", "Patients' embeddings", about, panels, columns=max(1, len(sites)))


def _texts(texts: Mapping[str, Any] | None) -> Figure:
    """Topic drift, and clusters of the hospitals' texts (Fig. 1)."""
    panels: list[Panel] = []
    if texts:
        colours = {site: COLOURS[i % len(COLOURS)] for i, site in enumerate(texts["clusters"])}
        drift = [
            Line(site, [t for t, _ in values], [d for _, d in values], colours[site])
            for site, values in texts["drift"].items()
        ]
        panels.append(Panel("Drift of the wording", "visit", "cosine distance to the first visits", drift))
        clusters = [
            Line(site, [x for x, _ in points], [y for _, y in points], colours[site], kind="points")
            for site, points in texts["clusters"].items()
        ]
        panels.append(Panel("Reports of the hospitals", "t-SNE 1", "t-SNE 2", clusters, map=True))
    about = (
        "tf-idf of words and pairs of words. Left: distance between the mean vectors of a hospital's first and of its "
        "t-th visits. Right: one point a report."
    )
    return Figure("texts", "Reports over visits and hospitals", about, panels, columns=2)


def _costs(arms: Sequence[Summary]) -> Figure:
    """Bytes and seconds of a run."""
    panels = [Panel("Time of a run", "minutes", "", bars=[(arm.label, arm.seconds / 60) for arm in arms])]
    if any(arm.bytes for arm in arms):
        panels.append(Panel("Tensors both ways", "MB", "", bars=[(arm.label, arm.bytes / 1e6) for arm in arms]))
    about = (
        "In one process, all hospitals one after the other. Mean of seeds. Times are those of the runs as they "
        "happened, beside whatever else the computer did."
    )
    return Figure("cost", "Cost", about, panels, columns=2, share_y=True)
