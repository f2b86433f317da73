"""``report.html``: one self-contained page of a run. Nothing is fetched when it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedtar_flare.files import write_text
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import NOTHING, duration, number, score, size, times
from fedtar_flare.reporting.render import Tile, render
from fedtar_flare.reporting.run import Run, read_run
from fedtar_flare.reporting.scores import mean_row, score_rows, start_name
from fedtar_flare.reporting.section import Section, own_sections
from fedtar_flare.reporting.sections import OF_IMAGES, SECTIONS

REPORT_FILE = "report.html"
HEADLINE = "bleu_4"
"""The score at the head of the page."""


def write_report(run_folder: Path | str) -> Path:
    """Write ``report.html`` into a run's folder, finished or not; its path. Errors as of :func:`read_run`."""
    run = read_run(run_folder)
    return write_text(run.folder / REPORT_FILE, page(run))


def page(run: Run) -> str:
    """The page as well-formed HTML (also valid XML): the method's own sections, then those of every run."""
    makers = SECTIONS if run.reports else OF_IMAGES
    shared = [section for make in makers if run.start.run_id and (section := make(run)) is not None]
    time = run.start.time.replace("T", " ").replace("Z", " UTC")
    own = own_sections(run)
    return render(
        "run.html",
        run=run,
        sections=[*own, *shared],
        tiles=_tiles(run, own),
        began=f"begun {time}" if time else "never began",
        time_steps=run.start.time_steps,
    )


def _tiles(run: Run, own: Sequence[Section]) -> list[Tile]:
    start, exchange = run.start, run.start.exchange
    missing = len(start.absent)
    seconds = run.end.seconds if run.end else None
    done = len({step.round for step in run.steps})
    less = f"whole model {times(exchange.full_bytes, exchange.bytes)} as much" if exchange.full_bytes else ""
    return [
        Tile("Sites", str(len(start.sites)), f"{missing} did not join" if missing else "all that were asked"),
        *(_progress(run) if run.reports else [Tile("Tasks", f"{done} of {start.rounds}", "diseases in sequence")]),
        Tile("Wall time", duration(seconds), "whole run" if run.end else "no end recorded"),
        *(
            _scores(run)
            if run.reports
            else [Tile(label, *text.split(", ", 1)) for section in own for label, text in section.lines]
        ),
        Tile("One exchange" if run.reports else "One module", size(exchange.bytes), less),
    ]


def _progress(run: Run) -> list[Tile]:
    start = run.start
    asked = start.rounds - start.first_round + 1 if start.rounds else 0
    best = f"best by validation: {run.best_round}" if run.best_round else ""
    return [
        Tile("Time steps", str(start.time_steps), "in each round"),
        Tile("Rounds", f"{len(run.validations)} of {asked}", best),
    ]


def _scores(run: Run) -> list[Tile]:
    losses = [one.loss for one in run.validations if one.loss is not None]
    rows = score_rows(run, run.final)
    overall = mean_row(rows) or next((row for row in rows if row.step is None), None)
    parts = (overall.before, overall.after) if overall else ()
    return [
        Tile(
            "Validation loss",
            " → ".join(number(loss, 2) for loss in losses[:: max(1, len(losses) - 1)]) or number(None),
            "first round to last" if len(losses) > 1 else "",
        ),
        Tile(
            f"{SCORES[HEADLINE].label} × 100",
            " → ".join(score(HEADLINE, part.get(HEADLINE)) for part in parts) or NOTHING,
            f"{overall.site}, from the {start_name(run)}" if overall else "not evaluated",
        ),
    ]
