"""Results of a suite that nobody ran, for tests of its page: written where the command would write them."""

import json
from pathlib import Path
from xml.etree import ElementTree

from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.results import RESULTS, result_file, rows_file


def keep(folder: Path, one: Experiment, result: dict, rows: list[dict]) -> None:
    """Write an experiment's result and rows where a run writes them."""
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    rows_file(folder, one).write_text("".join(json.dumps(row) + "\n" for row in rows))
    result_file(folder, one).write_text(json.dumps(result))


def parsed(path: Path) -> tuple[str, ElementTree.Element]:
    """A page's text, and its tree, which is well-formed."""
    text = path.read_text()
    return text, ElementTree.fromstring(text.replace("<!DOCTYPE html>", "").replace("&nbsp;", " "))
