"""``data-check.html``: one self-contained page of a site's data, with small pictures. It stays at the site."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from markupsafe import Markup

from fedtar_flare.curation.check import EXAMPLES, SHARED_HELP, Check
from fedtar_flare.metrics.labeler import report_labels, rules_for
from fedtar_flare.reporting.format import NOTHING, duration, whole
from fedtar_flare.reporting.plots import SITE_COLOURS, Bar, Chart, Series, ticks
from fedtar_flare.reporting.render import render

STAYS = "This page shows patients' images and stays at this site. Do not send it, publish it or put it into a ticket."
MOST_BARS = 12


def data_page(check: Check) -> str:
    """Render the page of a check: one file that needs nothing else."""
    days = [round(gap) for gap in check.gaps]
    of_images = [
        histogram("CTs by number of slices", [s[0] for s in check.shapes], "slices", whole_numbers=True),
        histogram("CTs by distance between slices", [s[0] for s in check.spacings], "mm"),
        histogram("CTs by pixel size", [s[1] for s in check.spacings], "mm"),
    ]
    if check.modality != "ct":
        sides = [min(shape[1:]) for shape in check.shapes]
        of_images = [histogram(f"{check.modality.capitalize() or 'Radiograph'}s by shorter side", sides, "pixels")]
    return render(
        "data.html",
        check=check,
        name=Path(check.source).name,
        stays=STAYS,
        tiles=_tiles(check),
        rejected={reason: (n, check.rejected[reason]) for reason, n in check.rejections.items()},
        notes={reason: (len(texts), texts) for reason, texts in sorted(check.notes.items())},
        identifiers={kind: (len(ids), [", ".join(ids[:12])]) for kind, ids in sorted(check.identifiers.items())},
        most=EXAMPLES,
        shared=check.shared_texts,
        shared_help=SHARED_HELP,
        unknown_ages=len(check.visits) - len(check.ages),
        of_patients=[
            histogram("Patients by number of visits", check.visits_per_patient, "visits", whole_numbers=True),
            histogram("Pairs of visits by time between them", days, "days", whole_numbers=True),
            histogram("Visits by age", check.ages, "years"),
        ],
        of_reports=[histogram("Reports by length", check.words, "words", whole_numbers=True), *_by_year(check)],
        of_images=of_images,
    )


def _tiles(check: Check) -> list[tuple[str, str, str]]:
    """Numbers at the head of the page: what it is, the number with its unit, and a remark."""
    kinds = {"ct": "CT", "radiograph": "radiographs", "photograph": "photographs"}
    more = sum(n > 1 for n in check.visits_per_patient)
    tiles = [
        ("Patients", whole(len(check.patients)), f"{whole(more)} with several visits"),
        ("Visits", whole(len(check.visits)), kinds.get(check.modality, "")),
        ("Sex", f"{check.sexes['F']} F, {check.sexes['M']} M", f"{check.sexes['unknown']} unknown"),
    ]
    for title, values, unit in (("Age", check.ages, "years"), ("Days between visits", check.gaps, "days")):
        middle, extent = NOTHING, ""
        if values:
            middle, extent = f"{median(values):.0f}", f"{min(values):.0f} to {max(values):.0f} {unit}"
        tiles.append((f"{title}, median", middle, extent))
    rate = f"{duration(check.seconds)}, {check.images / check.seconds:.1f}/s" if check.seconds > 0 else ""
    rejected = whole(sum(check.rejections.values()))
    tiles.append(("Rejected studies", rejected, f"{len(check.rejected)} reason(s)" if check.rejected else ""))
    return [*tiles, ("Images opened", whole(check.images), rate)]


def _by_year(check: Check) -> list[Markup]:
    """Shares of each year's reports that state a finding, the commonest findings (FedTAR, Fig. 1); of two years on."""
    years = sorted({visit.acquired.year for visit in check.visits})
    if len(years) < 2 or check.modality == "photograph":
        return []
    labels, stated = report_labels(rules_for(check.visits[0].modality)), Counter[tuple[str, int]]()
    for visit in check.visits:
        stated.update((name, visit.acquired.year) for name in labels(visit.report)[0])
    reports, all_years = Counter(visit.acquired.year for visit in check.visits), Counter[str]()
    for (name, _), n in stated.items():
        all_years[name] += n
    lines = []
    for i, name in enumerate(sorted(all_years, key=lambda name: (-all_years[name], name))[:SITE_COLOURS]):
        shares = [(year, stated[name, year], reports[year]) for year in years]
        points = [(float(year), n / of, f"{name}, {year}: {n} of {of} reports") for year, n, of in shares]
        lines.append(Series(name, points, index=i))
    return [Chart("Findings that reports state, by year", lines, x_label="year", y_label="share of reports").figure()]


def histogram(title: str, values: Sequence[float], unit: str, *, whole_numbers: bool = False) -> Markup:
    """A histogram as an HTML ``figure``; a few whole numbers get a bar each."""
    if not len(values):
        return Chart(title).figure()
    edges = bin_edges(values, whole_numbers)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    apart = len(edges) == 2 or (whole_numbers and edges[1] - edges[0] == 1)
    names = [f"{low + 0.5:g}" if apart else f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    bars = [Bar(name, float(n), whole(int(n))) for name, n in zip(names, counts, strict=True)]
    return Chart(f"{title} ({unit})", bars=bars).figure()


def bin_edges(values: Sequence[float], whole_numbers: bool) -> list[float]:
    """About :data:`MOST_BARS` evenly spaced round numbers around all values; whole numbers lie within bars."""
    low, high = float(min(values)), float(max(values))
    if low == high or (whole_numbers and high - low < MOST_BARS):
        return [low - 0.5 + i for i in range(int(high - low) + 2)]
    inner = ticks(low, high, MOST_BARS - 2, whole=whole_numbers)
    ends = [2 * inner[0] - inner[1]] * (low < inner[0]), [2 * inner[-1] - inner[-2]] * (inner[-1] < high)
    return [round(edge, 10) for edge in (*ends[0], *inner, *ends[1])]
