"""Generated reports beside the reference reports, with what is right and wrong in them marked.

Such a page is made of patients' reports: it is written at the site, into the site's own state, and stays there. Only
a synthetic cohort's examples may be shown elsewhere, since nobody is behind them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedtar_flare.errors import FedTARError
from fedtar_flare.record.log import write_json
from fedtar_flare.reporting.format import text
from fedtar_flare.reporting.style import style_sheet

EXAMPLES_FILE = "examples.json"
EXAMPLES_PAGE = "examples.html"
EXAMPLES_FOLDER = "examples"
"""Folder of a simulated run's results with one file per synthetic site."""
PER_STEP = 3
_SENTENCES = re.compile(r"[^.;\n]+[.;\n]*")
_WORDS = re.compile(r"\s*(?:\w+(?:[.,]\d+)*|[^\w\s]|\Z)")  # a word or sign, with the space before it


@dataclass(frozen=True, slots=True)
class Example:
    """One report.

    Args:
        time_step: of the visit.
        written: the model's text.
        reference: the report of the visit.
        findings: what is known to be there, of the synthetic cohort; None where only the report is known.
    """

    time_step: int
    written: str
    reference: str
    findings: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SiteExamples:
    """Examples of one site after one round; ``synthetic`` when nobody is behind them."""

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
    """The first few of each time step, in the order given: not the best ones.

    Args:
        time_steps, written, references, findings: in the same order, one entry per report.
        per_step: how many of each step.
    """
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
    page = folder / EXAMPLES_PAGE
    part = page.with_name(f".{page.name}.part")
    part.write_text(examples_page(examples), encoding="utf-8")
    os.replace(part, page)  # noqa: PTH105
    return page


def read_examples(path: Path) -> SiteExamples:
    """Read ``examples.json``.

    Raises:
        FedTARError: not there, or not of this form.
    """
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


def examples_section(examples: Sequence[SiteExamples]) -> str:
    """The section of the run's page; empty without examples."""
    if not examples:
        return ""
    parts = "".join(f"<h3>{text(one.site)}, after round {one.round}</h3>{example_table(one)}" for one in examples)
    lead = (
        "Test reports of the synthetic cohort, the first of each step and site. For patients' reports such a page is "
        f"made at the site ({EXAMPLES_PAGE} in the site's state) and stays there."
    )
    return (
        f'<section id="examples"><h2>Generated beside reference reports</h2><p class="lead">{text(lead)}</p>'
        f"{legend(examples[0])}{parts}</section>"
    )


def examples_page(examples: SiteExamples) -> str:
    """The page of one site as well-formed HTML."""
    note = (
        "A synthetic cohort: nobody is behind these reports."
        if examples.synthetic
        else "Made from patients' reports: this page was written at the site and has to stay there."
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<title>Generated reports of {text(examples.site)}</title>
<style>
{style_sheet(1)}</style>
</head>
<body>
<header class="top"><div class="kind">Generated beside reference reports</div>
<h1>{text(examples.site)}, after round {examples.round}</h1>
<div class="sub">{note} Drafts, not for clinical use.</div></header>
<main>
<section>{legend(examples)}{example_table(examples)}</section>
</main>
</body>
</html>
"""


def legend(examples: SiteExamples) -> str:
    """What the marks mean."""
    if any(example.findings is not None for example in examples.examples):
        words = (("right", "finding that is there"), ("wrong", "finding that is not there"))
    else:
        words = (("same", "words of the reference report"), ("other", "other words"))
    return "<p>" + ", ".join(f'<mark class="{kind}">{text(word)}</mark>' for kind, word in words) + "</p>"


def example_table(examples: SiteExamples) -> str:
    """Rows of (written, reference), marked."""
    rows = "".join(_row(example) for example in examples.examples)
    head = "<tr><th>step</th><th>written by the model</th><th>reference report</th></tr>"
    return f'<div class="scroll"><table class="texts"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _row(example: Example) -> str:
    if example.findings is None:
        written, account = _by_words(example.written, example.reference), ""
    else:
        written, account = _by_findings(example.written, frozenset(example.findings))
    return (
        f'<tr><th scope="row">{example.time_step}</th><td>{written or "<i>nothing</i>"}{account}</td>'
        f"<td>{text(example.reference)}</td></tr>"
    )


def _by_findings(written: str, truth: frozenset[str]) -> tuple[str, str]:
    """Sentences that state findings, marked right or wrong, and a line with the account."""
    from fedtar_flare.synthetic.vocabulary import findings_in

    parts = []
    for sentence in _SENTENCES.findall(written):
        stated = findings_in(sentence)
        kind = "wrong" if stated - truth else "right" if stated else ""
        parts.append(f'<mark class="{kind}">{text(sentence)}</mark>' if kind else text(sentence))
    named = findings_in(written)
    account = [
        f'<span class="{kind}">{word}: {text(", ".join(sorted(f.replace("_", " ") for f in group)))}</span>'
        for kind, word, group in (
            ("right", "right", named & truth),
            ("wrong", "not there", named - truth),
            ("missed", "missed", truth - named),
        )
        if group
    ]
    return "".join(parts), f'<div class="account">{" ".join(account) or "no finding, rightly none named"}</div>'


def _by_words(written: str, reference: str) -> str:
    """Runs of words that the reference has in the same order, and the others."""
    mine, theirs = _WORDS.findall(written), _WORDS.findall(reference)
    left, right = ([word.strip().lower() for word in words] for words in (mine, theirs))
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    parts, at = [], 0
    for start, _, count in matcher.get_matching_blocks():
        for kind, run in (("other", "".join(mine[at:start])), ("same", "".join(mine[start : start + count]))):
            if run.strip():
                space = text(run[: len(run) - len(run.lstrip())])
                parts.append(f'{space}<mark class="{kind}">{text(run.strip())}</mark>')
        at = start + count
    return "".join(parts)
