"""``report.html``: one self-contained page of a run. Nothing is fetched when it is opened."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedtar_flare.core.files import write_text
from fedtar_flare.record.events import Step
from fedtar_flare.reporting import examples as generated
from fedtar_flare.reporting.alarms import alarm_section, finding_section
from fedtar_flare.reporting.format import duration, flat, number, size, times, visits, whole
from fedtar_flare.reporting.plots import Chart, Palette, Series
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import SPLITS, Run, read_run
from fedtar_flare.reporting.scores import ahead, scores
from fedtar_flare.reporting.section import (
    MakeSection,
    Section,
    charts,
    in_rounds,
    left_out,
    made,
    method_sections,
    on_axis,
    over_steps,
    round_axis,
    step_name,
    table,
)
from fedtar_flare.reporting.verdict import MOST, key_numbers, verdict

_ABSENCES = {
    "refused": ("×", "update refused"),
    "absent": ("–", "no update"),
    "abstained": ("○", "too few visits to train on"),
}
_LEAD = (
    "Training {unit} behind each accepted update. "
    "○ too few {unit} to train on at that step, – no update, × update refused; the reasons are listed below."
)


class Attendance(NamedTuple):
    """A site at a step; ``depth`` of its colour is from 0 to 1."""

    kind: str
    sign: str
    tip: str
    depth: float = 0.0


def participation(run: Run) -> Section:
    """A grid with the number of visits, or a sign for a missing update; the reasons are listed below."""
    numbers = sorted({step.round for step in run.steps})
    rounds = {r: [step for step in run.steps if step.round == r] for r in numbers}
    most = max((update.samples for step in run.steps for update in step.sites.values()), default=1)
    rows = {}
    for site in run.start.sites:
        rows[site] = [[_cell(run, step, site, most) for step in steps] for steps in rounds.values()]
    outside = [f"{site} is not in the run: {reason}" for site, reason in run.start.absent.items()]
    words = {"round": "round", "step": "t"} if run.reports else {"round": "task", "step": "step"}
    notes = [*(f"ALARM: {text}" for text in run.alarms), *_reasons(run), *outside]
    content = render("participation.html", rounds=rounds, rows=rows, words=words) + render("notes.html", notes=notes)
    lead = _LEAD.format(unit="visits" if run.reports else "images")
    return Section("participation", "Who took part", lead, content)


def _cell(run: Run, step: Step, site: str, most: int) -> Attendance:
    where = f"{site}, {step_name(step)}"
    if site in step.sites:
        update, min_cell = step.sites[site], run.start.min_cell
        known = update.samples >= min_cell  # the colour shows the number too
        number = visits(update.samples, min_cell)
        tip = f"{where}: {number} visits, {duration(update.seconds)}"
        if update.planned_updates:
            tip += f", {update.updates} of {update.planned_updates} updates"
        tip += f", of {update.late} rounds before: it counts 1 / {1 + update.late}" if update.late else ""
        return Attendance("took", number, tip, 0.1 + (0.35 * update.samples / max(1, most) if known else 0))
    for kind, (sign, word) in _ABSENCES.items():
        if site in getattr(step, kind):
            return Attendance(kind, sign, f"{where}: {word}: {getattr(step, kind)[site]}")
    return Attendance("", "", f"{where}: not asked")


def _reasons(run: Run) -> list[str]:
    """Every reason once, with the steps and rounds at which it was given."""
    notes = []
    for kind, (sign, word) in _ABSENCES.items():
        given: dict[tuple[str, str], list[Step]] = {}
        for step in run.steps:
            for site, reason in getattr(step, kind).items():
                given.setdefault((site, reason), []).append(step)
        notes += [f"{sign} {site}, {word}: {reason} ({_when(steps)})" for (site, reason), steps in given.items()]
    skipped = [step for step in run.steps if step.skipped]
    for site in run.start.sites:
        sent = [step.sites[site] for step in run.steps if site in step.sites]
        if planned := sum(update.planned_updates or 0 for update in sent):
            made = sum(update.updates or 0 for update in sent)
            notes.append(f"{site} made {made} of {planned} local updates in the time that it had (training.seconds)")
    return [*notes, *([f"Skipped, as nobody sent an update: {_when(skipped)}"] if skipped else [])]


def _when(steps: Sequence[Step]) -> str:
    """``step 3 of rounds 1 to 4, 6``."""
    at = sorted({step.step for step in steps})
    return "; ".join(f"step {t} of {in_rounds([step.round for step in steps if step.step == t])}" for t in at)


REPORT_FILE = "report.html"
NEEDED = re.compile(
    r"(.+\.)?(method|preset|seed|num_rounds|time_steps|weighting|aggregation|synthetic_patients|local_steps|local_epochs|batch_size|"
    r"lr|server_lr|schedule|eta|mu|epochs|rank|alpha|mean)"
)
"""Names of settings that change a run's numbers."""


def losses(run: Run) -> Section:
    """Training loss per site over rounds and steps, and validation loss per round."""
    training, validation = [], []
    for i, site in enumerate(run.start.sites):
        at_steps, at_rounds = [], []
        for step in run.steps:
            loss = step.sites[site].train_loss if site in step.sites else None
            at_steps.append((on_axis(run, step.round, step.step), loss, step_name(step)))
        for event in run.validations:
            loss = event.sites[site].validation_loss if site in event.sites else None
            at_rounds.append((float(event.round), loss, f"round {event.round}"))
        training.append(_losses(site, at_steps, "site", i))
        validation.append(_losses(site, at_rounds, "site", i))
    pooled = [(event.round, event.loss, f"round {event.round}") for event in run.validations]
    validation.append(_losses("all reports", pooled, "ink"))
    figures = [
        over_steps(run, "Training loss", training, "nats per token", crosses=False),
        Chart("Validation loss", validation, (), "round", "nats per token", x_range=round_axis(run)),
    ]
    absent = left_out([(event.round, event.left_out) for event in run.validations])
    lead = (
        "Training: mean over a site's local updates at one step; the line breaks where the site sent nothing. "
        "Validation: mean over the reports of validation patients after the round's last step, which chooses the best "
        "round; two rounds are compared on the sites that both have."
    )
    return Section("loss", "Loss", lead, charts(figures[: 1 + (len(run.validations) > 2)]) + absent, optimisation=True)


def _losses(name: str, points: Sequence[tuple[float, float | None, str]], palette: Palette, index: int = 0) -> Series:
    """A line through (x, loss, where)."""
    return Series(name, [(x, loss, f"{name}, {where}: {number(loss)}") for x, loss, where in points], palette, index)


def examples(run: Run) -> Section | None:
    """Drafts beside reference reports; None for a run without synthetic sites."""
    every = map(generated.read_examples, sorted((run.folder / generated.EXAMPLES_FOLDER).glob("*.json")))
    of_sites = [examples for examples in every if examples.synthetic]
    if not of_sites:
        return None
    lead = (
        "The first scored patients of each synthetic site, not the best. Of real patients such a page is made at the "
        f"site ({generated.EXAMPLES_PAGE} in the site's state) and stays there."
    )
    last = max(of_site.round for of_site in of_sites)
    if run.shown and last != run.shown.round:
        lead += f" These are of round {last}, the last to be scored; the scores are of round {run.shown.round}."
    return Section("examples", "Examples", lead, generated.render_examples(of_sites, headed=True))


def exchange(run: Run) -> Section:
    """One exchange against the whole model, and a table of the bytes that the run's steps moved."""
    sizes = run.start.exchange
    down, up = sum(step.bytes_down for step in run.steps), sum(step.bytes_up for step in run.steps)
    whole_down = down * sizes.full_bytes / sizes.bytes if sizes.bytes else 0
    whole_up = sum(len(step.sites) for step in run.steps) * sizes.full_bytes
    moved = [("to the sites", down, whole_down), ("from the sites", up, whole_up)]
    moved.append(("both", down + up, whole_down + whole_up))
    lead = "What travels are the agreed tensors alone; patients, images and reports stay"
    if sizes.bytes:
        lead += f". One exchange, one direction: {size(sizes.bytes)}, {whole(sizes.parameters)} values in "
        lead += f"{sizes.tensors} tensors, float32"
    if sizes.full_bytes:
        ratio = times(sizes.full_bytes, sizes.bytes)
        lead += f"; the whole model has {size(sizes.full_bytes)}, {whole(sizes.full_parameters)} values: "
        lead += f"{ratio} as much"
    content = render("exchange.html", exchange=sizes, moved=moved if run.steps else ())
    return Section("exchange", "Exchange", f"{lead}.", content)


def visit_counts(run: Run) -> Section:
    """Numbers of visits by site, split and time step; those under the minimum cell are blanked, in totals too."""
    start = run.start
    lead = "Visits per site and time step; the splits are by patient, never by visit. Test patients are only scored."
    if start.min_cell > 1:
        lead += f" A split at a step with fewer than {start.min_cell} patients is not used and counts 0; other numbers "
        lead += "are given in multiples of the site's minimum."
    return Section("visits", "Visits", lead, render("visits.html", start=start, splits=SPLITS))


def settings(run: Run) -> Section:
    """The settings needed to repeat the run, versions beside them, and all settings folded."""
    start, values = run.start, run.site_settings
    model = {name: value for name, value in start.model.items() if name != "adapter_config"}  # mostly PEFT's defaults
    values |= {"model": values.get("model", {}) | model} | {k: v for k, v in start.settings.items() if k != "sites"}
    every = flat({"method": start.method or None, "min_cell": start.min_cell} | values)
    needed = table(("setting", "value"), [row for row in every if NEEDED.fullmatch(row[0])], kind="names", left={1})
    versions = table(("version", "value"), sorted(start.versions.items()), kind="names", left={1})
    in_full = table(("setting", "value"), every, kind="names", left={1})
    content = render("pair.html", parts=[needed, versions])
    content += render("folded.html", title="All settings", content=in_full)
    lead = "What one needs to repeat the run: lr is a learning rate, local_steps are updates per step and site. "
    lead += "synthetic_patients concerns synthetic sites alone."
    return Section("settings", "Settings", lead, content)


def sections(run: Run, of_method: Sequence[Section]) -> list[Section]:
    """All sections of a run that began: its results, how training went, and what is needed to repeat it."""
    of_reports = (alarm_section, examples, finding_section, scores, ahead)
    first, last = (of_reports, (losses,)) if run.reports else ((), ())
    training = [section for section in (*of_method, *made(run, last)) if section.optimisation]
    titles = ", ".join(section.title.lower() for section in training)
    content = render("sections.html", sections=training, level=3)
    folded = render("folded.html", title=f"Show {titles}", content=content)
    about: tuple[MakeSection, ...] = (settings, participation, *((visit_counts,) if run.reports else ()), exchange)
    return [
        *made(run, first),
        *(section for section in of_method if not section.optimisation),
        *([Section("optimisation", "Optimisation", "How training went.", folded)] if training else []),
        *made(run, about),
    ]


def write_report(run_folder: Path | str) -> Path:
    """Write the page of a run, finished or not, into its folder."""
    run = read_run(run_folder)
    return write_text(run.folder / REPORT_FILE, page(run))


def page(run: Run) -> str:
    """The page as well-formed HTML (also valid XML): the verdict, the results, and how they were obtained."""
    of_method = method_sections(run)
    return render(
        "run.html",
        run=run,
        verdict=verdict(run, of_method),
        rows=key_numbers(run, of_method)[:MOST],
        sections=sections(run, of_method) if run.start.run_id else [],
        time_steps=run.start.time_steps,
    )
