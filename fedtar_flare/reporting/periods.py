"""A site's own page over periods: scores ahead of time, changes, and an alarm. It stays at the site."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtar_flare.core.files import PRIVATE, write_text
from fedtar_flare.learning.evaluation import write_report_scores
from fedtar_flare.learning.labels import labeler_of
from fedtar_flare.learning.site_model import SiteModel
from fedtar_flare.metrics import drift
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import SUMS, Interval, Row
from fedtar_flare.reporting.format import heading, significant
from fedtar_flare.reporting.plots import SMALL, Chart, Series
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.section import charts

logger = logging.getLogger(__name__)
AHEAD, PERIODS_PAGE = "ahead-", "periods.html"  # prefix of files with scores of drafts written ahead of time; page
MOST = 200  # visits of a period that are examined, the first by keyed hash of the patient
DRAWN = ("wording", "% of a report", 1), ("images", "grey levels of 255", 1), ("prevalence", "% of visits", 3)
"""Kinds of measures, with their unit and the number in a chart."""


def write_periods(folder: Path, model: SiteModel, rows: Sequence[Row]) -> Path:
    """Store scores of drafts that were written ahead of time, and write the page of all periods until then."""
    newest, patients = max(row["time_step"] for row in rows), {p.patient_id for p in model.cohort.patients}
    write_report_scores(folder, newest, rows, AHEAD)
    lines = [line for file in folder.glob(f"{AHEAD}*.jsonl") for line in file.read_text().splitlines()]
    known = [row for row in map(json.loads, lines) if row["time_step"] <= newest and row["patient_id"] in patients]
    samples = [sample for t in range(1, newest + 1) for sample in model.cohort.samples(None, t)[:MOST]]
    reports, steps = [sample.visit.report for sample in samples], [sample.time_step for sample in samples]
    stated = [*map(labeler_of([sample.visit for sample in samples]).stated, reports)]
    names = sorted(frozenset().union(*stated))
    visits = []
    for sample, findings in zip(samples, stated, strict=True):
        image = drift.image_measures(model.prepared([sample])[0].image)
        measures = {**image, **{name: 100 * (name in findings) for name in names}}
        visits.append({"patient_id": sample.visit.patient_id, "time_step": sample.time_step, **measures})
    of_kinds = {"wording": ["new phrases"], "images": [*image], "prevalence": names}
    tests = drift.falls(known)
    for until in sorted({t for _, t, _, p in tests if p < drift.CHANCE}, reverse=True) or [newest - 1]:
        phrases = drift.unseen_phrases(reports, [t if t <= until else newest for t in steps])
        rows = [{**visit, "new phrases": new} for visit, new in zip(visits, phrases, strict=True)]
        kinds = {kind: drift.changes(rows, of, until, rising=kind == "wording") for kind, of in of_kinds.items()}
        if cause := drift.likely_cause(kinds):  # a change that lasts is none against the newest period with it
            break
    tops = [(kind, unit, {name: by for name, by, *_ in kinds[kind][:n]}) for kind, unit, n in DRAWN]
    moved = [_chart(f"{kind}: {', '.join(top).replace('_', ' ')}", unit, top) for kind, unit, top in tops]
    scores = {name: drift.by_period(known, SUMS[name], SCORES[name].scale) for name in drift.WATCHED}
    scored = [_chart(*heading(n).partition(", ")[::2], {SCORES[n].label: by}) for n, by in scores.items()]
    if tests and tests[0][3] < drift.CHANCE:
        logger.warning("scores of period %d fell beyond chance: see %s", newest, folder / PERIODS_PAGE)
    page = render(
        "periods.html",
        cohort=model.cohort,
        tests=tests,
        cause=cause,
        charts=[charts([chart for chart in drawn if chart.drawn], "small") for drawn in (scored, moved)],
        newest=newest,
        until=until,
        limits={"p": drift.CHANCE, "visits": MOST},
        kinds=kinds,
        registry=SCORES,
    )
    return write_text(folder / PERIODS_PAGE, page, PRIVATE)


def _chart(title: str, unit: str, measures: Mapping[str, Mapping[int, Interval]]) -> Chart:
    tip, series = "{}, period {}: {} ({} to {})", []
    for i, (name, by_period) in enumerate(measures.items()):
        points = [(t, mean.value, tip.format(name, t, *map(significant, mean))) for t, mean in by_period.items()]
        band = [(t, mean.low, mean.high) for t, mean in by_period.items() if math.isfinite(mean.low)]
        series.append(Series(name.replace("_", " "), points, index=i, band=band))
    ends = [end for line in series for _, *band in line.band for end in band] or [0.0]
    y_range = (0.95 * min(ends), 1.05 * max(ends)) if min(ends) > max(ends) / 2 else None  # changes of what never is 0
    return Chart(title, series, (), "period", unit, y_range, size=SMALL)
