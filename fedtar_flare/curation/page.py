"""``data-check.html``: one self-contained page of a site's data, with small pictures. It stays at the site."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from fedtar_flare.curation.check import EXAMPLES, Check, spread
from fedtar_flare.reporting.format import NOTHING, duration, text, whole
from fedtar_flare.reporting.plots import ticks
from fedtar_flare.reporting.sections import section
from fedtar_flare.reporting.style import style_sheet
from fedtar_flare.version import __version__

STAYS = "This page shows patients' images and stays at this site. Do not send it, publish it or put it into a ticket."
MOST_BARS = 24
_RULES = """
.stays{border:2px solid var(--bad);border-radius:8px;padding:8px 14px;margin:0 0 16px;font-weight:600;max-width:none}
.hist path.bar{fill:var(--site-0)}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,250px),1fr));gap:14px;margin-top:12px}
.pictures figcaption{font-weight:500;font-size:13px;color:var(--muted)}
.pictures .strip{display:flex;gap:3px}
.pictures img{flex:1 1 0;min-width:0;max-width:160px;height:auto;display:block;border-radius:4px;background:#000}
table.reasons td{text-align:left;white-space:normal;overflow-wrap:anywhere;vertical-align:top}
table.reasons td.count{text-align:right}
table.reasons th.such{text-align:left}
table.reasons td.count,table.reasons th{vertical-align:top}
"""


def write_data_page(found: Check, path: Path) -> Path:
    """Write the page; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(data_page(found), encoding="utf-8")
    temporary.chmod(0o600)  # pictures of patients: for this user alone
    os.replace(temporary, path)  # noqa: PTH105
    return path


def data_page(found: Check) -> str:
    """The page as well-formed HTML (it parses as XML too). Pictures are part of it; nothing is fetched."""
    parts = [_rejected(found), _cohort(found), _texts(found), _images(found), _pictures(found)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:"/>
<title>Data check</title>
<style>
{style_sheet(1)}{_RULES}</style>
</head>
<body>
<header class="top">
<p class="stays" role="note">{text(STAYS)}</p>
<div class="kind">Data check</div>
<h1>{text(Path(found.source).name)} {_pill(found)}</h1>
<div class="sub">{text(found.source)}</div>
<dl class="tiles">{_tiles(found)}</dl>
</header>
<main>
{chr(10).join(part for part in parts if part)}
<footer>Written by fedtar_flare {text(__version__)}. Every image was opened by the reader that training uses.</footer>
</main>
</body>
</html>
"""


def _pill(found: Check) -> str:
    if not found.rejected:
        return '<span class="pill completed">everything can be used</span>'
    count = sum(found.rejections().values())
    return f'<span class="pill {"aborted" if found.patients else "failed"}">{whole(count)} rejected</span>'


def _tiles(found: Check) -> str:
    sexes, gaps, ages = found.sexes(), spread(found.gaps()), spread(found.ages())
    more = sum(n > 1 for n in found.visits_per_patient())
    tiles = [
        ("Patients", whole(len(found.patients)), f"{whole(more)} with several visits"),
        ("Visits", whole(len(found.visits)), {"ct": "CT", "radiograph": "radiographs"}.get(found.modality, "")),
        ("Sex", f"{sexes['F']} F, {sexes['M']} M", f"{sexes['unknown']} unknown"),
        ("Age, median", f"{ages['median']:.0f}" if ages["n"] else NOTHING, _range(ages, "years")),
        ("Days between visits, median", f"{gaps['median']:.0f}" if gaps["n"] else NOTHING, _range(gaps, "days")),
        (
            "Rejected studies",
            whole(sum(found.rejections().values())),
            f"{len(found.rejected)} reason(s)" if found.rejected else "",
        ),
        (
            "Images opened",
            whole(found.images),
            f"{duration(found.seconds)}, {found.images / found.seconds:.1f}/s" if found.seconds > 0 else "",
        ),
    ]
    return "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(about)}</small></dd></div>"
        for name, value, about in tiles
    )


def _range(values: dict[str, float], unit: str) -> str:
    return f"{values['min']:.0f} to {values['max']:.0f} {unit}" if values["n"] else ""


def _rejected(found: Check) -> str:
    lead = "Studies that training leaves out. Row numbers are those that a spreadsheet shows."
    if not found.rejected:
        table = '<p class="none">None.</p>'
    else:
        table = _reasons([(reason, n, found.rejected[reason]) for reason, n in found.rejections().items()])
    if found.excluded:
        table += (
            f'<p class="lead">{whole(found.excluded)} visit(s) of patients on the exclusion list were not opened.</p>'
        )
    return section("rejected", "Rejected", lead, table)


def _reasons(rows: Sequence[tuple[str, int, Sequence[str]]]) -> str:
    body = "".join(
        f'<tr><th scope="row">{text(reason)}</th><td class="count">{whole(n)}</td>'
        f"<td>{'<br/>'.join(text(one) for one in texts[:EXAMPLES])}"
        f"{f'<br/>and {whole(n - EXAMPLES)} more' if n > EXAMPLES else ''}</td></tr>"
        for reason, n, texts in rows
    )
    return (
        '<div class="scroll"><table class="reasons"><thead><tr><th>reason</th><th>studies</th>'
        f'<th class="such">such as</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cohort(found: Check) -> str:
    days = [round(gap) for gap in found.gaps()]
    charts = [
        histogram("Visits per patient", found.visits_per_patient(), "visits", "patients", whole_numbers=True),
        histogram("Days from a visit to the next", days, "days", "pairs of visits", whole_numbers=True),
        histogram("Age at the visit", found.ages(), "years", "visits"),
    ]
    unknown = len(found.visits) - len(found.ages())
    lead = f"Patients with at least one study that can be used. The age is unknown at {whole(unknown)} visit(s)."
    return section("cohort", "Patients and visits", lead, _charts(charts))


def _texts(found: Check) -> str:
    kinds = [(kind, len(visits), [", ".join(visits[:12])]) for kind, visits in sorted(found.identifiers.items())]
    content = _charts([histogram("Words per report", found.words(), "words", "reports", whole_numbers=True)])
    if kinds:
        content += f"<h3>Reports that may hold an identifier</h3>{_reasons(kinds)}"
    return section("reports", "Reports", "Words are what blanks divide.", content)


def _images(found: Check) -> str:
    charts = []
    if found.modality == "ct":
        charts.append(histogram("Slices per CT", [s[0] for s in found.shapes], "slices", "CTs", whole_numbers=True))
        charts.append(histogram("Distance between slices", [s[0] for s in found.spacings], "mm", "CTs"))
        charts.append(histogram("Pixel size", [s[1] for s in found.spacings], "mm", "CTs"))
    else:
        charts.append(
            histogram("Shorter side of a radiograph", [min(s[1:]) for s in found.shapes], "pixels", "radiographs")
        )
    content = _charts(charts)
    if found.notes:
        rows = [(reason, len(texts), texts) for reason, texts in sorted(found.notes.items())]
        content += f"<h3>Met and lived with</h3>{_reasons(rows)}"
    return section("images", "Images", "Sizes as stored, before the model's own size is made of them.", content)


def _pictures(found: Check) -> str:
    if not found.thumbnails:
        return ""
    figures = "".join(
        f"<figure><div class='strip'>{''.join(_image(p, one.visit_id) for p in one.pictures)}</div>"
        f"<figcaption>{text(one.visit_id)}, {text(one.day)}</figcaption></figure>"
        for one in found.thumbnails
    )
    kind = (
        "Three slices over the lungs from feet to head, lung window; the patient's right is on the left."
        if found.modality == "ct"
        else "The whole radiograph, in small."
    )
    lead = f"{whole(len(found.thumbnails))} studies, spread evenly over time. {kind}"
    return section("pictures", "Pictures", lead, f'<div class="pictures">{figures}</div>')


def _image(address: str, name: str) -> str:
    return f'<img src="{text(address)}" alt="{text(name)}"/>'


def _charts(charts: Sequence[str]) -> str:
    return f'<div class="charts small">{"".join(charts)}</div>'


def histogram(title: str, values: Sequence[float], x_label: str, y_label: str, *, whole_numbers: bool = False) -> str:
    """Bars of how many values lie where, as an HTML ``figure``.

    Args:
        title, x_label, y_label: with units.
        values: finite.
        whole_numbers: a bar for each whole number, where there are few enough.
    """
    if not len(values):
        return f'<figure><figcaption>{text(title)}</figcaption><p class="none">No value.</p></figure>'
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
    return (
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
