"""The parts of the page that are tables: scores, who took part, bytes, data, outer steps, settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedtar_flare.reporting.format import (
    NOTHING,
    duration,
    flat,
    number,
    score,
    significant,
    size,
    text,
    times,
    whole,
)
from fedtar_flare.reporting.run import SPLITS, Run, Step
from fedtar_flare.reporting.scores import Row, mean_row, measured, score_rows
from fedtar_flare.reporting.sections import section

_ABSENCES = {
    "abstained": ("○", "too few visits to train on"),
    "absent": ("–", "no update"),
    "refused": ("×", "update refused"),
}


def score_table(run: Run) -> str:
    """Per site and step: test reports, and each score from the warm start to the last evaluation."""
    rows = score_rows(run, run.final)
    if not rows:
        return '<p class="none">Not evaluated yet.</p>'
    mean = mean_row(rows)
    names = measured(rows)
    body = []
    named = ""
    for row in [*rows, *([mean] if mean else [])]:
        head = ""
        if row.site != named:
            named = row.site
            together = max(1, sum(one.site == row.site for one in rows))
            head = f'<th scope="rowgroup" rowspan="{together}" title="{text(row.site)}">{text(row.site)}</th>'
        cells = "".join(_from_to(name, row) for name in names)
        step = "all" if row.step is None else str(row.step)
        kind = "total" if row.step is None else ""
        body.append(f'<tr class="{kind}">{head}<td>{step}</td><td>{row.n}</td>{cells}</tr>')
    heads = "".join(f'<th colspan="2" class="group">{text(name)}</th>' for name in names.values())
    return _table(f"<tr><th>site</th><th>step</th><th>n</th>{heads}</tr>", "".join(body), "scores")


def participation_section(run: Run) -> str:
    """Site x (round, step): training visits, or why there was no update."""
    if not run.steps:
        body = '<p class="none">No step has run.</p>'
    else:
        most = max((update.samples for one in run.steps for update in one.sites.values()), default=1)
        rounds = [[one for one in run.steps if one.round == r] for r in sorted({one.round for one in run.steps})]
        heads = "".join(f'<th colspan="{len(steps)}" class="group">round {steps[0].round}</th>' for steps in rounds)
        below = "".join(
            f'<th class="{"group" if i == 0 else ""}">t {one.step}</th>'
            for steps in rounds
            for i, one in enumerate(steps)
        )
        rows = []
        for site in run.sites:
            cells = (_part(one, site, most, i == 0) for steps in rounds for i, one in enumerate(steps))
            rows.append(f'<tr><th scope="row" title="{text(site)}">{text(site)}</th>{"".join(cells)}</tr>')
        head = f'<tr><th rowspan="2">site</th>{heads}</tr><tr>{below}</tr>'
        body = _table(head, "".join(rows), "grid-table") + _problems(run)
    outside = [f"{site} is not in the run: {reason}" for site, reason in run.not_joined.items()]
    lead = (
        "Training visits behind each accepted update. "
        "○ too few visits to train on at that step, – no update, × update refused; the reasons are listed below."
    )
    return section("participation", "Who took part when", lead, body + _notes(outside))


def bytes_section(run: Run) -> str:
    """One exchange against full-model synchronisation, and what the run's steps moved."""
    one = run.exchange
    lead = "What travels is the shared adapter alone; the patient part, data and gradients of the outer step stay."
    if not one.bytes:
        return section("bytes", "Bytes", lead, '<p class="none">Not recorded.</p>')
    full = one.full_bytes or one.bytes
    bars = "".join(
        f'<div>{name}</div><div><i style="width:{100 * amount / max(full, one.bytes):.2f}%"></i>'
        f"<span>{size(amount)}, {whole(parameters)} values{more}</span></div>"
        for name, amount, parameters, more in (
            ("shared adapter", one.bytes, one.parameters, f" in {one.tensors} tensors"),
            ("whole model", one.full_bytes, one.full_parameters, f": {times(one.full_bytes, one.bytes)} as much"),
        )
        if amount
    )
    down, up = (sum(getattr(step, name) for step in run.steps) for name in ("bytes_down", "bytes_up"))
    updates = sum(len(step.sites) for step in run.steps)
    whole_down, whole_up = down * one.full_bytes / one.bytes, updates * one.full_bytes
    rows = (
        ("to the sites", down, whole_down),
        ("from the sites", up, whole_up),
        ("both", down + up, whole_down + whole_up),
    )
    body = "".join(
        f'<tr class="{"total" if name == "both" else ""}"><th scope="row">{name}</th><td>{size(moved)}</td>'
        f"<td>{size(other) if one.full_bytes else NOTHING}</td><td>{times(other, moved)}</td></tr>"
        for name, moved, other in rows
    )
    head = "<tr><th>all steps</th><th>this run</th><th>whole model instead</th><th>ratio</th></tr>"
    table = _table(head, body) if run.steps else ""
    return section(
        "bytes", "Bytes", lead, f'<h3>One exchange, one direction, float32</h3><div class="bars">{bars}</div>{table}'
    )


def data_section(run: Run) -> str:
    """Visits per site, split and step."""
    steps = range(run.time_steps)
    head = "".join(f'<th colspan="{run.time_steps + 1}" class="group">{split}</th>' for split in SPLITS)
    below = "".join(
        "".join(f'<th class="{"group" if t == 0 else ""}">t {t + 1}</th>' for t in steps) + "<th>all</th>"
        for _ in SPLITS
    )
    body = []
    for site, counts in sorted(run.counts.items()):
        cells = []
        for split in SPLITS:
            visits = counts[split]
            cells += [
                f'<td class="{"group" if t == 0 else ""}">{visits[t] if t < len(visits) else NOTHING}</td>'
                for t in steps
            ]
            cells.append(f"<td><b>{sum(visits) if visits else NOTHING}</b></td>")
        body.append(f'<tr><th scope="row" title="{text(site)}">{text(site)}</th>{"".join(cells)}</tr>')
    lead = "Visits per site and time step; the splits are by patient, never by visit. Test patients are only scored."
    if run.min_cell > 1:
        lead += f" A site with fewer than {run.min_cell} training visits at a step abstains there."
    table = _table(f'<tr><th rowspan="2">site</th>{head}</tr><tr>{below}</tr>', "".join(body)) if body else ""
    return section("data", "Data", lead, table or '<p class="none">Not recorded.</p>')


def outer_section(run: Run) -> str:
    """One row per outer step, and who was left out."""
    body = "".join(
        f'<tr><th scope="row">{outer.round}</th><td>{number(outer.validation_loss, 4)}</td>'
        f"<td>{sum(site.n for site in outer.sites.values())}</td><td>{significant(outer.psi_grad_norm)}</td>"
        f'<td class="left">{" ".join(number(a) for a in outer.alpha_after)}</td></tr>'
        for outer in run.outers
    )
    head = (
        "<tr><th>round</th><th>validation loss</th><th>reports</th><th>‖gradient of psi‖</th>"
        '<th style="text-align:left">alpha after it, steps 1 to T</th></tr>'
    )
    rounds: dict[tuple[str, str], list[int]] = {}
    for outer in run.outers:
        for site, why in outer.left_out.items():
            rounds.setdefault((site, why), []).append(outer.round)
    left = [f"{site} was left out in {_rounds(numbers)}: {why}" for (site, why), numbers in rounds.items()]
    lead = "Once per round alpha moves along the gradient of the validation loss, from T numbers that each site sends."
    return section(
        "outer",
        "Outer steps",
        lead,
        (_table(head, body) if body else '<p class="none">No round is complete.</p>') + _notes(left),
    )


def settings_section(run: Run) -> str:
    """Settings and versions."""
    versions = _names("version", sorted(run.versions.items()))
    settings = _names("setting", flat(run.settings))
    lead = "What a run with the same data needs to give the same numbers."
    return section("settings", "Settings and versions", lead, f'<div class="pair">{settings}{versions}</div>')


def _names(head: str, rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return '<p class="none">Not recorded.</p>'
    body = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in rows)
    return _table(f'<tr><th>{head}</th><th style="text-align:left">value</th></tr>', body, "names")


def _table(head: str, body: str, kind: str = "") -> str:
    return f'<div class="scroll"><table class="{kind}"><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _from_to(name: str, row: Row) -> str:
    if not row.before and not row.after:  # too few reports
        return '<td class="group before"></td><td class="after nil"></td>'
    before, after = score(name, row.before.get(name)), score(name, row.after.get(name))
    return f'<td class="group before">{before}</td><td class="after">{after}</td>'


def _first(index: int) -> str:
    """Class of a cell that begins a group of columns."""
    return "" if index else "group"


def _part(step: Step, site: str, most: int, first: bool) -> str:
    group = " group" if first else ""
    where = f"{site}, round {step.round}, step {step.step}"
    if site in step.sites:
        update = step.sites[site]
        depth = 0.1 + 0.35 * update.samples / max(1, most)
        tip = f"{where}: {update.samples} visits, {duration(update.seconds)}"
        return f'<td class="took{group}" style="--a:{depth:.2f}" title="{text(tip)}">{update.samples}</td>'
    for kind, (sign, word) in _ABSENCES.items():
        reasons = getattr(step, kind)
        if site in reasons:
            return f'<td class="{kind}{group}" title="{text(f"{where}: {word}: {reasons[site]}")}">{sign}</td>'
    return f'<td class="{group.strip()}" title="{text(f"{where}: not asked")}"></td>'


def _problems(run: Run) -> str:
    """Every reason once, with the steps and rounds at which it was given."""
    notes = []
    for kind in ("refused", "absent", "abstained"):
        given: dict[tuple[str, str], list[Step]] = {}
        for step in run.steps:
            for site, reason in getattr(step, kind).items():
                given.setdefault((site, reason), []).append(step)
        sign, word = _ABSENCES[kind]
        notes += [f"{sign} {site}, {word}: {reason} ({_places(steps)})" for (site, reason), steps in given.items()]
    skipped = [step for step in run.steps if step.skipped]
    return _notes([*notes, *([f"Skipped, as nobody sent an update: {_places(skipped)}"] if skipped else [])])


def _places(steps: Sequence[Step]) -> str:
    """``step 3 of rounds 1 to 4, 6``."""
    at = sorted({step.step for step in steps})
    return "; ".join(f"step {t} of {_rounds([step.round for step in steps if step.step == t])}" for t in at)


def _rounds(numbers: Sequence[int]) -> str:
    """``round 3``; ``rounds 1 to 4, 6``."""
    runs: list[list[int]] = []
    for r in numbers:
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    spans = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in runs]
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(spans)}"


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""
