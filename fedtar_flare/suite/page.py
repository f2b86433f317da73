"""``comparison.html``: a suite's arms side by side, one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from fedtar_flare.files import write_text
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import NOTHING, duration, number, scaling, score, shown, size
from fedtar_flare.reporting.plots import Series, line_chart
from fedtar_flare.reporting.render import render
from fedtar_flare.suite.against import Difference
from fedtar_flare.suite.plan import Suite
from fedtar_flare.suite.summary import WHERE, Summary

PAGE = "comparison.html"


def write_page(folder: Path, suite: Suite, arms: Sequence[Summary], against: Sequence[Difference]) -> Path:
    """Write the page of the arms that have results; returns its path."""
    return write_text(folder / PAGE, page(suite, arms, against))


def page(suite: Suite, arms: Sequence[Summary], against: Sequence[Difference]) -> str:
    """The page as well-formed HTML. Nothing is fetched when it is opened."""
    names = [name for name in SCORES if any(name in arm.after[where] for arm in arms for where in WHERE)]
    tables = [(title, head(names), rows(arms, where, names)) for where, title in WHERE.items()]
    return render(
        "comparison.html",
        suite=suite,
        seeds=max((len(arm.seeds) for arm in arms), default=0),
        tables=[(title, columns, lines) for title, columns, lines in tables if lines],
        scaling=scaling(names),
        reference=next((arm.label for arm in arms if arm.name == suite.compared_with), ""),
        compared=["method", *(SCORES[name].label for name in dict.fromkeys(one.score for one in against))],
        against=_against(arms, against),
        charts=_charts(arms),
        costs=[
            [arm.label, str(len(arm.seeds)), duration(arm.seconds), size(arm.bytes) if arm.bytes else NOTHING]
            for arm in arms
        ],
        time_steps=1,
    )


def head(names: Sequence[str]) -> list[str]:
    """Column heads of a table of scores; an arrow says which way is better."""
    return ["method", *(f"{SCORES[n].label} {'↑' if SCORES[n].higher_is_better else '↓'}" for n in names)]


def rows(arms: Sequence[Summary], where: str, names: Sequence[str]) -> list[list[str]]:
    """The warm start and then each arm, as mean and, over several seeds, standard deviation."""
    measured = [arm for arm in arms if arm.after[where]]
    if not measured:
        return []
    first = measured[0].before[where]
    start = ["warm start", *(score(n, sum(first[n]) / len(first[n]) if n in first else None) for n in names)]
    return [start, *([arm.label, *(_value(arm, where, name) for name in names)] for arm in measured)]


def _value(arm: Summary, where: str, name: str) -> str:
    mean, spread = arm.mean(where, name), arm.spread(where, name)
    return score(name, mean) + (f" ± {score(name, spread)}" if spread is not None else "")


def _against(arms: Sequence[Summary], against: Sequence[Difference]) -> list[list[str]]:
    by_arm: dict[str, list[str]] = {arm.name: [arm.label] for arm in arms if any(o.arm == arm.name for o in against)}
    for one in against:
        value, low, high = (score(one.score, part) for part in one.difference)
        by_arm[one.arm].append(f"{value} [{low}, {high}], p {number(one.p)}")
    return list(by_arm.values())


def _charts(arms: Sequence[Summary]) -> list[Markup]:
    charts = []
    for name, kind in SCORES.items():
        if kind.curve:
            curves = [(arm.label, [(r, shown(name, v)) for r, v in arm.rounds.get(name, [])]) for arm in arms]
            title = f"{kind.label} over rounds, mean of the hospitals that took part"
            charts.append(_chart(title, curves, f"{kind.label}{' × 100' if kind.scale == 100 else ''}"))
    losses = [(arm.label, arm.validation) for arm in arms]
    return [*charts, _chart("Validation loss over rounds, mean of seeds", losses, "loss per token")]


def _chart(title: str, curves: Sequence[tuple[str, Sequence[tuple[int, float | None]]]], y_label: str) -> Markup:
    series = [
        Series(label, [(r, v, f"{label}, round {r}: {number(v)}") for r, v in points], index=i)
        for i, (label, points) in enumerate(curves)
    ]
    return line_chart(title, series, x_label="round", y_label=y_label)
