"""Scores as table rows by site and step, before and after, with the mean over sites; and their section of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import CERTAINTIES, Scores, SiteScores
from fedtar_flare.reporting.format import heading, score, shown, total, visits, whole
from fedtar_flare.reporting.plots import SMALL, Chart, Palette, Series, sharing_y
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, charts, round_axis, table

MEAN = "mean of sites"
SEEN = ("degree_accuracy", "change_accuracy", "finding_change_micro_f1", "contradictions")
"""What a run's summary begins with: how much of the findings there are, and what became of them."""
KEY = (  # a summary has the first five of these that the run has
    "finding_f1_known",
    "finding_f1_new",
    "finding_f1_new_macro",
    "bleu_4",
    "cider",
    "presence_f1",
    "chexpert_rules_f1",
    "ctrate_rules_f1",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Raw scores of ``n`` reports of a site at a step (None: all steps); ``reports`` is ``n`` as it is shown."""

    site: str
    step: int | None
    reports: str
    n: int
    before: Mapping[str, float]
    after: Mapping[str, float]


def score_rows(run: Run, generic: bool = False) -> list[Row]:
    """Rows of all sites, each with its steps before its total, and their mean; ``generic``: the shared adapter."""
    both = [(event.generic if generic else event.sites) if event else {} for event in (run.warm_start, run.shown)]
    min_cell = run.start.min_cell
    rows = []
    parts: dict[str, list[int]] = {}
    for site in sorted({site for sites in both for site in sites}):
        before, after = (sites.get(site, SiteScores()) for sites in both)
        pairs = {t: (before.steps.get(t, {}), after.steps.get(t, {})) for t in sorted(before.steps | after.steps)}
        counts = {t: _reports(*pair) for t, pair in pairs.items()}
        rows += [Row(site, t, visits(n, min_cell), n, *map(_scores, pairs[t])) for t, n in counts.items()]
        n = _reports(before.all, after.all)
        parts[site] = list(counts.values()) or [n]
        rows.append(Row(site, None, _total(parts[site], n, min_cell), n, *map(_scores, (before.all, after.all))))
    counted = averaged(rows)
    n = sum(row.n for row in counted)
    reports = _total([count for row in counted for count in parts[row.site]], n, min_cell)
    return rows + ([Row(MEAN, None, reports, n, *_means(counted))] if len(parts) > 1 else [])


def averaged(rows: Sequence[Row]) -> list[Row]:
    """The sites that a mean is of, over all steps: where any was scored before and after, only such ones."""
    sites = [row for row in rows if row.step is None and row.site != MEAN and (row.before or row.after)]
    return [row for row in sites if row.before and row.after] or sites


def overall(run: Run, generic: bool = False) -> Row | None:
    """The mean over sites, or the only site; None without any score."""
    row = next(iter(score_rows(run, generic)[-1:]), None)
    return row if row and (row.before or row.after) else None


def key_scores(row: Row) -> list[str]:
    """The scores that summarise a row; where no true findings are known, presence F1 stands before the wording."""
    scored = {*row.before, *row.after}
    key = KEY if "finding_f1_known" in scored else dict.fromkeys(("presence_f1", *KEY))
    seen, others = ([name for name in names if name in scored] for names in (SEEN, key))
    return seen + others[:5]


def _means(sites: Sequence[Row]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean of each score before and after; where any site has both, only such sites count."""
    means: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for name in SCORES:
        both = [row for row in sites if name in row.before and name in row.after] or sites
        for mean, sides in zip(means, ([r.before for r in both], [r.after for r in both]), strict=True):
            if values := [scores[name] for scores in sides if name in scores]:
                mean[name] = sum(values) / len(values)
    return means


def groups(rows: Sequence[Row]) -> list[tuple[str, Sequence[Row], list[str]]]:
    """Tables of a readable width: title, rows, and the scores that any row has; some are over all steps alone."""
    names = [name for name in SCORES if any(name in row.before or name in row.after for row in rows)]
    tables: list[tuple[str, Sequence[Row], list[str]]] = []
    for group in dict.fromkeys(SCORES[name].group for name in names):
        of_group = [name for name in names if SCORES[name].group == group]
        by_step = any(SCORES[name].by_step for name in of_group)
        tables.append((group, [row for row in rows if by_step or row.step is None], of_group))
    return tables


def start_name(run: Run) -> str:
    """Name of the first evaluation: the warm start, or the round before a resumed run began."""
    return "warm start" if run.start.first_round == 1 else f"round {run.start.first_round - 1}"


def _reports(before: Scores, after: Scores) -> int:
    return int(after.get("n") or before.get("n") or 0)


def _total(parts: Sequence[int], scored: int, min_cell: int) -> str:
    """Number of reports that a score is over, unless a small part would follow by subtraction."""
    shown = [n for n in parts if n >= min_cell]
    return whole(scored) if parts and scored == sum(shown) else total(parts, min_cell)


def _scores(cell: Scores) -> dict[str, float]:
    return {name: value for name, value in cell.items() if name != "n" and value is not None}


def scores(run: Run) -> Section:
    """Tables from the warm start to the round shown, with the patient adapter and without; charts over rounds."""
    rows, off = score_rows(run), score_rows(run, generic=True)
    tables = [("With the patient adapter" if off else "", rows), ("The shared adapter alone", off)]
    shown = []
    for title, of_table in tables:
        for group, part, names in groups(of_table):
            shown.append((f"{title}: {group.lower()}" if title else group, part, names))
    over_rounds = _curves(run) if len(run.evaluations) > 2 else ()  # a line takes three points
    curves = charts(over_rounds, "small") + charts(_certainty(run))
    content = render("scores.html", tables=shown, curves=curves)
    until = f" to round {run.shown.round}" if run.shown else ", before training"
    note = f" ({run.checkpoint_note})" if run.checkpoint_note else ""
    blank = "It is 0 by definition for one report, and then left blank"
    if run.start.min_cell > 1:
        blank = f"Cells with fewer than {run.start.min_cell} patients are left blank"
    lead = (
        f"Test patients, from the {start_name(run)}{until}{note}; n is the number of reports. ↑ higher is better, ↓ "
        "lower is better. Scores of fewer than 20 reports have no decimals; shares of such reports have 95 % "
        "intervals. CIDEr depends on the corpus that it is taken over: compare it along a line, not between sites. "
        f"{blank}."
    )
    return Section("scores", "Scores", lead, content)


def ahead(run: Run) -> Section | None:
    """A table of each site's scores over the run's periods, of reports written ahead of time; None without such."""
    cells = [cell for sites in run.ahead.values() for cell in sites.values()]
    names = [name for name, kind in SCORES.items() if kind.by_step and any(name in cell for cell in cells)]
    if not names:
        return None
    rows = []
    for site in sorted({site for sites in run.ahead.values() for site in sites}):
        for t, sites in run.ahead.items():
            if cell := sites.get(site):
                n = int(cell["n"] or 0)
                values = (score(name, cell.get(name), n) for name in names)
                rows.append((f"{site}, period {t}", visits(n, run.start.min_cell), *values))
    lead = (
        "Each period's reports, written before anything was learnt from its visits, in earlier jobs of the run too. "
        "What changed at a site, with an alarm, is on its own page (periods.html in its state) and stays there."
    )
    return Section("ahead", "Ahead of time", lead, table(("", "n", *map(heading, names)), rows))


def _curves(run: Run) -> list[Chart]:
    """Per score a small chart for each site, with a line per step."""
    curves = []
    sites = sorted({site for event in run.evaluations for site in event.sites})
    for name in (name for name, kind in SCORES.items() if kind.curve):
        label, axis = heading(name).split(", ", 1)
        drawn = [
            Chart(f"{label}, {site}", _lines(run, site, name), (), "round", axis, x_range=round_axis(run), size=SMALL)
            for site in sites
        ]
        curves += sharing_y(drawn) if any(chart.drawn for chart in drawn) else []
    return curves


def _certainty(run: Run) -> list[Chart]:
    """Risk and coverage of the changes that sites read, a point for each certainty; no chart where none reads any."""
    lines = []
    for i, (site, scores) in enumerate(sorted(run.shown.sites.items()) if run.shown else ()):
        every, _ = scores.certainty.get(CERTAINTIES[0], (0, 0))
        points = [
            (100 * n / every, 100 * (n - right) / n, f"{site}, at least {certainty} % certain: {right} of {n} right")
            for certainty, (n, right) in scores.certainty.items()
            if every
        ]
        lines.append(Series(site, points, "site", i))
    title, axes = "Changes between visits: risk and coverage", ("changes told, %", "wrong of those told, %")
    chart = Chart(title, lines, (), *axes, x_range=(0.0, 100.0))
    return [chart] if chart.drawn else []


def _lines(run: Run, site: str, name: str) -> list[Series]:
    def line(label: str, step: int | None, palette: Palette, index: int = 0, generic: bool = False) -> Series:
        points = []
        for event in run.evaluations:
            scores = (event.generic if generic else event.sites).get(site, SiteScores())
            value = (scores.all if step is None else scores.steps.get(step, {})).get(name)
            tip = f"{site}, {label}, round {event.round}: {score(name, value)}"
            points.append((event.round, shown(name, value), tip))
        return Series(label, points, palette, index)

    lines = [line(f"step {t}", t, "step", t - 1) for t in range(1, run.start.time_steps + 1)]
    lines.append(line("all steps", None, "ink"))
    if any(event.generic for event in run.evaluations):
        lines.append(line("all steps, the shared adapter alone", None, "site", 6, generic=True))
    return lines
