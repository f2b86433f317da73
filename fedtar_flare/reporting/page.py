"""``report.html``: one self-contained page of a run, from its record. Nothing is fetched when it is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedtar_flare.reporting.examples import SiteExamples, examples_section, run_examples
from fedtar_flare.reporting.format import duration, number, score, size, text, times
from fedtar_flare.reporting.run import Run, read_run
from fedtar_flare.reporting.scores import mean_row, score_rows, start_name
from fedtar_flare.reporting.sections import alpha_section, curves, loss_section, movement_section, section
from fedtar_flare.reporting.style import style_sheet
from fedtar_flare.reporting.tables import (
    bytes_section,
    data_section,
    outer_section,
    participation_section,
    score_table,
    settings_section,
)
from fedtar_flare.version import __version__

REPORT_FILE = "report.html"
STATUSES = ("completed", "aborted", "failed", "unfinished")


def write_report(run_folder: Path | str) -> Path:
    """Write ``report.html`` beside the record of a run; a run that is not finished gives the page of what there is.

    Args:
        run_folder: the ``fedtar`` folder of a run, or the run folder around it.

    Returns:
        the page's path.

    Raises:
        FedTARError: the folder holds no record, or not one of this package (see :func:`read_run`).
    """
    run = read_run(run_folder)
    path = run.folder / REPORT_FILE
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(page(run, run_examples(run.folder)), encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105
    return path


def page(run: Run, examples: Sequence[SiteExamples] = ()) -> str:
    """The page as well-formed HTML (it parses as XML too).

    Args:
        run: the run.
        examples: of synthetic sites, to be shown with it.
    """
    sections = [
        alpha_section(run),
        loss_section(run),
        _scores(run),
        examples_section(examples),
        participation_section(run),
        movement_section(run),
        outer_section(run),
        bytes_section(run),
        data_section(run),
        settings_section(run),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<title>{text(f"Run {run.run_id}" if run.run_id else "Run that did not start")}</title>
<style>
{style_sheet(run.time_steps)}</style>
</head>
<body>
{_header(run, bool(examples))}
<main>
{chr(10).join(sections)}
<footer>Written by fedtar_flare {text(__version__)} from rounds.jsonl. Scores were measured at the sites on their test
patients; numbers and counts left the sites, no report and no image.</footer>
</main>
</body>
</html>
"""


def _header(run: Run, examples: bool) -> str:
    status = run.status if run.status in STATUSES else "unfinished"
    why = f'<p class="why">{text(run.reason)}</p>' if run.reason else ""
    began = f"begun {run.started.replace('T', ' ').replace('Z', ' UTC')}" if run.started else "never began"
    names = (
        ("alpha", "Alpha"),
        ("loss", "Loss"),
        ("scores", "Scores"),
        *((("examples", "Examples"),) if examples else ()),
        ("participation", "Who took part"),
        ("movement", "Movement"),
        ("outer", "Outer steps"),
        ("bytes", "Bytes"),
        ("data", "Data"),
        ("settings", "Settings"),
    )
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in names)
    return f"""<header class="top">
<div class="kind">Federated temporal adaptation</div>
<h1>{text(f"Run {run.run_id}" if run.run_id else "A run that did not start")}
<span class="pill {status}">{text(run.status)}</span></h1>
<div class="sub">{text(began)}{text(f", {', '.join(run.sites)}" if run.sites else "")}</div>
{why}<dl class="tiles">{_tiles(run)}</dl>
<nav>{links}</nav>
</header>"""


def _tiles(run: Run) -> str:
    missing = len(run.not_joined)
    done = len(run.outers)
    losses = [outer.validation_loss for outer in run.outers if outer.validation_loss is not None]
    rows = score_rows(run, run.final)
    overall = mean_row(rows) or next((row for row in rows if row.step is None), None)
    tiles = [
        ("Sites", str(len(run.sites)), f"{missing} did not join" if missing else "all that were asked"),
        ("Time steps", str(run.time_steps), f"alpha by {run.settings.get('alpha_form', 'unknown form')}"),
        ("Rounds", f"{done} of {run.rounds - run.first_round + 1 if run.rounds else 0}", _best(run)),
        ("Wall time", duration(run.seconds), "whole run" if run.seconds is not None else "no end recorded"),
        (
            "Validation loss",
            " → ".join(number(loss, 2) for loss in losses[:: max(1, len(losses) - 1)]) or number(None),
            "first round to last" if len(losses) > 1 else "",
        ),
        (
            "BLEU-4 × 100",
            f"{score('bleu_4', overall.before.get('bleu_4'))} → {score('bleu_4', overall.after.get('bleu_4'))}"
            if overall
            else score("bleu_4", None),
            f"{overall.site}, from the {start_name(run)}" if overall else "not evaluated",
        ),
        (
            "One exchange",
            size(run.exchange.bytes),
            f"whole model {times(run.exchange.full_bytes, run.exchange.bytes)} as much",
        ),
    ]
    return "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(more)}</small></dd></div>"
        for name, value, more in tiles
    )


def _best(run: Run) -> str:
    return f"best by validation: {run.best_round}" if run.best_round else ""


def _scores(run: Run) -> str:
    until = f" to round {run.final.round}" if run.final else ", before training"
    blank = (
        f"Cells with fewer than {run.min_cell} reports are left blank"
        if run.min_cell > 1
        else "It is 0 by definition for one report, and then left blank"
    )
    lead = (
        f"Test patients, from the {start_name(run)}{until}; n is the number of reports. All scores but token loss "
        "are × 100. CIDEr depends on the corpus that it is taken over: compare it along a line, not between sites. "
        f"{blank}."
    )
    return section("scores", "Scores", lead, score_table(run) + curves(run))
