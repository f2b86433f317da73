"""A section of a run's page, what sections share, and the sections of the run's method."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.record.events import Step
from fedtar_flare.registry import method
from fedtar_flare.reporting.format import significant
from fedtar_flare.reporting.plots import Chart, Figure, Series
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run


@dataclass(frozen=True)
class Section:
    """A rendered section; ``name`` is its anchor, and ``lines`` (label, text) go to the model card.

    A section of the ``optimisation`` says how training went, not what came of it, and is folded.
    """

    name: str
    title: str
    lead: str
    content: Markup
    lines: tuple[tuple[str, str], ...] = ()
    optimisation: bool = False


MakeSection = Callable[[Run], Section | None]
"""What is registered: makes a run's section; None where the run has nothing of it."""


def own_sections(run: Run) -> list[Section]:
    """The sections of the run's method; none where this version does not know the method."""
    try:
        makers: Sequence[MakeSection] = method(run.start.method).sections
    except ConfigError:
        return []
    return made(run, makers)


def made(run: Run, makers: Sequence[MakeSection]) -> list[Section]:
    """The sections that a run has something for."""
    return [section for make in makers if (section := make(run)) is not None]


def charts(drawn: Sequence[Chart], kind: str = "") -> Markup:
    """Charts side by side under one legend, if each sign in it is of one series; ``small``: more of them in a row."""
    legend = Figure("", "", "", drawn).legend
    own = len({(one.colour, one.marker) for one in legend}) < len(legend) or all(len(c.drawn) < 2 for c in drawn)
    figures = [one.figure(legend=own) for one in drawn]
    return render("legend.html", series=() if own else legend) + render("charts.html", figures=figures, kind=kind)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    kind: str = "",
    left: Collection[int] = (),
    empty: str = "Not recorded.",
) -> Markup:
    """A table whose first column names the rows; ``kind`` is its CSS class, ``left`` has the columns flush left."""
    return render("table.html", head=head, rows=rows, kind=kind, left=left, empty=empty)


def left_out(rounds: Sequence[tuple[int, Mapping[str, str]]]) -> Markup:
    """Who was left out in which rounds and why, each reason once; ``rounds`` are (round, site to reason)."""
    found: dict[tuple[str, str], list[int]] = {}
    for round_, reasons in rounds:
        for site, why in reasons.items():
            found.setdefault((site, why), []).append(round_)
    notes = [f"{site} was left out in {in_rounds(numbers)}: {why}" for (site, why), numbers in found.items()]
    return render("notes.html", notes=notes)


def in_rounds(numbers: Sequence[int]) -> str:
    """``round 3``; ``rounds 1 to 4, 6``."""
    runs: list[list[int]] = []
    for r in numbers:
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    spans = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in runs]
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(spans)}"


def round_axis(run: Run) -> tuple[float, float]:
    """The x axis of all charts over rounds: from before the first round to the last one begun."""
    begun = [step.round for step in run.steps] + [one.round for one in run.evaluations]
    return float(run.start.first_round - 1), float(max(begun, default=run.start.first_round))


def place(run: Run, round_: int, step: int) -> float:
    """A step on the axis of rounds; the last step of round r is at r."""
    return round(round_ - 1 + step / max(1, run.start.time_steps), 4)


def over_steps(run: Run, title: str, lines: Sequence[Series], y_label: str, crosses: bool = True) -> Chart:
    """A chart over rounds with a point per time step, and ``crosses`` for the steps that were skipped."""
    skipped = [one for one in run.steps if one.skipped and crosses]
    tips = [(place(run, one.round, one.step), f"{step_name(one)}: skipped, nobody sent an update") for one in skipped]
    return Chart(title, lines, (), "round (a point per time step)", y_label, x_range=round_axis(run), crosses=tips)


def norms(run: Run, name: str, values: Iterable[tuple[int, int, float | None]], index: int = 0) -> Series:
    """A line through values by round and step; it breaks at the steps that were skipped."""
    skipped = {(one.round, one.step) for one in run.steps if one.skipped}
    points = [
        (place(run, r, t), None if (r, t) in skipped else y, f"{name}, round {r}, step {t}: {significant(y)}")
        for r, t, y in values
    ]
    return Series(name, points, "site", index)


def step_name(step: Step) -> str:
    """``round 1, step 2``."""
    return f"round {step.round}, step {step.step}"
