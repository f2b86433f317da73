"""Pages from this package's templates, and pictures on them. Values are escaped, but for charts and rendered parts."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedtar_flare.core.text import plain
from fedtar_flare.reporting import format as shown
from fedtar_flare.version import __version__

_RAMPS = {"light": ("#c2650a", "#b8327c", "#3a37a8"), "dark": ("#ffd27a", "#f58bb0", "#8b8ff8")}

_THEMES = {
    "light": "--bg:#fff;--panel:#f5f7fa;--ink:#18212c;--muted:#566273;--line:#d3dae3;--grid:#e3e8ee;"
    "--link:#0b62a3;--good:#11734b;--warn:#8a5300;--bad:#b3261e;--tint:0 114 178;--site-0:#0072b2;"
    "--site-1:#d55e00;--site-2:#00855f;--site-3:#b0508a;--site-4:#a87500;--site-5:#3590c9;"
    "--site-6:#6b7280;",
    "dark": "--bg:#11161d;--panel:#19202a;--ink:#e8edf3;--muted:#9fabba;--line:#364152;--grid:#28313d;"
    "--link:#79bdf0;--good:#5bd3a0;--warn:#f2b95f;--bad:#ff8f85;--tint:86 180 233;--site-0:#56b4e9;"
    "--site-1:#ff8b4a;--site-2:#2fc796;--site-3:#e6a0cb;--site-4:#f0bd3f;--site-5:#a9d8f7;"
    "--site-6:#b4bcc8;",
}


def render(template: str, **values: Any) -> Markup:
    """Fill a template of this package."""
    return Markup(_ENVIRONMENT.get_template(template).render(**values))


def render_markdown(template: str, **values: Any) -> str:
    """Fill a template of Markdown; values are escaped, also in table cells."""
    return _MARKDOWN.get_template(template).render(**values).rstrip() + "\n"


def theme(name: str, steps: int) -> Markup:
    """The CSS variables of the theme ``light`` or ``dark``, with ``steps`` colours from early to late."""
    anchors = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in _RAMPS[name]])
    mixed = np.transpose([np.interp(np.linspace(0, 2, steps), range(3), channel) for channel in anchors.T])
    ramp = (f"--step-{i}:#{bytes(colour).hex()};" for i, colour in enumerate(mixed.round().astype(np.uint8)))
    return Markup(_THEMES[name] + "".join(ramp))


def png(pixels: np.ndarray, largest: int) -> bytes:
    """Encode a picture, uint8 (H, W) or (H, W, 3), shrunk to at most ``largest`` pixels of a side."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((largest, largest))
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def png_address(pixels: np.ndarray, largest: int) -> str:
    """Encode a picture as :func:`png` does, as the address of an image element."""
    return "data:image/png;base64," + base64.b64encode(png(pixels, largest)).decode("ascii")


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=lambda value: value if isinstance(value, Markup) else plain(value),  # no control characters from outside
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=False,
)
_FILTERS = (shown.duration, shown.number, shown.significant, shown.size, shown.total, shown.visits, shown.whole)
_ENVIRONMENT.filters |= {function.__name__: function for function in _FILTERS}
_ENVIRONMENT.globals |= {"heading": shown.heading, "score": shown.score, "times": shown.times, "theme": theme}
_ENVIRONMENT.globals |= {"version": __version__, "time_steps": 1}  # a page over time has more steps
_MARKDOWN = _ENVIRONMENT.overlay(
    finalize=lambda v: v if isinstance(v, Markup) else Markup(re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", plain(v)))
)
