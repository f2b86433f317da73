"""A section of a run's page, what sections share, and the sections of the run's method."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from fedtar_flare.record.events import Step
from fedtar_flare.reporting.plots import Chart, Figure, Series
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run

__all__ = ["Section", "charts", "table"]


@dataclass(frozen=True)
class Section:
    """A rendered section of a page.

    Attributes
    ----------
    name, title, lead, content
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


MakeSection = Callable[[Run], Section | None]  # None where the run has nothing of it


def method_sections(run: Run) -> list[Section]:
    """The sections of the run's method; none where this version does not know the method."""
    return made(run, run.method.sections if run.method else ())


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
    legend = Figure("", "", drawn).legend
    alike = len({(series.colour, series.marker) for series in legend}) < len(legend)
    each = alike or all(len(chart.drawn) < 2 for chart in drawn)
    figures = [chart.figure(legend=each) for chart in drawn]
    return render("legend.html", series=() if each else legend) + render("charts.html", figures=figures, kind=kind)


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
    """List the sites that were left out, with their rounds, from reasons by site; each reason is given once."""
    given: dict[tuple[str, str], list[int]] = {}
    for round_, reasons in rounds:
        for site, why in reasons.items():
            given.setdefault((site, why), []).append(round_)
    notes = [f"{site} was left out in {in_rounds(numbers)}: {why}" for (site, why), numbers in given.items()]
    return render("notes.html", notes=notes)


def in_rounds(numbers: Sequence[int]) -> str:
    """``round 3``; ``rounds 1 to 4, 6``."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])  # of rounds that follow one another
    spans = [[r for _, r in run] for _, run in runs]
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"


def round_axis(run: Run) -> tuple[float, float]:
    """Range of the x axis of all charts over rounds, from before the first round to the last one that began."""
    begun = [step.round for step in run.steps] + [event.round for event in run.evaluations]
    return float(run.start.first_round - 1), float(max(begun, default=run.start.first_round))


def on_axis(run: Run, round_: int, step: int) -> float:
    """Position of a step on the axis of rounds; the last step of round r is at r."""
    return round(round_ - 1 + step / max(1, run.start.time_steps), 4)


def over_steps(run: Run, title: str, lines: Sequence[Series], y_label: str, crosses: bool = True) -> Chart:
    """Draw lines over rounds with a point per time step, and ``crosses`` at the steps that were skipped."""
    skipped = [step for step in run.steps if step.skipped and crosses]
    tips = [(on_axis(run, s.round, s.step), f"{step_name(s)}: skipped, nobody sent an update") for s in skipped]
    return Chart(title, lines, (), "round (a point per time step)", y_label, x_range=round_axis(run), crosses=tips)


def step_name(step: Step) -> str:
    """``round 1, step 2``."""
    return f"round {step.round}, step {step.step}"
