"""The sections of every run's page; those that are a chart or a table are made here."""

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import build
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.registry import method
from fedtar_flare.reporting import examples as generated
from fedtar_flare.reporting.alarms import alarm_section, finding_section
from fedtar_flare.reporting.format import flat, number, significant, size, times, whole
from fedtar_flare.reporting.participation import participation
from fedtar_flare.reporting.plots import Bar, Chart, Palette, Series
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import SPLITS, Run
from fedtar_flare.reporting.scores import ahead, scores
from fedtar_flare.reporting.section import (
    MakeSection,
    Section,
    charts,
    left_out,
    made,
    norms,
    over_steps,
    round_axis,
    step_name,
    table,
    x_of,
)

NEEDED = re.compile(
    r"(.+\.)?(method|preset|seed|num_rounds|time_steps|weighting|aggregation|synthetic_patients|local_steps|local_epochs|batch_size|"
    r"lr|server_lr|schedule|eta|mu|epochs|rank|alpha|mean)"
)
"""Names of settings that change a run's numbers."""


def losses(run: Run) -> Section:
    """Training loss per site over rounds and steps, validation loss per round, and a table of the rounds."""
    training, validation = [], []
    for i, site in enumerate(run.start.sites):
        at_steps, at_rounds = [], []
        for step in run.steps:
            loss = step.sites[site].train_loss if site in step.sites else None
            at_steps.append((x_of(run, step.round, step.step), loss, step_name(step)))
        for one in run.validations:
            loss = one.sites[site].validation_loss if site in one.sites else None
            at_rounds.append((float(one.round), loss, f"round {one.round}"))
        training.append(_losses(site, at_steps, "site", i))
        validation.append(_losses(site, at_rounds, "site", i))
    pooled = [(one.round, one.loss, f"round {one.round}") for one in run.validations]
    validation.append(_losses("all reports", pooled, "ink"))
    figures = [
        over_steps(run, "Training loss", training, "nats per token", crosses=False),
        Chart("Validation loss", validation, (), "round", "nats per token", x_range=round_axis(run)),
    ]
    rows = []
    for one in run.validations:
        sites, best = f"{len(one.sites)} of {len(run.start.sites)}", "best: kept" * (one.round == run.best_round)
        rows.append((str(one.round), number(one.loss, 4), sites, best))
    head = ("round", "validation loss, nats per token, all reports", "sites", "")
    rounds = table(head, rows, empty="No round is complete.")
    absent = left_out([(one.round, one.left_out) for one in run.validations])
    lead = (
        "Training: mean over a site's local updates at one step; the line breaks where the site sent nothing. "
        "Validation: mean over the reports of validation patients after the round's last step, which chooses the best "
        "round; two rounds are compared on the sites that both have."
    )
    return Section("loss", "Loss", lead, charts(figures) + rounds + absent, optimisation=True)


def _losses(name: str, points: Sequence[tuple[float, float | None, str]], palette: Palette, index: int = 0) -> Series:
    """A line through (x, loss, where)."""
    return Series(name, [(x, loss, f"{name}, {where}: {number(loss)}") for x, loss, where in points], palette, index)


def examples(run: Run) -> Section | None:
    """Drafts beside reference reports; None for a run without synthetic sites."""
    found = generated.run_examples(run.folder)
    lead = (
        "The first scored patients of each synthetic site, not the best. Of real patients such a page is made at the "
        f"site ({generated.EXAMPLES_PAGE} in the site's state) and stays there."
    )
    last = max((one.round for one in found), default=None)
    if run.shown and last not in (None, run.shown.round):
        lead += f" These are of round {last}, the last to be scored; the scores are of round {run.shown.round}."
    return Section("examples", "Examples", lead, generated.render_examples(found, headed=True)) if found else None


def movement(run: Run) -> Section | None:
    """Norm of the sites' mean update over rounds and steps; None where nothing is averaged."""
    if run.steps and all(step.update_norm is None for step in run.steps):
        return None
    line = norms(run, "mean update of the sites", [(one.round, one.step, one.update_norm) for one in run.steps])
    figures = [over_steps(run, "Mean update of the sites, Euclidean norm", [line], "norm")]
    lead = "The mean of the sites' updates at each step, over all tensors that travel."
    lead += " A cross on the axis is a step that was skipped." if figures[0].crosses else ""
    if any(one.lora_gap for one in run.steps):
        gaps = [
            (x_of(run, s.round, s.step), s.lora_gap, f"{step_name(s)}: {significant(s.lora_gap)}") for s in run.steps
        ]
        lead += " Gap: ‖mean(BA) - mean(B) mean(A)‖ / ‖mean(BA)‖ of the sites' low-rank factors, over all layers."
        title = "Gap between the means of LoRA's factors and products"
        figures.append(over_steps(run, title, [Series("gap", gaps, "site", 1)], "share", crosses=False))
    return Section("movement", "Movement", lead, charts(figures), optimisation=True)


def exchange(run: Run) -> Section:
    """Bars of one exchange against the whole model, and a table of the bytes that the run's steps moved."""
    one = run.start.exchange
    down, up = sum(step.bytes_down for step in run.steps), sum(step.bytes_up for step in run.steps)
    whole_down = down * one.full_bytes / one.bytes if one.bytes else 0
    whole_up = sum(len(step.sites) for step in run.steps) * one.full_bytes
    moved = [("to the sites", down, whole_down), ("from the sites", up, whole_up)]
    moved.append(("both", down + up, whole_down + whole_up))
    words = f"{size(one.bytes)}, {whole(one.parameters)} values in {one.tensors} tensors"
    bars = [Bar("what travels", one.bytes, words)]
    if one.full_bytes:
        ratio = times(one.full_bytes, one.bytes)
        words = f"{size(one.full_bytes)}, {whole(one.full_parameters)} values: {ratio} as much"
        bars.append(Bar("whole model", one.full_bytes, words))
    chart = Chart("One exchange, one direction, float32", bars=bars)
    content = render("exchange.html", exchange=one, moved=moved if run.steps else (), bars=chart.figure())
    lead = "What travels are the agreed tensors alone; patients, images and reports stay."
    return Section("exchange", "Exchange", lead, content)


def visits(run: Run) -> Section:
    """Numbers of visits by site, split and time step; those under the minimum cell are blanked, in totals too."""
    start = run.start
    lead = "Visits per site and time step; the splits are by patient, never by visit. Test patients are only scored."
    if start.min_cell > 1:
        lead += (
            f" A split at a step with fewer than {start.min_cell} patients is not used and counts 0; other numbers are "
            "given in multiples of the site's minimum."
        )
    return Section("visits", "Visits", lead, render("visits.html", start=start, splits=SPLITS))


def settings(run: Run) -> Section:
    """The settings needed to repeat the run, versions beside them, and all settings folded."""
    start, values = run.start, _at_sites(run)
    own = {name: value for name, value in start.model.items() if name != "adapter_config"}  # PEFT's, mostly defaults
    values |= {"model": values.get("model", {}) | own} | {k: v for k, v in start.settings.items() if k != "sites"}
    every = flat({"method": start.method or None, "min_cell": start.min_cell} | values)
    needed = table(("setting", "value"), [row for row in every if NEEDED.fullmatch(row[0])], kind="names", left={1})
    versions = table(("version", "value"), sorted(start.versions.items()), kind="names", left={1})
    folded = _folded("All settings", table(("setting", "value"), every, kind="names", left={1}))
    content = render("pair.html", parts=[needed, versions]) + folded
    lead = "What one needs to repeat the run: lr is a learning rate, local_steps are updates per step and site."
    return Section("settings", "Settings", lead, content)


def _at_sites(run: Run) -> dict[str, Any]:
    """The sites' settings by group with their defaults; as in the job where this version refuses them."""
    if (given := run.start.settings.get("sites")) is None:
        return {}
    try:
        kinds = dict(method(run.start.method).settings)
        kinds |= {"training": TrainingConfig, "lora": LoRAConfig} if run.reports else {}
        return given | {group: build(kind, given.get(group), group).to_dict() for group, kind in kinds.items()}
    except ConfigError:
        return dict(given)


def _folded(title: str, content: Markup) -> Markup:
    return render("folded.html", title=title, content=content)


def sections(run: Run, of_method: Sequence[Section]) -> list[Section]:
    """All sections of a run that began: its results, how training went, and what is needed to repeat it."""
    of_reports = (examples, alarm_section, finding_section, scores, ahead)
    first, last = (of_reports, (losses, movement)) if run.reports else ((), ())
    training = [one for one in (*of_method, *made(run, last)) if one.optimisation]
    titles = ", ".join(one.title.lower() for one in training)
    folded = _folded(f"Show {titles}", render("sections.html", sections=training, level=3))
    about: tuple[MakeSection, ...] = (settings, participation, *((visits,) if run.reports else ()), exchange)
    return [
        *made(run, first),
        *(one for one in of_method if not one.optimisation),
        *([Section("optimisation", "Optimisation", "How training went.", folded)] if training else []),
        *made(run, about),
    ]
