"""The figures of a comparison, from the results of its arms."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import duration, heading, number, size
from fedtar_flare.reporting.plots import SITE_COLOURS, SMALL, Bar, Chart, Figure, Series, sharing_y
from fedtar_flare.suite.against import COMPARED
from fedtar_flare.suite.results import Done, by_arm
from fedtar_flare.suite.summary import Summary

Pairs = Iterable[tuple[float, float | None]]
"""Places on the x axis with values of single runs, of which some are not known."""
OTHERS = "other methods"
"""Name of the faded lines, last in a legend."""
MOST_CHARTS = 8


def figures(results: Sequence[Done], arms: Sequence[Summary], reference: str) -> list[Figure]:
    """All figures that the results have something for."""
    runs = {name: [one.result for one in several] for name, several in by_arm(results).items()}
    labels = {arm.name: arm.label for arm in arms}
    colours = arm_colours(arms, reference)

    def lines(of: Callable[[dict[str, Any]], Pairs]) -> list[Series]:
        pairs = {name: [pair for one in several for pair in of(one)] for name, several in runs.items()}
        drawn = [arm_series(name, labels, colours, of_arm) for name, of_arm in pairs.items()]
        return gaps([line for line in drawn if line.points])

    made = [*_per_hospital(results, lines), _scores(lines), _validation(lines), *curves(runs, labels), _costs(arms)]
    return [figure for figure in made if figure.charts]


def arm_colours(arms: Sequence[Summary], reference: str) -> dict[str, int]:
    """A colour per arm; of more arms than colours, the reference, the best in each compared score, and in CIDEr."""
    names = [arm.name for arm in arms]
    means = {score: {arm.name: arm.mean("members", score) or 0.0 for arm in arms} for score in COMPARED}
    leading = [max(names, key=lambda name, of=of: of[name]) for of in means.values()]  # type: ignore[misc]
    return colours_of(names, [*(name for name in names if name == reference), *leading], means["cider"])


def colours_of(names: Sequence[str], first: Sequence[str], best: Mapping[str, float]) -> dict[str, int]:
    """A colour per name; of more names than colours, the ``first`` and those with the ``best`` values have one."""
    if len(names) > SITE_COLOURS:
        chosen = list(dict.fromkeys([*first, *sorted(names, key=lambda n: -best[n])]))[: SITE_COLOURS - 1]
        names = [name for name in names if name in chosen]
    return {name: i for i, name in enumerate(names)}


def arm_series(name: str, labels: Mapping[str, str], colours: Mapping[str, int], pairs: Pairs) -> Series:
    """An arm's means over seeds, with the range of several seeds; faded, as one of :data:`OTHERS`, without a colour."""
    points: dict[float, list[float]] = {}
    for x, y in pairs:
        if y is not None:
            points.setdefault(x, []).append(y)
    several = any(len(values) > 1 for values in points.values())
    means = {x: statistics.fmean(points[x]) for x in sorted(points)}
    return Series(
        labels[name] if name in colours else OTHERS,
        [(x, mean, f"{labels[name]}, {x:g}: {number(mean)}") for x, mean in means.items()],
        "site" if name in colours else "faded",
        colours.get(name, 0),
        [(x, min(points[x]), max(points[x])) for x in means] if several and name in colours else (),
    )


def gaps(lines: Sequence[Series]) -> list[Series]:
    """Lines with a gap at each place where others have a value and they have none, so that none is drawn through it."""
    places = sorted({x for line in lines for x, *_ in line.points})
    found = []
    for line in lines:
        there = {point[0]: point for point in line.points}
        found.append(replace(line, points=[there.get(x, (x, None, "")) for x in places]))
    return found


Lines = Callable[[Callable[[dict[str, Any]], Pairs]], list[Series]]


def _per_hospital(results: Sequence[Done], lines: Lines) -> list[Figure]:
    """CIDEr of each hospital, of all visits and of those of each time step (FedTAR, Fig. 4 and 5)."""
    told = [site for one in results for event in one.result["evaluations"] for site in event["sites"].items()]
    sites, steps = sorted({name for name, _ in told}), sorted({int(t) for _, scores in told for t in scores["steps"]})
    scale = SCORES["cider"].scale

    def of(result: dict[str, Any], site: str, step: int) -> list[tuple[float, float | None]]:
        events = [(event["round"], event["sites"][site]) for event in result["evaluations"] if site in event["sites"]]
        cells = [(r, one["steps"].get(str(step), {}) if step else one["all"]) for r, one in events]
        return [(r, None if (v := cell.get("cider")) is None or cell["n"] < 2 else v * scale) for r, cell in cells]

    found = []
    for step in (0, *(steps if len(steps) > 1 else ())):
        drawn = {site: lines(partial(of, site=site, step=step)) for site in sites[:MOST_CHARTS]}
        charts = [Chart(site, one, (), "round", "CIDEr × 100", size=SMALL) for site, one in drawn.items() if one]
        name, which = (f"cider_of_step_{step}", f", step {step}") if step else ("cider_per_hospital", "")
        about = "Test patients, with the patient adapter where there is one. Mean of seeds; the band is their range."
        found.append(Figure(name, f"CIDEr of each hospital over rounds{which}", about, sharing_y(charts), OTHERS))
    return found


def _scores(lines: Lines) -> Figure:
    charts = []
    for name, kind in SCORES.items():

        def of(result: dict[str, Any], name: str = name, scale: float = kind.scale) -> list[tuple[float, float]]:
            found = []
            for event in result["evaluations"]:
                values = [v for site in event["sites"].values() if (v := site["all"].get(name)) is not None]
                if values:
                    found.append((event["round"], scale * statistics.fmean(values)))
            return found

        if kind.curve and (drawn := lines(of)):
            charts.append(Chart(heading(name), drawn, (), "round", kind.label, size=SMALL))
    about = "Mean of the hospitals that took part and of seeds. Methods scored in some rounds alone are points there."
    return Figure("scores", "Scores over rounds", about, charts, OTHERS)


def _validation(lines: Lines) -> Figure:
    """Validation loss, and its variance over hospitals, with c / sqrt(round) (FedTAR, Fig. 3a)."""

    def variance(sites: Mapping[str, Any]) -> float | None:
        values = [site["validation_loss"] for site in sites.values() if site["validation_loss"] is not None]
        return statistics.variance(values) if len(values) > 1 else None

    losses = lines(lambda result: [(event["round"], event["loss"]) for event in result["validation"]])
    spreads = lines(lambda result: [(event["round"], variance(event["sites"])) for event in result["validation"]])
    rounds = [x for x, *_ in losses[0].points] if losses else []
    if len(rounds) > 1:
        scale = statistics.fmean(y for line in losses for _, y, _ in line.points[:1] if y is not None)
        guide = [(r, scale * math.sqrt(rounds[0] / r), "") for r in rounds]
        losses.append(Series("c / √round", guide, "ink", dashed=True))
    charts = [Chart("Validation loss", losses, (), "round", "loss per token")] if losses else []
    charts += [Chart("Its variance over hospitals", spreads, (), "round", "variance")] if spreads else []
    about = "Validation patients of all hospitals. The dashed line falls as O(1/√t) from the mean of the first round."
    return Figure("validation_loss", "Validation loss over rounds", about, charts, OTHERS)


def curves(by_arm: Mapping[str, Sequence[dict[str, Any]]], labels: Mapping[str, str]) -> list[Figure]:
    """What the methods record as curves of their own, as FedTAR its alphas (Fig. 7); a chart for each arm."""
    found = []
    for title in dict.fromkeys(title for results in by_arm.values() for one in results for title in one["curves"]):
        charts = []
        for name, results in by_arm.items():
            rows = [row for result in results for row in result["curves"].get(title, ())]
            lines = []
            for t in range(1, max(map(len, rows), default=1)):
                pairs = [(row[0], row[t]) for row in rows if t < len(row)]
                lines.append(arm_series(name, {name: f"step {t}"}, {name: t - 1}, pairs))
            if lines:
                charts.append(Chart(labels[name], lines, (), "round", title, size=SMALL))
        about = "As the method records it, a line for each time step. Mean of seeds; the band is their range."
        found.append(Figure(title, f"{title.capitalize()} over rounds", about, sharing_y(charts[:MOST_CHARTS])))
    return found


def _costs(arms: Sequence[Summary]) -> Figure:
    times = [Bar(arm.label, arm.seconds, duration(arm.seconds), arm.seconds_range) for arm in arms]
    charts = [Chart("Time of a run", bars=times)]
    if any(arm.bytes for arm in arms):
        charts.append(Chart("Tensors both ways", bars=[Bar(arm.label, arm.bytes, size(arm.bytes)) for arm in arms]))
    about = (
        "In one process, all hospitals one after the other. Mean of seeds; the line is their range. Times are those of "
        "the runs as they happened, with whatever else the computer did."
    )
    return Figure("cost", "Cost", about, charts)
