"""How numbers and names are written for people: never a NaN, and no text from outside goes unescaped."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

from fedtar_flare.metrics.registry import SCORES

NOTHING = "–"


def plain(value: Any) -> str:
    """One printable line of any value: control characters and lone surrogates become a replacement sign."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in str(value))


def text(value: Any) -> str:
    """The same, escaped for HTML, attributes included."""
    return html.escape(plain(value), quote=True)


def number(value: float | None, digits: int = 3) -> str:
    """Fixed decimals; a dash for what is not known."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def score(name: str, value: float | None) -> str:
    """A score as it is shown (see :mod:`fedtar_flare.metrics.registry`)."""
    return number(shown(name, value), SCORES[name].decimals)


def shown(name: str, value: float | None) -> float | None:
    """A raw score on the scale in which it is shown."""
    return None if value is None else SCORES[name].scale * value


def significant(value: float | None) -> str:
    """Three significant digits, for norms of any size."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.3g}"


def whole(value: int) -> str:
    """A count with thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def size(count: float) -> str:
    """Bytes in decimal units: 3.7 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.3g} {unit}"


def duration(seconds: float | None) -> str:
    """4 min 12 s."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def times(large: float, small: float) -> str:
    """How many times larger, ``138 ×``; a dash where that cannot be said."""
    if large <= 0 or small <= 0:
        return NOTHING
    ratio = large / small
    return f"{ratio:.0f} ×" if ratio >= 9.95 else f"{ratio:.1f} ×"


def visits(count: int, min_cell: int) -> str:
    """A number of visits or reports; a small one is not told exactly where cells have a least size."""
    return f"< {min_cell}" if 0 < count < min_cell else whole(count)


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value) in their order; long values are cut."""
    rows = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += flat(value, f"{name}.")
        elif value is not None:
            shown_value = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.append((name, shown_value if len(shown_value) <= 160 else shown_value[:159] + "…"))
    return rows
