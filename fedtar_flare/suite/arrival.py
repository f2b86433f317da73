"""What a suite shows where visits arrive period by period: scores ahead of time, what was forgotten, and alphas."""

from collections.abc import Iterable, Sequence

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import mean_score, over_seeds
from fedtar_flare.reporting.format import heading
from fedtar_flare.reporting.plots import SMALL, Chart, Figure, Series, sharing_y
from fedtar_flare.suite.against import OF_VALUES, SUMS, paired, value
from fedtar_flare.suite.charts import OTHERS, arm_series, colours_of, curves, gaps
from fedtar_flare.suite.results import Done, Row, at_sites, by_arm, grouped
from fedtar_flare.suite.tables import Table, score_cell, with_interval
from fedtar_flare.synthetic.vocabulary import KIND, ids

AHEAD = ("bleu_4", "finding_f1_new")
"""Scores with a figure, and a column."""
LATE = "finding_f1"
"""The score of a late hospital's first period, whose words it has taught nobody."""
SPREADS = frozenset(ids([kind for kind, one in KIND.items() if "epidemic" in one]))
"""Findings that become common in a cohort whose ``change`` is ``epidemic``."""
Rows = list[Row]


def of_periods(results: Iterable[Done]) -> list[Done]:
    """The runs in which visits arrived period by period."""
    return [one for one in results if one.rows and "learnt" in one.rows[0]]


def period_figures(results: Sequence[Done]) -> list[Figure]:
    """Scores by period of the reports that were written ahead of time, a chart for each scenario; and the alphas."""
    labels = {one.experiment.name: one.result["label"] for one in results}
    colours = colours_of([*labels], [], dict.fromkeys(labels, 0.0))
    made = []
    for name in AHEAD:
        charts = []
        for scenario, runs in grouped(results, lambda one: one.experiment.variant.scenario).items():
            lines = [_line(name, arm, of_arm, labels, colours) for arm, of_arm in by_arm(runs).items()]
            charts.append(Chart(scenario or "reports", gaps(lines), (), "period", SCORES[name].label, size=SMALL))
        about = "Reports of each period's visits, written before anything was learnt from them, at the hospitals that "
        about += "a scenario is about. Mean of seeds; the band is their range."
        title = f"{SCORES[name].label} ahead of time"
        made.append(Figure(f"ahead_{name}", title, about, sharing_y(charts), OTHERS))
    with_alphas = [one for one in results if one.result["curves"]]
    groups = grouped(with_alphas, lambda one: f"{one.result['label']}, {one.experiment.variant.scenario}")
    alphas = {name: [one.result for one in runs] for name, runs in groups.items()}
    return [figure for figure in [*made, *curves(alphas, {name: name for name in alphas})] if figure.charts]


def period_table(results: Sequence[Done]) -> Table:
    """Each arm in each scenario: scores over all periods, in a late hospital's first one, and what was forgotten."""
    rows = []
    by_row = grouped(results, lambda one: f"{one.experiment.variant.scenario}: {one.result['label']}")
    for row, runs in by_row.items():
        late = [_of_late_hospitals(one) for one in runs]
        shown = [score_cell(name, value(name, [_compared(one) for one in runs])) for name in AHEAD]
        first = value(LATE, late) if any(late) else None
        lost = [_forgotten(one) for one in runs]
        a, b = paired(AHEAD[0], [(now, then) for now, then in lost if now])
        forgotten = over_seeds(a, b) if a else None
        shown += [score_cell(LATE, first), score_cell(AHEAD[0], forgotten)]
        for later in (False, True):
            named = [mean_score(*zip(*found, strict=True)) for one in runs if (found := _named(one, later))]
            recall = over_seeds(named, replicates=OF_VALUES) if named else None
            shown.append(with_interval(recall, lambda share: f"{100 * share:.0f} %"))
        rows.append([row, *shown])
    about = (
        "Reports of all patients' visits from period 2 on, each scored before anything was learnt from "
        "its period, all periods together: the area under the curve over time. A late hospital's first period was "
        "scored with what the others had learnt, or before any learning where nothing is shared. Kept is BLEU-4 of "
        "test patients' visits after the last period less the one after their own: below 0, they were forgotten. The "
        "last columns are the shares of reports that name a spreading finding, where it is there, in the period in "
        "which it reaches a hospital, and from then on. 95 % intervals over patients and seeds."
    )
    late_hospital = f"{SCORES[LATE].label} at first, late hospital"
    heads = ["scenario", *(heading(name) for name in AHEAD), late_hospital, "kept", "named at first", "named since"]
    return Table("Ahead of time", about, heads, rows)


def _compared(one: Done) -> Rows:
    return at_sites(one.members(), one.experiment.variant.compared)


def _line(name: str, arm: str, runs: Sequence[Done], labels: dict[str, str], colours: dict[str, int]) -> Series:
    periods = [pair for one in runs for pair in grouped(_compared(one), lambda row: row["time_step"]).items()]
    known = [(period, sums) for period, rows in periods if (sums := SUMS[name](rows)) is not None]
    return arm_series(arm, labels, colours, [(period, SCORES[name].scale * sums.value()) for period, sums in known])


def _of_late_hospitals(one: Done) -> Rows:
    """Reports of the first period of hospitals that came late."""
    late = at_sites(one.members(), one.experiment.variant.joins)
    of_site = grouped(late, lambda row: row["site"])
    first = {site: min(row["time_step"] for row in rows) for site, rows in of_site.items()}
    return [row for row in late if row["time_step"] == first[row["site"]]]


def _forgotten(one: Done) -> tuple[Rows, Rows]:
    """Reports of earlier periods' visits after the last period, and of the same after their own."""
    past = at_sites(one.members("past"), one.experiment.variant.compared)
    last = max((row["learnt"] for row in past), default=0)
    then = [row for row in past if row["time_step"] == row["learnt"] < last]
    visits = {(row["site"], row["visit_id"]) for row in then}
    return [row for row in past if row["learnt"] == last and (row["site"], row["visit_id"]) in visits], then


def _named(one: Done, later: bool) -> list[tuple[tuple[str, str], float]]:
    """By report with a spreading finding, in the period in which it reaches a hospital, or also ``later``: patient, and
    share named.
    """
    found = []
    for row in _compared(one):
        options = one.experiment.variant.cohort.get(row["site"], {})
        there = SPREADS & {*(row["findings"] or ())}
        begins = options.get("change_step") if options.get("change") == "epidemic" else None
        if there and begins and (row["time_step"] == begins or (later and row["time_step"] > begins)):
            share = len(there & {*row["findings_in_text"]}) / len(there)
            found.append(((row["site"], row["patient_id"]), share))
    return found
