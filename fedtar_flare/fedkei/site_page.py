"""A site's own page: its modules, the mixture that each began from, and how each was learnt. It stays at the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedtar_flare.files import PRIVATE, write_text
from fedtar_flare.reporting.format import NOTHING, number
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.section import table
from fedtar_flare.site.state import SiteState

MODULE, SCORES, PAGE = "module-", "scores-", "modules.html"


def module_name(task: int) -> str:
    """Name of a task's module in the site's state of the run."""
    return f"{MODULE}{task:04d}"


def scores_name(task: int) -> str:
    """Name, in the same place, of the scores of single test images in a task, (E + 1, n)."""
    return f"{SCORES}{task:04d}"


def write_modules_page(state: SiteState, site: str) -> Path:
    """Write ``modules.html`` into the site's state of a run: a line for each module, with alpha; returns its path."""
    rows = []
    for name in state.names(MODULE):
        _, about = state.read(name)
        alpha = about["alpha"]
        rows.append(
            (
                str(int(name.removeprefix(MODULE))),
                str(about["task"]),
                _curve(about["auc"]),
                _curve(about["rand_auc"]),
                *map(_weights, (alpha.get(kind) for kind in ("adapter", "head"))),
                "yes" if about["fell_back"] else "",
            )
        )
    head = ("task", "disease", "AUC by epoch", "Rand", "alpha of adapters", "alpha of heads", "w0 instead")
    content = table(head, rows, left={1, 2, 3, 4, 5})
    page = render("modules_page.html", site=site, content=content, time_steps=1)
    return write_text(state.folder / PAGE, page, PRIVATE)


def _curve(values: Any) -> str:
    return " ".join(number(value) for value in values) if values else NOTHING


def _weights(values: Any) -> str:
    return ", ".join(f"{value:.3f}" for value in values) if values else NOTHING
