"""``data-check.html``: one self-contained page of a site's data, with small pictures. It stays at the site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from fedtar_flare.curation.check import EXAMPLES, Check, spread
from fedtar_flare.files import PRIVATE, write_text
from fedtar_flare.reporting.format import NOTHING, duration, text, whole
from fedtar_flare.reporting.plots import ticks
from fedtar_flare.reporting.render import Tile, render

STAYS = "This page shows patients' images and stays at this site. Do not send it, publish it or put it into a ticket."
MOST_BARS = 24


def write_data_page(found: Check, path: Path) -> Path:
    """Write the page, for its owner alone; returns its path."""
    return write_text(path, data_page(found), PRIVATE)


def data_page(found: Check) -> str:
    """The page as well-formed HTML (it parses as XML too). Pictures are part of it; nothing is fetched."""
    notes = {reason: (len(texts), texts) for reason, texts in sorted(found.notes.items())}
    identifiers = {kind: (len(visits), [", ".join(visits[:12])]) for kind, visits in sorted(found.identifiers.items())}
    return render(
        "data.html",
        found=found,
        name=Path(found.source).name,
        stays=STAYS,
        tiles=_tiles(found),
        rejected={reason: (n, found.rejected[reason]) for reason, n in found.rejections().items()},
        notes=notes,
        identifiers=identifiers,
        most=EXAMPLES,
        unknown_ages=len(found.visits) - len(found.ages()),
        of_patients=_of_patients(found),
        of_reports=[histogram("Words per report", found.words(), "words", "reports", whole_numbers=True)],
        of_images=_of_images(found),
        time_steps=1,
    )


def _tiles(found: Check) -> list[Tile]:
    sexes, gaps, ages = found.sexes(), spread(found.gaps()), spread(found.ages())
    more = sum(n > 1 for n in found.visits_per_patient())
    rejected = whole(sum(found.rejections().values()))
    rate = f"{duration(found.seconds)}, {found.images / found.seconds:.1f}/s" if found.seconds > 0 else ""
    return [
        Tile("Patients", whole(len(found.patients)), f"{whole(more)} with several visits"),
        Tile(
            "Visits",
            whole(len(found.visits)),
            {"ct": "CT", "radiograph": "radiographs", "photograph": "photographs"}.get(found.modality, ""),
        ),
        Tile("Sex", f"{sexes['F']} F, {sexes['M']} M", f"{sexes['unknown']} unknown"),
        Tile("Age, median", _median(ages), _range(ages, "years")),
        Tile("Days between visits, median", _median(gaps), _range(gaps, "days")),
        Tile("Rejected studies", rejected, f"{len(found.rejected)} reason(s)" if found.rejected else ""),
        Tile("Images opened", whole(found.images), rate),
    ]


def _median(values: Mapping[str, float]) -> str:
    return f"{values['median']:.0f}" if values["n"] else NOTHING


def _range(values: Mapping[str, float], unit: str) -> str:
    return f"{values['min']:.0f} to {values['max']:.0f} {unit}" if values["n"] else ""


def _of_patients(found: Check) -> list[Markup]:
    days = [round(gap) for gap in found.gaps()]
    return [
        histogram("Visits per patient", found.visits_per_patient(), "visits", "patients", whole_numbers=True),
        histogram("Days from a visit to the next", days, "days", "pairs of visits", whole_numbers=True),
        histogram("Age at the visit", found.ages(), "years", "visits"),
    ]


def _of_images(found: Check) -> list[Markup]:
    if found.modality != "ct":
        sides = [min(shape[1:]) for shape in found.shapes]
        kind = found.modality or "radiograph"
        return [histogram(f"Shorter side of a {kind}", sides, "pixels", f"{kind}s")]
    return [
        histogram("Slices per CT", [s[0] for s in found.shapes], "slices", "CTs", whole_numbers=True),
        histogram("Distance between slices", [s[0] for s in found.spacings], "mm", "CTs"),
        histogram("Pixel size", [s[1] for s in found.spacings], "mm", "CTs"),
    ]


def histogram(
    title: str, values: Sequence[float], x_label: str, y_label: str, *, whole_numbers: bool = False
) -> Markup:
    """A histogram of finite values as an HTML ``figure``; ``whole_numbers`` gives each its own bar if they are few."""
    if not len(values):
        return Markup(f'<figure><figcaption>{text(title)}</figcaption><p class="none">No value.</p></figure>')
    edges = bin_edges(values, whole_numbers)
    counts = [0] * (len(edges) - 1)
    step = edges[1] - edges[0]
    for value in values:
        counts[min(len(counts) - 1, int((value - edges[0]) / step + 1e-9))] += 1
    width, height, left, right, bottom, top = 300, 190, 40, 284, 156, 10
    shown = ticks(0, max(counts), 4, whole=True)
    high = max(max(counts), shown[-1])

    def x(value: float) -> float:
        return round(left + (right - left) * (value - edges[0]) / (edges[-1] - edges[0]), 1)

    def y(count: float) -> float:
        return round(bottom - (bottom - top) * count / high, 1)

    grid = "".join(
        f'<path class="grid" d="M{left} {y(n)}H{right}"/>'
        f'<text x="{left - 6}" y="{y(n) + 3.8:g}" class="end">{n:g}</text>'
        for n in shown
    )
    bars = []
    for i, count in enumerate(counts):
        if count:
            span = f"{edges[i] + step / 2:g}" if whole_numbers and step == 1 else f"{edges[i]:g} to {edges[i + 1]:g}"
            x0, x1 = x(edges[i]) + 0.5, x(edges[i + 1]) - 0.5
            bars.append(
                f'<path class="bar" d="M{x0:g} {bottom}V{y(count)}H{max(x1, x0 + 0.5):g}V{bottom}Z">'
                f"<title>{text(f'{span} {x_label}: {count}')}</title></path>"
            )
    marks = ticks(edges[0], edges[-1], 5, whole=whole_numbers)
    words = "".join(f'<text x="{x(v)}" y="{bottom + 15}" class="mid">{v:g}</text>' for v in marks)
    return Markup(
        f'<figure class="hist"><figcaption>{text(title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{text(title)}">{grid}{"".join(bars)}<path class="axis" d="M{left} {bottom}H{right}"/>{words}'
        f'<text x="{(left + right) / 2:g}" y="{height - 4}" class="mid label">{text(x_label)}</text>'
        f'<text transform="translate(10 {(top + bottom) / 2:g}) rotate(-90)" class="mid label">{text(y_label)}</text>'
        "</svg></figure>"
    )


def bin_edges(values: Sequence[float], whole_numbers: bool) -> list[float]:
    """Evenly spaced round numbers around all values, at most 24 bars; whole numbers get bars around them."""
    low, high = float(min(values)), float(max(values))
    if low == high:  # one bar in the middle of some room
        room = 2.0 if whole_numbers else max(abs(low) * 0.1, 0.1)
        low, high = low - room, high + room
    if whole_numbers and high - low < MOST_BARS:
        return [low - 0.5 + i for i in range(int(high - low) + 2)]
    rough = max((high - low) / (MOST_BARS - 4), 1e-9 * max(abs(high), 1.0))
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    step = max(1.0, step) if whole_numbers else step
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.floor(high / step + 1e-9) + 1)
    return [round(i * step, 10) for i in range(first, last + 1)]
