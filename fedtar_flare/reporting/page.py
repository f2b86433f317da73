"""``report.html``: one self-contained page of a run. Nothing is fetched when it is opened."""

from pathlib import Path

from fedtar_flare.core.files import write_text
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run, read_run
from fedtar_flare.reporting.section import method_sections
from fedtar_flare.reporting.sections import sections
from fedtar_flare.reporting.verdict import key_numbers, verdict

REPORT_FILE = "report.html"
"""Name of the page in a run's folder."""


def write_report(run_folder: Path | str) -> Path:
    """Write the page of a run, finished or not, into its folder."""
    run = read_run(run_folder)
    return write_text(run.folder / REPORT_FILE, page(run))


def page(run: Run) -> str:
    """The page as well-formed HTML (also valid XML): the verdict, the results, and how they were obtained."""
    own = method_sections(run)
    return render(
        "run.html",
        run=run,
        verdict=verdict(run, own),
        tiles=key_numbers(run, own),
        sections=sections(run, own) if run.start.run_id else [],
        time_steps=run.start.time_steps,
    )
