"""The figures of a comparison, from the results of its arms."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import heading, number
from fedtar_flare.reporting.plots import SITE_COLOURS, SMALL, Chart, Figure, Series, sharing_y
from fedtar_flare.suite.results import Result, by_arm, seed_means

Pairs = Iterable[tuple[float, float | None]]  # x values with y values of single runs, of which some are not known
Lines = Callable[[Callable[[dict[str, Any]], Pairs]], list[Series]]
OTHERS = "other methods"  # name of the faded lines, last in a legend
MAX_CHARTS = 8  # of a figure


def figures(results: Sequence[Result], reference: str) -> list[Figure]:
    """All figures for which the results have data."""
    arms = by_arm(results)
    labels = {name: runs[0].label for name, runs in arms.items()}
    best = {name: statistics.fmean(seed_means(runs, "members", "cider") or [0]) for name, runs in arms.items()}
    colours = arm_colours(best, reference)

    def lines(read: Callable[[dict[str, Any]], Pairs]) -> list[Series]:
        pairs = {name: [pair for run in runs for pair in read(run.content)] for name, runs in arms.items()}
        drawn = [arm_series(name, labels, colours, of_arm) for name, of_arm in pairs.items()]
        return gaps([line for line in drawn if line.points])

    drawn = [*_per_hospital(results, lines), _scores(lines), _validation(lines), *_curves(arms, labels)]
    return [figure for figure in drawn if figure.charts]


def arm_colours(values: Mapping[str, float], reference: str) -> dict[str, int]:
    """A colour per arm; of more arms than colours, the reference and those with the highest values have one."""
    chosen = sorted(values, key=lambda name: (name != reference, -values[name]))
    if len(values) > SITE_COLOURS:
        chosen = chosen[: SITE_COLOURS - 1]
    return {name: i for i, name in enumerate(name for name in values if name in chosen)}


def arm_series(name: str, labels: Mapping[str, str], colours: Mapping[str, int], pairs: Pairs) -> Series:
    """An arm's means over seeds, with the range of several seeds; faded, as one of :data:`OTHERS`, without a colour."""
    points: dict[float, list[float]] = {}
    for x, y in pairs:
        if y is not None:
            points.setdefault(x, []).append(y)
    means = {x: statistics.fmean(points[x]) for x in sorted(points)}
    ranged = name in colours and any(len(values) > 1 for values in points.values())
    return Series(
        labels[name] if name in colours else OTHERS,
        [(x, mean, f"{labels[name]}, {x:g}: {number(mean)}") for x, mean in means.items()],
        "site" if name in colours else "faded",
        colours.get(name, 0),
        [(x, min(points[x]), max(points[x])) for x in means] if ranged else (),
    )


def gaps(lines: Sequence[Series]) -> list[Series]:
    """The lines, broken where others have a value and they have none, so that none is drawn through it."""
    xs = sorted({x for line in lines for x, *_ in line.points})
    out = []
    for line in lines:
        points = {point[0]: point for point in line.points}
        out.append(replace(line, points=[points.get(x, (x, None, "")) for x in xs]))
    return out


def _per_hospital(results: Sequence[Result], lines: Lines) -> list[Figure]:
    """CIDEr of each hospital, of all visits and of those of each time step (FedTAR, Fig. 4 and 5)."""
    scored = [site for result in results for event in result.content["evaluations"] for site in event["sites"].items()]
    sites, steps = sorted({name for name, _ in scored}), sorted({int(t) for _, s in scored for t in s["steps"]})
    scale = SCORES["cider"].scale

    def read(content: dict[str, Any], site: str, step: int) -> Iterator[tuple[float, float | None]]:
        for event in content["evaluations"]:
            if scores := event["sites"].get(site):
                cell = scores["steps"].get(str(step), {}) if step else scores["all"]
                value = cell.get("cider")
                yield event["round"], None if value is None or cell["n"] < 2 else value * scale

    out = []
    for step in (0, *(steps if len(steps) > 1 else ())):
        drawn = {site: lines(partial(read, site=site, step=step)) for site in sites[:MAX_CHARTS]}
        charts = [Chart(site, of, (), "round", "CIDEr × 100", size=SMALL) for site, of in drawn.items() if of]
        title = f"CIDEr of each hospital over rounds{f', step {step}' if step else ''}"
        about = "Test patients, with the patient adapter where there is one. Mean of seeds; the band is their range."
        out.append(Figure(title, about, sharing_y(charts), OTHERS))
    return out


def _scores(lines: Lines) -> Figure:
    def read(content: dict[str, Any], name: str, scale: float) -> Iterator[tuple[float, float]]:
        for event in content["evaluations"]:
            if values := [value for site in event["sites"].values() if (value := site["all"].get(name)) is not None]:
                yield event["round"], scale * statistics.fmean(values)

    charts = []
    for name, kind in SCORES.items():
        if kind.curve and (series := lines(partial(read, name=name, scale=kind.scale))):
            charts.append(Chart(heading(name), series, (), "round", kind.label, size=SMALL))
    about = "Mean of the hospitals that took part and of seeds. Methods scored in some rounds alone are points there."
    return Figure("Scores over rounds", about, charts, OTHERS)


def _validation(lines: Lines) -> Figure:
    """Validation loss, and its variance over hospitals, with c / sqrt(round) (FedTAR, Fig. 3a)."""

    def variance(sites: Mapping[str, Any]) -> float | None:
        values = [site["validation_loss"] for site in sites.values() if site["validation_loss"] is not None]
        return statistics.variance(values) if len(values) > 1 else None

    losses = lines(lambda content: [(event["round"], event["loss"]) for event in content["validation"]])
    spreads = lines(lambda content: [(event["round"], variance(event["sites"])) for event in content["validation"]])
    rounds = [x for x, *_ in losses[0].points] if losses else []
    if len(rounds) > 1:
        scale = statistics.fmean(y for line in losses for _, y, _ in line.points[:1] if y is not None)
        guide = [(r, scale * math.sqrt(rounds[0] / r), "") for r in rounds]
        losses.append(Series("c / √round", guide, "ink", dashed=True))
    charts = [Chart("Validation loss", losses, (), "round", "loss per token")] if losses else []
    charts += [Chart("Its variance over hospitals", spreads, (), "round", "variance")] if spreads else []
    about = "Validation patients of all hospitals. The dashed line falls as O(1/√t) from the mean of the first round."
    return Figure("Validation loss over rounds", about, charts, OTHERS)


def _curves(arms: Mapping[str, Sequence[Result]], labels: Mapping[str, str]) -> list[Figure]:
    """What the methods record as curves of their own, as FedTAR its alphas (Fig. 7); a chart for each arm."""
    out = []
    for title in dict.fromkeys(title for runs in arms.values() for run in runs for title in run.content["curves"]):
        charts = []
        for name, runs in arms.items():
            rows = [row for run in runs for row in run.content["curves"].get(title, ())]
            lines = []
            for t in range(1, max(map(len, rows), default=1)):
                pairs = [(row[0], row[t]) for row in rows if t < len(row)]
                lines.append(arm_series(name, {name: f"step {t}"}, {name: t - 1}, pairs))
            if lines:
                charts.append(Chart(labels[name], lines, (), "round", title, size=SMALL))
        about = "As the method records it, a line for each time step. Mean of seeds; the band is their range."
        out.append(Figure(f"{title.capitalize()} over rounds", about, sharing_y(charts[:MAX_CHARTS])))
    return out
