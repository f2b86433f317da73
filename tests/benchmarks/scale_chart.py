"""The chart of ``test_bench_scale.py``: two panels over one logarithmic axis of sites, as one SVG file."""

from __future__ import annotations

import math
from html import escape

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 720, 220, 74, 20, 66, 44
X_TICKS = (5, 10, 20, 50, 100, 200, 500)
STYLE = """
.bg{fill:#fff}text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;fill:#566273}
.title{font-size:16px;font-weight:600;fill:#18212c}.name{fill:#18212c}.head{font-weight:600;fill:#18212c}
.grid{stroke:#e3e8ee}.axis{stroke:#566273}.line{fill:none;stroke-width:2}.limit{stroke-dasharray:5 4;stroke-width:1.3}
.a{stroke:#0072b2;fill:#0072b2}.b{stroke:#d55e00;fill:#d55e00}.c{stroke:#00855f;fill:#00855f}
.line,.limit{fill:none}
.end{text-anchor:end}.mid{text-anchor:middle}
@media(prefers-color-scheme:dark){.bg{fill:#11161d}text{fill:#9fabba}.title,.name,.head{fill:#e8edf3}
.grid{stroke:#28313d}.axis{stroke:#9fabba}.a{stroke:#56b4e9;fill:#56b4e9}.b{stroke:#ff8b4a;fill:#ff8b4a}
.c{stroke:#2fc796;fill:#2fc796}.line,.limit{fill:none}}"""


def chart(title: str, series: dict[str, list[tuple[int, float, float | None]]]) -> str:
    """Seconds per step above, peak memory of the server below.

    Args:
        title: of the chart.
        series: name to (sites, seconds per step, MB or None where the memory is not shown); at most three.

    Returns:
        an SVG document that follows a light or a dark page.
    """
    height = TOP + 2 * PANEL + GAP + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style><rect class="bg" width="{WIDTH}" height="{height}"/>'
        f'<text class="title" x="16" y="26">{escape(title)}</text>'
    ]
    x = 16
    for kind, name in zip("abc", series, strict=False):
        parts.append(
            f'<path class="line {kind}" d="M{x} 44h28"/>{_mark(kind, x + 14, 44)}'
            f'<text class="name" x="{x + 36}" y="48">{escape(name)}</text>'
        )
        x += round(52 + 6.5 * len(name))
    parts.append(
        f'<path class="axis limit" d="M{x} 44h28"/><text class="name" x="{x + 36}" y="48">smallest run + 20 %</text>'
    )
    seconds = {name: [(n, s) for n, s, _ in rows] for name, rows in series.items()}
    memory = {name: [(n, m) for n, _, m in rows if m is not None] for name, rows in series.items()}
    parts.append(_panel("seconds per step (log scale)", seconds, TOP + 18, True))
    parts.append(_panel("peak memory of the server process, MB", memory, TOP + 18 + PANEL + GAP, False))
    parts.append(f'<text class="mid" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}">sites (log scale)</text></svg>')
    return "".join(parts) + "\n"


def _panel(head: str, series: dict[str, list[tuple[int, float]]], top: float, logarithmic: bool) -> str:
    values = [value for rows in series.values() for _, value in rows]
    bottom = top + PANEL - 30
    if logarithmic:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        ticks = [m * 10.0**k for k in range(low, high + 1) for m in (1, 3) if m * 10.0**k <= 10.0**high]
    else:
        step = next(s for s in (50, 100, 200, 250, 500, 1000, 2000) if 1.25 * max(values) / s <= 6)
        low, high = 0, math.ceil(1.25 * max(values) / step) * step
        ticks = [float(i) for i in range(0, high + 1, step)]

    def px(n: float) -> float:
        share = math.log(n / X_TICKS[0]) / math.log(X_TICKS[-1] / X_TICKS[0])
        return round(LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24), 1)

    def py(value: float) -> float:
        share = ((math.log10(value) if logarithmic else value) - low) / (high - low)
        return round(bottom - share * (bottom - top), 1)

    out = [f'<text class="head" x="{LEFT}" y="{top - 10}">{escape(head)}</text>']
    for tick in ticks:
        out.append(f'<path class="grid" d="M{LEFT} {py(tick)}H{WIDTH - RIGHT}"/>')
        out.append(f'<text class="end" x="{LEFT - 8}" y="{py(tick) + 4.5}">{tick:g}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>')
    for n in X_TICKS:
        out.append(
            f'<path class="axis" d="M{px(n)} {bottom}v4"/><text class="mid" x="{px(n)}" y="{bottom + 18}">{n}</text>'
        )
    for kind, (name, rows) in zip("abc", series.items(), strict=False):
        points = [(px(n), py(value)) for n, value in rows]
        if not points:
            continue
        out.append(f'<path class="line {kind}" d="M{"L".join(f"{x} {y}" for x, y in points)}"/>')
        if not logarithmic:
            limit = py(1.2 * rows[0][1])
            out.append(f'<path class="limit {kind}" d="M{points[0][0]} {limit}H{points[-1][0]}"/>')
        for (n, value), (x, y) in zip(rows, points, strict=True):
            word = f"{name}: {n} sites, {value:.3g}" + (" s per step" if logarithmic else " MB")
            out.append(f"<g>{_mark(kind, x, y)}<title>{escape(word)}</title></g>")
    return "".join(out)


def _mark(kind: str, x: float, y: float) -> str:
    """A shape for each, so that they can be told without colour."""
    if kind == "a":
        return f'<circle class="a" cx="{x}" cy="{y}" r="4.2"/>'
    if kind == "c":
        return f'<path class="c" d="M{x} {y - 5}l5 8.6h-10Z"/>'
    return f'<rect class="b" x="{x - 4}" y="{y - 4}" width="8" height="8"/>'
