"""Generated beside reference reports, for the synthetic sites of a simulated run."""

from __future__ import annotations

from fedtar_flare.reporting.examples import EXAMPLES_PAGE, marked, run_examples
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section

_LEAD = (
    "Test reports of the synthetic cohort, the first of each step and site. For patients' reports such a page is "
    f"made at the site ({EXAMPLES_PAGE} in the site's state) and stays there."
)


def examples(run: Run) -> Section | None:
    """None of a run without synthetic sites."""
    found = run_examples(run.folder)
    if not found:
        return None
    content = render("examples.html", sites=[marked(one) for one in found], headed=True)
    return Section("examples", "Examples", _LEAD, content)
