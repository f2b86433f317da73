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

__all__ = ["Section", "charts", "left_out", "norms", "over_steps", "round_axis", "table"]


@dataclass(frozen=True)
class Section:
    """A rendered section of a page.

    Attributes
    ----------
    name, title, lead, content : str, str, str, Markup
        Its anchor, heading, introduction and body.
    lines : tuple of (label, text)
        What the model card and the head of the page quote from it.
    optimisation : bool
        Whether it is about how training went and not about what it achieved; such sections are folded.
    """

    name: str
    title: str
    lead: str
    content: Markup
    lines: tuple[tuple[str, str], ...] = ()
    optimisation: bool = False


MakeSection = Callable[[Run], Section | None]
"""What is registered: makes a run's section; None where the run has nothing of it."""


def method_sections(run: Run) -> list[Section]:
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
    """Draw charts side by side, under one legend where each colour and marker in it belongs to one series.

    Parameters
    ----------
    drawn, kind : sequence of Chart, str
        With the kind ``small`` more charts fit in a row.

    Returns
    -------
    Markup
    """
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
    """Render a table whose first column names the rows.

    Parameters
    ----------
    head, rows : sequence of str, sequence of such sequences
    kind, left : str, collection of int
        CSS class of the table, and the columns that are flush left.
    empty : str
        Stands for a table without rows.

    Returns
    -------
    Markup
    """
    return render("table.html", head=head, rows=rows, kind=kind, left=left, empty=empty)


def left_out(rounds: Sequence[tuple[int, Mapping[str, str]]]) -> Markup:
    """List the sites that were left out, with their rounds; each reason is given once.

    Parameters
    ----------
    rounds : sequence of (round, reasons)
        Reasons by site.

    Returns
    -------
    Markup
    """
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
    """Range of the x axis of all charts over rounds.

    Parameters
    ----------
    run : Run

    Returns
    -------
    tuple of float
        From before the first round to the last one that began.
    """
    begun = [step.round for step in run.steps] + [one.round for one in run.evaluations]
    return float(run.start.first_round - 1), float(max(begun, default=run.start.first_round))


def x_of(run: Run, round_: int, step: int) -> float:
    """Position of a step on the axis of rounds; the last step of round r is at r."""
    return round(round_ - 1 + step / max(1, run.start.time_steps), 4)


def over_steps(run: Run, title: str, lines: Sequence[Series], y_label: str, crosses: bool = True) -> Chart:
    """Draw lines over rounds with a point per time step.

    Parameters
    ----------
    run, title, lines, y_label : Run, str, sequence of Series, str
    crosses : bool
        Whether to mark the steps that were skipped.

    Returns
    -------
    Chart
    """
    skipped = [one for one in run.steps if one.skipped and crosses]
    tips = [(x_of(run, one.round, one.step), f"{step_name(one)}: skipped, nobody sent an update") for one in skipped]
    return Chart(title, lines, (), "round (a point per time step)", y_label, x_range=round_axis(run), crosses=tips)


def norms(run: Run, name: str, values: Iterable[tuple[int, int, float | None]], index: int = 0) -> Series:
    """Make a line through norms by round and step, which breaks at the steps that were skipped.

    Parameters
    ----------
    run, name, index : Run, str, int
        ``index`` is that of the colour.
    values : iterable of (round, step, norm)

    Returns
    -------
    Series
    """
    skipped = {(one.round, one.step) for one in run.steps if one.skipped}
    points = [
        (x_of(run, r, t), None if (r, t) in skipped else y, f"{name}, round {r}, step {t}: {significant(y)}")
        for r, t, y in values
    ]
    return Series(name, points, "site", index)


def step_name(step: Step) -> str:
    """``round 1, step 2``."""
    return f"round {step.round}, step {step.step}"
