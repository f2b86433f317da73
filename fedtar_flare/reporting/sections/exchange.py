"""One exchange against sending the whole model, and what the run's steps moved."""

from __future__ import annotations

from collections.abc import Sequence

from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section

_LEAD = "What travels are the agreed tensors alone; patients, images and reports stay."


def exchange(run: Run) -> Section:
    """Bars of one exchange, and a table of all steps."""
    one = run.start.exchange
    down, up = sum(step.bytes_down for step in run.steps), sum(step.bytes_up for step in run.steps)
    share = one.full_bytes / one.bytes if one.bytes else 0
    updates = sum(len(step.sites) for step in run.steps)
    moved: Sequence[tuple[str, int, float]] = (
        ("to the sites", down, down * share),
        ("from the sites", up, updates * one.full_bytes),
        ("both", down + up, down * share + updates * one.full_bytes),
    )
    content = render("exchange.html", exchange=one, moved=moved if run.steps else (), full=max(one.full_bytes, 1))
    return Section("bytes", "Bytes", _LEAD, content)
