"""How numbers and names are shown to people: never a NaN, and no unescaped text from outside."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedtar_flare.metrics.registry import SCORES

NOTHING = "–"


def plain(value: Any) -> str:
    """One printable line of any value: control characters and lone surrogates become a replacement sign."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in str(value))


def text(value: Any) -> str:
    """One printable line of any value, escaped for HTML text and attributes."""
    return html.escape(plain(value), quote=True)


def number(value: float | None, digits: int = 3) -> str:
    """Fixed decimals; a dash for an unknown value."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def score(name: str, value: float | None) -> str:
    """A raw score with the registry's scale and decimals."""
    return number(shown(name, value), SCORES[name].decimals)


def shown(name: str, value: float | None) -> float | None:
    """A raw score on the scale that is shown."""
    return None if value is None else value * SCORES[name].scale


def scaling(names: Sequence[str]) -> str:
    """Which of the scores are shown times 100, as a sentence; empty without any."""
    raw = [SCORES[name].label for name in names if SCORES[name].scale == 1]
    if len(raw) == len(names):
        return ""
    return f"All but {' and '.join(raw)} are × 100." if raw else "They are × 100."


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
    """How many times larger, ``138 ×``; a dash where that is undefined."""
    if large <= 0 or small <= 0:
        return NOTHING
    ratio = large / small
    return f"{ratio:.0f} ×" if ratio >= 9.95 else f"{ratio:.1f} ×"


def visits(count: int, min_cell: int) -> str:
    """A number of visits or reports; not given exactly if it is under ``min_cell``."""
    return f"< {min_cell}" if 0 < count < min_cell else whole(count)


def total(counts: Sequence[int], min_cell: int) -> str:
    """A sum of numbers of visits or reports that does not give away a small one among them."""
    known = sum(n for n in counts if n >= min_cell)
    return f"over {whole(known)}" if any(0 < n < min_cell for n in counts) else whole(sum(counts))


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value), in order; long values are cut."""
    rows = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += flat(value, f"{name}.")
        elif value is not None:
            shown_value = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.append((name, shown_value if len(shown_value) <= 160 else shown_value[:159] + "…"))
    return rows
