"""Text for the warm start: reports in ever new styles, built from frames that no site uses.

It gives a tokenizer the words of chest radiology and a decoder its language, without showing it any site's way of
writing: sizes, changes and terms are the shared vocabulary, but no sentence of the corpus is one of a site's. The
frames are in ``corpus.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedtar_flare.core.files import read_yaml
from fedtar_flare.synthetic.course import MOST_FINDINGS, stream
from fedtar_flare.synthetic.reports import STYLES, State
from fedtar_flare.synthetic.vocabulary import FINDINGS, kind_of, side_of

T = TypeVar("T")
NAMED_CHANGES = ("new", "larger", "smaller")
"""Changes that a style has words for, in the order of its words."""
_FRAMES: Mapping[str, Any] = read_yaml(Path(__file__).with_name("corpus.yaml"), "the frames of texts")


def text_corpus(n: int, seed: int) -> list[str]:
    """``n`` reports in styles that are drawn anew for every report; for tokenizer and language warm-up.

    Two seeds give different reports; none of them is ever a site's.
    """
    return [corpus_report(stream("corpus", seed, i))[0] for i in range(n)]


def corpus_report(rng: np.random.Generator) -> tuple[str, frozenset[str]]:
    """One report of the corpus and the findings that it states."""
    count = int(rng.integers(0, MOST_FINDINGS + 1))
    chosen = [str(name) for name in rng.permutation(FINDINGS)[: count + int(rng.integers(0, 2))]]
    findings, resolved = chosen[:count], chosen[count:]
    follow_up = bool(rng.random() < 0.6)
    wording = STYLES[int(rng.integers(len(STYLES)))][int(rng.integers(2))]
    words = wording.changes.split("|") if follow_up else ()
    body = [_sentence(rng, f, words if rng.random() < 0.5 else (), int(rng.integers(1, 4))) for f in findings]
    body += _clear(rng, findings, 0.5)
    body += [_frame(rng, part) for part in ("bones", "aside") if rng.random() < 0.4]
    rng.shuffle(body)
    closing = _closing(rng, findings)
    lines = [_frame(rng, "opening"), *body]
    if resolved and follow_up:
        lines.append(_frame(rng, "resolved").format(names=", ".join(_named(rng, name) for name in resolved)))
    if rng.random() < 0.6:
        lines.append(closing)
    return _text(rng, lines), frozenset(findings)


def styled_report(rng: np.random.Generator, states: Mapping[str, State], resolved: Sequence[str] = ()) -> str:
    """A report on an image, in a style that is drawn anew: findings with their degrees, and changes that they tell.

    Its opening is drawn like the rest, so that it may speak of a comparison that nothing in the image answers to.

    Parameters
    ----------
    rng : numpy.random.Generator
        Draws the style.
    states : dict of State
        Finding id to its state, for every finding that the image shows.
    resolved : sequence of str
        Findings that are gone.
    """
    body = [_sentence(rng, name, _course(rng, state), state.size) for name, state in states.items()]
    body += _clear(rng, [*states, *resolved], 0.8)
    if resolved:
        body.append(_frame(rng, "resolved").format(names=", ".join(_named(rng, name) for name in resolved)))
    rng.shuffle(body)
    names = ", ".join(_named(rng, name) for name in states)
    lines = [_frame(rng, "opening"), *body]
    if rng.random() < 0.4 and not resolved:
        lines.append(_frame(rng, "closing").format(names=names) if states else _frame(rng, "normal_closing"))
    return _text(rng, lines)


def _course(rng: np.random.Generator, state: State) -> list[str]:
    """The word of a style for what became of a finding; none for one that is stable or seen for the first time."""
    words = _pick(rng, STYLES)[int(rng.integers(2))].changes.split("|")
    return [words[NAMED_CHANGES.index(state.change)]] if state.change in NAMED_CHANGES else []


def _text(rng: np.random.Generator, lines: Sequence[str]) -> str:
    if rng.random() < 0.15:
        return " ".join(line.upper() for line in lines)
    return " ".join(line[0].upper() + line[1:] for line in lines)


def _clear(rng: np.random.Generator, findings: Iterable[str], share: float) -> list[str]:
    """Sentences on kinds that are not there, for a share of them."""
    kinds = set(map(kind_of, findings))
    return [_pick(rng, texts) for kind, texts in _FRAMES["clear"].items() if kind not in kinds and rng.random() < share]


def _closing(rng: np.random.Generator, findings: Sequence[str]) -> str:
    names = ", ".join(_named(rng, name) for name in findings)
    return _frame(rng, "closing").format(names=names) if findings else _frame(rng, "normal_closing")


def _sentence(rng: np.random.Generator, name: str, changes: Sequence[str], size_is: int) -> str:
    """A sentence on a finding, with one of the words of ``changes``, if there are any."""
    words = _pick(rng, _pick(rng, STYLES)).sizes[kind_of(name)].split("|")
    change = f", {_pick(rng, changes).strip(' ,()')}" if changes else ""
    return _frame(rng, "found").format(what=_named(rng, name), size=words[size_is - 1], change=change)


def _named(rng: np.random.Generator, name: str) -> str:
    term, side = _pick(rng, _FRAMES["terms"][kind_of(name)]), side_of(name)
    if not side:
        return term
    where = _frame(rng, "where").format(side=side)
    return f"{where} {term}" if where.startswith(side) else f"{term} {where}"


def _frame(rng: np.random.Generator, part: str) -> str:
    return _pick(rng, _FRAMES[part])


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]
