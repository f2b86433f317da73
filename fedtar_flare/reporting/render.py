"""Pages from this package's templates. Every value is escaped, except charts and parts already rendered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedtar_flare.reporting.format import duration, number, plain, score, significant, size, times, total, visits, whole
from fedtar_flare.version import __version__

_RAMPS = {"light": ("#c2650a", "#b8327c", "#3a37a8"), "dark": ("#ffd27a", "#f58bb0", "#8b8ff8")}


@dataclass(frozen=True)
class Tile:
    """One number at the head of a page."""

    name: str
    value: str
    about: str = ""


def render(template: str, **values: Any) -> Markup:
    """Fill one template."""
    return Markup(_ENVIRONMENT.get_template(template).render(**values))


def render_markdown(template: str, **values: Any) -> str:
    """Fill one template of Markdown, where values are escaped for Markdown, table cells included."""
    return _MARKDOWN.get_template(template).render(**values).rstrip() + "\n"


def step_colours(theme: str, count: int) -> Markup:
    """CSS variables ``--step-0`` to ``--step-<count - 1>``, early to late; ``theme`` is ``light`` or ``dark``."""
    anchors = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in _RAMPS[theme]]
    names = []
    for index in range(count):
        place = 2 * index / max(1, count - 1)
        low = min(1, int(place))
        mixed = [a + (b - a) * (place - low) for a, b in zip(anchors[low], anchors[low + 1], strict=True)]
        names.append(f"--step-{index}:#{''.join(f'{round(part):02x}' for part in mixed)};")
    return Markup("".join(names))


def _printable(value: Any) -> Any:
    """Strip control characters from outside text before it is escaped."""
    return value if isinstance(value, Markup) else plain(value)


def _markdown(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", plain(value)))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_printable,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=False,
)
_ENVIRONMENT.filters |= {
    function.__name__: function for function in (duration, number, significant, size, total, visits, whole)
}
_ENVIRONMENT.globals |= {"version": __version__, "score": score, "times": times, "step_colours": step_colours}
_MARKDOWN = _ENVIRONMENT.overlay(finalize=_markdown)
