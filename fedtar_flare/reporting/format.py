"""Numbers as text for people: never a NaN."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import wilson

__all__ = ["NOTHING", "number", "significant"]

NOTHING = "–"  # stands for an unknown value
FEW = 20  # a score of fewer reports is given without decimals


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with fixed decimals.

    Parameters
    ----------
    value, digits : float or None, int

    Returns
    -------
    str
        :data:`NOTHING` for a value that is unknown or not finite.
    """
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def p_value(p: float | None) -> str:
    """A p value; one that would be shown as 0 is ``< 0.001``."""
    return "< 0.001" if p is not None and p < 5e-4 else number(p)


def score(name: str, value: float | None, n: float = FEW) -> str:
    """A raw score on the scale that people read; of few reports ``n`` with fewer decimals, and a share's interval."""
    if n < FEW and SCORES[name].unit == "% of reports":
        return share(value, n)
    return number(shown(name, value), decimals(name, n))


def decimals(name: str, n: float) -> int:
    """Decimals of a score of ``n`` reports: of fewer than 20 none, or one where the scale is not 100."""
    return SCORES[name].decimals if n >= FEW else int(SCORES[name].scale != 100)


def share(value: float | None, n: float = FEW) -> str:
    """A share of ``n`` cases in percent; of fewer than 20 with its 95 % interval after Wilson: ``67 (30 to 90)``."""
    text = number(None if value is None else 100 * value, 0)
    if value is None or not 0 < n < FEW:
        return text
    low, high = (100 * end for end in wilson(round(value * n), int(n)))
    return f"{text} ({low:.0f} to {high:.0f})"


def shown(name: str, value: float | None) -> float | None:
    """A raw score on the scale that people read."""
    return None if value is None else value * SCORES[name].scale


def heading(name: str) -> str:
    """A score's label, with an arrow that shows which way is better, and its unit: ``token loss ↓, nats per token``."""
    entry = SCORES[name]
    arrow = {True: " ↑", False: " ↓", None: " → 1"}[entry.higher_is_better]
    return f"{entry.label}{arrow}, {entry.unit.replace('x 100', '× 100')}"


def significant(value: float | None) -> str:
    """Format a number of any size with three significant digits.

    Parameters
    ----------
    value : float or None

    Returns
    -------
    str
    """
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.3g}"


def whole(value: int) -> str:
    """A count with thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def size(count: float) -> str:
    """A number of bytes in decimal units: ``3.7 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.3g} {unit}"


def duration(seconds: float | None) -> str:
    """A duration: ``4 min 12 s``."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def times(large: float, small: float) -> str:
    """A ratio, ``138 ×``; a dash where it is undefined."""
    if large <= 0 or small <= 0:
        return NOTHING
    ratio = large / small
    return f"{ratio:.0f} ×" if ratio >= 9.95 else f"{ratio:.1f} ×"


def visits(count: int, min_cell: int) -> str:
    """A number of visits or reports; one under ``min_cell`` is not given exactly."""
    return f"< {min_cell}" if 0 < count < min_cell else whole(count)


def total(counts: Sequence[int], min_cell: int) -> str:
    """A sum of numbers of visits or reports from which a number under ``min_cell`` cannot be worked out."""
    known = sum(n for n in counts if n >= min_cell)
    return f"over {whole(known)}" if any(0 < n < min_cell for n in counts) else whole(sum(counts))


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as pairs (dotted name, value), in order; long values are cut."""
    rows = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += flat(value, f"{name}.")
        elif value is not None:
            shown_value = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.append((name, shown_value if len(shown_value) <= 160 else shown_value[:159] + "…"))
    return rows
