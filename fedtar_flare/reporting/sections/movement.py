"""How far the sites' mean update goes at each step."""

from __future__ import annotations

from fedtar_flare.reporting.format import significant
from fedtar_flare.reporting.plots import Series, line_chart
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, charts, place, round_axis, skipped_steps, step_name


def movement(run: Run) -> Section | None:
    """Norm of the mean update over rounds and steps; None where nothing is averaged."""
    if run.steps and all(step.update_norm is None for step in run.steps):
        return None
    crosses = skipped_steps(run)
    points = [
        (
            place(run, one.round, one.step),
            None if one.skipped else one.update_norm,
            f"mean update of the sites, {step_name(one)}: {significant(one.update_norm)}",
        )
        for one in run.steps
    ]
    figure = line_chart(
        "Mean update of the sites, Euclidean norm",
        [Series("mean update of the sites", points)],
        x_label="round (a point per time step)",
        y_label="norm",
        x_range=round_axis(run),
        crosses=crosses,
    )
    lead = "The mean of the sites' updates at each step, over all tensors that travel."
    lead += " A cross on the axis is a step that was skipped." if crosses else ""
    return Section("movement", "Movement", lead, charts([figure]))
