"""Settings and versions of a run."""

from __future__ import annotations

from fedtar_flare.reporting.format import flat
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, table


def settings(run: Run) -> Section:
    """Two tables side by side."""
    start = run.start
    values = {"method": start.method, "min_cell": start.min_cell, "model": start.model} if start.method else {}
    tables = [
        table(("setting", "value"), flat(values | start.settings), kind="names", left={1}),
        table(("version", "value"), sorted(start.versions.items()), kind="names", left={1}),
    ]
    lead = "What a run with the same data needs to give the same numbers."
    return Section("settings", "Settings", lead, render("pair.html", parts=tables))
