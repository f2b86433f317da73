"""A site's own page: its modules, the mixture that each began from, and how each was learnt. It stays at the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedtar_flare.files import PRIVATE, write_text
from fedtar_flare.methods.fedkei.section import RAND, READINGS, readings_of
from fedtar_flare.reporting.format import NOTHING
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.section import table
from fedtar_flare.site.state import SiteState

MODULE, PAGE = "module-", "modules.html"


def module_name(task: int) -> str:
    """Name of a task's module in the site's state of the run."""
    return f"{MODULE}{task:04d}"


def write_modules_page(state: SiteState, site: str) -> Path:
    """Write ``modules.html`` into the site's state of a run: a line for each module, with alpha; returns its path."""
    rows = []
    modules = {name: state.read(name)[1] for name in state.names(MODULE)}
    fell_back = any(about["fell_back"] for about in modules.values())
    for name, about in modules.items():
        alpha = about["alpha"]
        rows.append(
            (
                str(int(name.removeprefix(MODULE))),
                str(about["task"]),
                *readings_of(about["auc"]),
                *readings_of(about["rand_auc"] or ()),
                *map(_weights, (alpha.get(kind) for kind in ("adapter", "head"))),
                *(["yes" if about["fell_back"] else ""] if fell_back else ()),
            )
        )
    head = (
        "task",
        "disease",
        *READINGS,
        *RAND,
        "alpha of adapters",
        "alpha of heads",
        *(["fell back"] if fell_back else ()),
    )
    page = render("modules_page.html", site=site, content=table(head, rows, left={1, 8, 9}), time_steps=1)
    return write_text(state.folder / PAGE, page, PRIVATE)


def _weights(values: Any) -> str:
    return ", ".join(f"{value:.3f}" for value in values) if values else NOTHING
