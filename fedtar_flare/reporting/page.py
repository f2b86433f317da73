"""``report.html``: one self-contained page of a run. Nothing is fetched when it is opened."""

from __future__ import annotations

from pathlib import Path

from fedtar_flare.files import write_text
from fedtar_flare.reporting.format import duration, size, times
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run, read_run
from fedtar_flare.reporting.section import own_sections
from fedtar_flare.reporting.sections import sections
from fedtar_flare.reporting.verdict import key_numbers, verdict

REPORT_FILE = "report.html"


def write_report(run_folder: Path | str) -> Path:
    """Write ``report.html`` into a run's folder, finished or not; its path. Errors as of :func:`read_run`."""
    run = read_run(run_folder)
    return write_text(run.folder / REPORT_FILE, page(run))


def page(run: Run) -> str:
    """The page as well-formed HTML (also valid XML): the verdict, what came of the run, and how it was made."""
    own = own_sections(run)
    return render(
        "run.html",
        run=run,
        verdict=verdict(run, own),
        facts=_facts(run),
        tiles=key_numbers(run, own),
        sections=sections(run, own) if run.start.run_id else [],
        time_steps=run.start.time_steps,
    )


def _facts(run: Run) -> list[str]:
    """Time, sites, progress and size, for the line under the title."""
    start, exchange = run.start, run.start.exchange
    time = start.time.replace("T", " ").replace("Z", " UTC")
    if not start.run_id:
        return ["never began"]
    less = f" (whole model: {times(exchange.full_bytes, exchange.bytes)} as much)" if exchange.full_bytes else ""
    if run.reports:
        asked = start.rounds - start.first_round + 1
        done = f"{len(run.validations)} of {asked} rounds of {start.time_steps} time steps"
    else:
        done = f"{len({step.round for step in run.steps})} of {start.rounds} tasks"
    return [
        *([f"begun {time}"] if time else []),
        f"{duration(run.end.seconds)}" if run.end else "no end recorded",
        f"{len(start.sites)} sites ({', '.join(start.sites)})",
        *([f"{len(start.absent)} did not join"] if start.absent else []),
        done,
        *([f"round {run.best_round} is the best by validation loss, and kept"] if run.best_round else []),
        f"one exchange {size(exchange.bytes)}{less}",
    ]
