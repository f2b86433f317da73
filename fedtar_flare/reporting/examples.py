"""Generated reports beside the reference reports, with what is right and wrong marked.

Such a page holds patients' reports: it is written into the site's own state and stays there. Only examples of a
synthetic cohort may be shown elsewhere, since nobody is behind them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedtar_flare.errors import FedTARError
from fedtar_flare.files import write_json, write_text
from fedtar_flare.reporting.render import render

EXAMPLES_FILE = "examples.json"
EXAMPLES_PAGE = "examples.html"
EXAMPLES_FOLDER = "examples"
"""Folder of a simulated run's results with one file per synthetic site."""
PER_STEP = 3
_SENTENCES = re.compile(r"[^.;\n]+[.;\n]*")
_WORDS = re.compile(r"\s*(?:\w+(?:[.,]\d+)*|[^\w\s]|\Z)")  # a word or sign, with the space before it


@dataclass(frozen=True, slots=True)
class Example:
    """One report; ``findings`` are those known to be there (synthetic cohort), None where only the report is known."""

    time_step: int
    written: str
    reference: str
    findings: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SiteExamples:
    """Examples of one site after one round; ``synthetic`` where nobody is behind them."""

    site: str
    round: int
    synthetic: bool
    examples: tuple[Example, ...]


def choose(
    time_steps: Sequence[int],
    written: Sequence[str],
    references: Sequence[str],
    findings: Sequence[frozenset[str] | None],
    per_step: int = PER_STEP,
) -> tuple[Example, ...]:
    """The first ``per_step`` reports of each time step, in the order given: not the best ones."""
    chosen: dict[int, list[Example]] = {}
    for t, text_, reference, known in zip(time_steps, written, references, findings, strict=True):
        at = chosen.setdefault(t, [])
        if len(at) < per_step:
            at.append(Example(t, text_, reference, None if known is None else tuple(sorted(known))))
    return tuple(example for t in sorted(chosen) for example in chosen[t])


def write_examples(folder: Path, examples: SiteExamples) -> Path:
    """Write ``examples.json`` and the page ``examples.html`` into a folder of the site; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / EXAMPLES_FILE, asdict(examples))
    return write_text(folder / EXAMPLES_PAGE, examples_page(examples))


def read_examples(path: Path) -> SiteExamples:
    """Read ``examples.json``; FedTARError where it is missing or malformed."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return SiteExamples(
            str(data["site"]), int(data["round"]), data["synthetic"] is True, tuple(map(_example, data["examples"]))
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedTARError(f"{path} holds no examples of this package ({type(error).__name__})") from error


def _example(data: Mapping[str, Any]) -> Example:
    findings = data["findings"]
    known = None if findings is None else tuple(map(str, findings))
    return Example(int(data["time_step"]), str(data["written"]), str(data["reference"]), known)


def run_examples(folder: Path) -> list[SiteExamples]:
    """Examples of a simulated run's synthetic sites, by site; none of any other run."""
    found = [read_examples(path) for path in sorted((folder / EXAMPLES_FOLDER).glob("*.json"))]
    return [examples for examples in found if examples.synthetic]


def examples_page(examples: SiteExamples) -> str:
    """The page of one site as well-formed HTML."""
    return render("examples_page.html", examples=examples, sites=[marked(examples)], headed=False, time_steps=1)


@dataclass(frozen=True, slots=True)
class MarkedExample:
    """One report in pieces (mark or empty, text); ``account`` tells right, wrong and missed, None without findings."""

    time_step: int
    pieces: tuple[tuple[str, str], ...]
    account: tuple[tuple[str, str], ...] | None
    reference: str


@dataclass(frozen=True, slots=True)
class MarkedSite:
    """Marked examples of one site, and a legend of (mark, meaning)."""

    site: str
    round: int
    legend: tuple[tuple[str, str], ...]
    examples: tuple[MarkedExample, ...]


def marked(site: SiteExamples) -> MarkedSite:
    """Mark what is right and wrong in a site's examples."""
    if any(example.findings is not None for example in site.examples):
        legend = (("right", "finding that is there"), ("wrong", "finding that is not there"))
    else:
        legend = (("same", "words of the reference report"), ("other", "other words"))
    return MarkedSite(site.site, site.round, legend, tuple(map(_marked, site.examples)))


def _marked(example: Example) -> MarkedExample:
    if example.findings is None:
        pieces, account = _by_words(example.written, example.reference), None
    else:
        pieces, account = _by_findings(example.written, frozenset(example.findings))
    return MarkedExample(example.time_step, tuple(pieces), account, example.reference)


def _by_findings(written: str, truth: frozenset[str]) -> tuple[list[tuple[str, str]], tuple[tuple[str, str], ...]]:
    """Sentences that state findings, marked right or wrong, and the account of them."""
    from fedtar_flare.synthetic.vocabulary import findings_in

    pieces = []
    for sentence in _SENTENCES.findall(written):
        stated = findings_in(sentence)
        pieces.append(("wrong" if stated - truth else "right" if stated else "", sentence))
    named = findings_in(written)
    account = (
        ("right", "right", named & truth),
        ("wrong", "not there", named - truth),
        ("missed", "missed", truth - named),
    )
    return pieces, tuple(
        (kind, f"{word}: {', '.join(sorted(f.replace('_', ' ') for f in group))}")
        for kind, word, group in account
        if group
    )


def _by_words(written: str, reference: str) -> list[tuple[str, str]]:
    """Runs of words, marked as the same as in the reference (in the same order) or other."""
    mine, theirs = _WORDS.findall(written), _WORDS.findall(reference)
    left, right = ([word.strip().lower() for word in words] for words in (mine, theirs))
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    pieces, at = [], 0
    for start, _, count in matcher.get_matching_blocks():
        for kind, run in (("other", "".join(mine[at:start])), ("same", "".join(mine[start : start + count]))):
            if run.strip():
                pieces += [("", run[: len(run) - len(run.lstrip())]), (kind, run.strip())]
        at = start + count
    return pieces
