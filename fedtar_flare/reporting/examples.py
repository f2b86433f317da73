"""Generated reports next to the reference reports, with what is right and wrong marked.

Such a page holds patients' reports and stays in the site's own state; only synthetic examples may be shown elsewhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from markupsafe import Markup
from pydantic import TypeAdapter

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
    """Examples of one site after one round; ``synthetic`` where the patients are."""

    site: str
    round: int
    synthetic: bool
    examples: tuple[Example, ...]


_Marked = tuple[str, str]
"""Mark, or empty, and text."""
_SITE_EXAMPLES = TypeAdapter(SiteExamples)


def choose(
    time_steps: Sequence[int],
    written: Sequence[str],
    references: Sequence[str],
    findings: Sequence[frozenset[str] | None],
    per_step: int = PER_STEP,
) -> tuple[Example, ...]:
    """The first reports of each time step, in the order given: not the best ones.

    The sequences have an entry for each report, as the fields of :class:`Example`.
    """
    chosen: dict[int, list[Example]] = {}
    for t, text, reference, known in zip(time_steps, written, references, findings, strict=True):
        at = chosen.setdefault(t, [])
        if len(at) < per_step:
            at.append(Example(t, text, reference, None if known is None else tuple(sorted(known))))
    return tuple(example for t in sorted(chosen) for example in chosen[t])


def write_examples(folder: Path, examples: SiteExamples) -> Path:
    """Write ``examples.json`` and the page ``examples.html`` into a folder of the site; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / EXAMPLES_FILE, asdict(examples))
    return write_text(folder / EXAMPLES_PAGE, examples_page(examples))


def read_examples(path: Path) -> SiteExamples:
    """Read ``examples.json``; FedTARError where it is missing or malformed."""
    try:
        return _SITE_EXAMPLES.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise FedTARError(f"{path} holds no examples of this package ({type(error).__name__})") from error


def run_examples(folder: Path) -> list[SiteExamples]:
    """Examples of a simulated run's synthetic sites, by site; none of any other run."""
    found = [read_examples(path) for path in sorted((folder / EXAMPLES_FOLDER).glob("*.json"))]
    return [examples for examples in found if examples.synthetic]


def examples_page(examples: SiteExamples) -> str:
    """The page of one site as well-formed HTML."""
    return render(
        "examples_page.html", examples=examples, content=render_examples([examples], headed=False), time_steps=1
    )


def render_examples(sites: Sequence[SiteExamples], headed: bool) -> Markup:
    """A table per site, with what is right and wrong marked; ``headed`` gives each its name."""
    return render("examples.html", sites=sites, headed=headed, legend=_legend, marked=_marked)


def _legend(site: SiteExamples) -> tuple[tuple[str, str], ...]:
    if any(example.findings is not None for example in site.examples):
        return (("right", "finding that is there"), ("wrong", "finding that is not there"))
    return (("same", "words of the reference report"), ("other", "other words"))


def _marked(example: Example) -> tuple[list[_Marked], list[_Marked] | None]:
    """The report in pieces, and an account of what is right, wrong and missed; None where no findings are known."""
    if example.findings is None:
        return _by_words(example.written, example.reference), None
    from fedtar_flare.learning.labels import labeler

    stated, truth = labeler("synthetic").stated, frozenset(example.findings)
    pieces = []
    for sentence in _SENTENCES.findall(example.written):
        named = stated(sentence)
        pieces.append(("wrong" if named - truth else "right" if named else "", sentence))
    named = stated(example.written)
    account = {("right", "right"): named & truth, ("wrong", "not there"): named - truth}
    account |= {("missed", "missed"): truth - named}
    return pieces, [
        (kind, f"{word}: {', '.join(sorted(f.replace('_', ' ') for f in group))}")
        for (kind, word), group in account.items()
        if group
    ]


def _by_words(written: str, reference: str) -> list[_Marked]:
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
