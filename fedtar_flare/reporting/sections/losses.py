"""Training loss per site over rounds and steps, validation loss per round."""

from __future__ import annotations

from markupsafe import Markup

from fedtar_flare.reporting.format import number
from fedtar_flare.reporting.plots import Series, line_chart
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, charts, left_out, place, round_axis, step_name, table

_LEAD = (
    "Training: mean over a site's local updates at one step; the line breaks where the site sent nothing. "
    "Validation: mean over the reports of validation patients after the round's last step. The best round is chosen "
    "by it; two rounds are compared on the sites that both have."
)


def losses(run: Run) -> Section:
    """Two charts, and a table of the rounds."""
    figures = [
        line_chart(
            "Training loss, nats per token",
            [_training(run, site, i) for i, site in enumerate(run.start.sites)],
            x_label="round (a point per time step)",
            y_label="token loss",
            x_range=round_axis(run),
        ),
        line_chart(
            "Validation loss, nats per token",
            [*(_validation(run, site, i) for i, site in enumerate(run.start.sites)), _pooled(run)],
            x_label="round",
            y_label="token loss",
            x_range=round_axis(run),
        ),
    ]
    return Section("loss", "Loss", _LEAD, charts(figures) + _rounds(run))


def _rounds(run: Run) -> Markup:
    sites = len(run.start.sites)
    rows = [
        (str(one.round), number(one.loss, 4), f"{len(one.sites)} of {sites}", "best" * (one.round == run.best_round))
        for one in run.validations
    ]
    return table(
        ("round", "validation loss, all reports", "sites", ""), rows, empty="No round is complete."
    ) + left_out([(one.round, one.left_out) for one in run.validations])


def _training(run: Run, site: str, index: int) -> Series:
    points = []
    for step in run.steps:
        loss = step.sites[site].train_loss if site in step.sites else None
        points.append((place(run, step.round, step.step), loss, f"{site}, {step_name(step)}: {number(loss)}"))
    return Series(site, points, "site", index)


def _validation(run: Run, site: str, index: int) -> Series:
    points = []
    for one in run.validations:
        loss = one.sites[site].validation_loss if site in one.sites else None
        points.append((one.round, loss, f"{site}, round {one.round}: {number(loss)}"))
    return Series(site, points, "site", index)


def _pooled(run: Run) -> Series:
    points = [(one.round, one.loss, f"all reports, round {one.round}: {number(one.loss)}") for one in run.validations]
    return Series("all reports", points, "ink")
