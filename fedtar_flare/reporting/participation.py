"""Participation of the sites by round and step."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedtar_flare.record.events import Step
from fedtar_flare.reporting.format import duration, visits
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, in_rounds, step_name

_ABSENCES = {
    "refused": ("×", "update refused"),
    "absent": ("–", "no update"),
    "abstained": ("○", "too few visits to train on"),
}
_LEAD = (
    "Training {unit} behind each accepted update. "
    "○ too few {unit} to train on at that step, – no update, × update refused; the reasons are listed below."
)


@dataclass(frozen=True)
class Attendance:
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
    rows = {
        site: [[_cell(run, step, site, most) for step in steps] for steps in rounds.values()]
        for site in run.start.sites
    }
    outside = [f"{site} is not in the run: {reason}" for site, reason in run.start.absent.items()]
    words = {"round": "round", "step": "t"} if run.reports else {"round": "task", "step": "step"}
    content = render("participation.html", rounds=rounds, rows=rows, words=words) + render(
        "notes.html", notes=[*(f"ALARM: {text}" for text in run.alarms), *_reasons(run), *outside]
    )
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
        notes += [f"{sign} {site}, {word}: {reason} ({_places(steps)})" for (site, reason), steps in given.items()]
    skipped = [step for step in run.steps if step.skipped]
    for site in run.start.sites:
        sent = [step.sites[site] for step in run.steps if site in step.sites]
        if planned := sum(update.planned_updates or 0 for update in sent):
            made = sum(update.updates or 0 for update in sent)
            notes.append(f"{site} made {made} of {planned} local updates in the time that it had (training.seconds)")
    return [*notes, *([f"Skipped, as nobody sent an update: {_places(skipped)}"] if skipped else [])]


def _places(steps: Sequence[Step]) -> str:
    """``step 3 of rounds 1 to 4, 6``."""
    at = sorted({step.step for step in steps})
    return "; ".join(f"step {t} of {in_rounds([step.round for step in steps if step.step == t])}" for t in at)
