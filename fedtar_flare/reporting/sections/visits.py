"""Visits per site, split and time step."""

from __future__ import annotations

from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import SPLITS, Run
from fedtar_flare.reporting.section import Section


def visits(run: Run) -> Section:
    """A table; numbers under the minimum cell are blanked, in totals too."""
    start = run.start
    lead = "Visits per site and time step; the splits are by patient, never by visit. Test patients are only scored."
    if start.min_cell > 1:
        lead += (
            f" A site with fewer than {start.min_cell} training visits at a step abstains there; "
            "numbers below that are not told."
        )
    return Section("data", "Data", lead, render("visits.html", start=start, splits=SPLITS))
