"""Sentences and words of a report, and a table of phrases that finds its entries among them in linear time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.metrics.language import clean

Tag = TypeVar("Tag")

GAP, WIDE_GAP = 3, 15  # most words that ``_`` and ``__`` in a phrase stand for
_GAPS = {"_": GAP, "__": WIDE_GAP}
_NO_WIDE_GAP = frozenset(["no", "without", "but", "however", "although", "though", "except"])
_NO_GAP = _NO_WIDE_GAP | frozenset(["which", ",", ":", "(", ")", "?"])
_ABBREVIATIONS = frozenset({"vs", "dr", "approx", "resp", "ca", "e.g", "i.e", "eg", "ie"})

# a number with its decimals, a word, a blank line, a line that starts with a list mark, or one punctuation mark
_TOKEN = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+(?:'[^\W_]+)?|\n\s*\n|\n\s*(?=\d+[.)]\s|[-*•])|[.;!?,:()•\"“”]")


def sentences(text: str) -> Iterator[list[str]]:
    """Split a report into sentences and words.

    A sentence ends at ``. ; !``, a quote, a bullet, a blank line, a line with a list mark, and after ``?``. Hyphens and
    slashes separate words; the point in a number does not end a sentence.
    """
    words: list[str] = []
    previous = ""
    for token in _TOKEN.findall(unicodedata.normalize("NFKC", text).lower()):
        ends = token[0] in '.;!\n•"“”' and not (token == "." and previous in _ABBREVIATIONS)
        # "pneumonia? edema": the mark belongs to the words before it; "(pneumonia?)" goes on
        if words and (ends or (previous == "?" and token not in ("?", ")", ","))):
            yield words
            words = []
        if token[0] not in '.;!\n•"“”':
            words.append(token)
        previous = token
    if words:
        yield words


class Match(NamedTuple, Generic[Tag]):
    """A phrase found at ``words[start:end]``."""

    start: int
    end: int
    tag: Tag


class _Node(Generic[Tag]):
    """A node in the tree of phrases: the words that may follow, and the tags of the phrases that end here."""

    __slots__ = ("exact", "gaps", "lengths", "stems", "tags")

    def __init__(self) -> None:
        self.exact: dict[str, _Node[Tag]] = {}
        self.stems: dict[str, _Node[Tag]] = {}
        self.lengths: tuple[int, ...] = ()
        self.gaps: dict[int, _Node[Tag]] = {}
        self.tags: list[Tag] = []

    def add(self, part: str) -> _Node[Tag]:
        """The node behind one word of a phrase, ``_`` and ``__`` included."""
        if part in _GAPS:
            return self.gaps.setdefault(_GAPS[part], _Node())
        if part.endswith("*"):
            node = self.stems.setdefault(part[:-1], _Node())
            self.lengths = tuple(sorted(set(map(len, self.stems))))
            return node
        return self.exact.setdefault(part, _Node())

    def after(self, word: str) -> Sequence[_Node[Tag]]:
        """The nodes behind a word."""
        nodes = [self.exact[word]] if word in self.exact else []
        for length in self.lengths:
            if word[:length] in self.stems and len(word) >= length:
                nodes.append(self.stems[word[:length]])
        return nodes


class Phrasebook(Generic[Tag]):
    """Phrases, each with a tag, found wherever they occur.

    A phrase is words separated by spaces: ``a|b`` is either, ``opacit*`` any word that begins so, ``_`` up to
    ``GAP`` words without punctuation or conjunction, ``__`` up to ``WIDE_GAP`` words and commas. The work per word is
    bounded by the table, so it is linear in the text. ConfigError for a phrase that does not begin and end with a word.
    """

    def __init__(self, entries: Iterable[tuple[str, Tag]]):
        self._root: _Node[Tag] = _Node()
        for phrase, tag in entries:
            parts = phrase.split()
            if not parts or parts[0] in _GAPS or parts[-1] in _GAPS:
                raise ConfigError(f"phrase {phrase!r}: it must begin and end with a word, not with a gap")
            nodes = [self._root]
            for part in parts:
                nodes = [node.add(word) for node in nodes for word in part.split("|")]  # every alternative
            for node in nodes:
                node.tags.append(tag)
        self._beginnings = lru_cache(maxsize=20_000)(self._root.after)

    def find(self, words: Sequence[str]) -> list[Match[Tag]]:
        """Every occurrence of every phrase, from left to right; they may overlap. A gap is as short as it can be."""
        matches = []
        for start, word in enumerate(words):
            states = [(node, start + 1) for node in self._beginnings(word)]
            ends: dict[_Node[Tag], int] = {}
            while states:
                node, i = states.pop()
                if node.tags:
                    ends[node] = min(i, ends.get(node, i))
                if i < len(words):
                    states += [(following, i + 1) for following in node.after(words[i])]
                    for gap, behind in node.gaps.items():
                        for j in range(i, min(i + gap + 1, len(words))):
                            states += [(following, j + 1) for following in behind.after(words[j])]
                            if words[j] in (_NO_GAP if gap == GAP else _NO_WIDE_GAP):
                                break
            matches += [Match(start, end, tag) for node, end in ends.items() for tag in node.tags]
        return matches

    def cover(self, words: Sequence[str]) -> list[Match[Tag]]:
        """Occurrences that do not overlap: from the left, the longest at each word."""
        covered: list[Match[Tag]] = []
        for match in sorted(self.find(words), key=lambda match: (match.start, -match.end)):
            if not covered or match.start >= covered[-1].end:
                covered.append(match)
        return covered


def listed(table: str) -> tuple[str, ...]:
    """Phrases of a table, which separates them by commas."""
    return tuple(filter(None, [" ".join(part.split()) for part in table.split(",")]))


@cache
def phrases(kind: str) -> dict[str, tuple[str, ...]]:
    """The tables of one kind in ``phrases.yaml``, by name."""
    file = yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text(encoding="utf-8"))
    return {name: listed(table.format_map(file["names"])) for name, table in file[kind].items()}


LEAST_KNOWN = 0.4
"""Least share of words that are in the tables: English reports have 0.6 and more, those in other languages to 0.35."""


@lru_cache(maxsize=2**16)
def readable(text: str) -> bool:
    """Whether the rules, which are English, can read a report; one without a word says nothing in any language."""
    exact, stems = _vocabulary()
    words = [word for word in clean(text).replace("-", " ").split() if not word.isascii() or word.isalpha()]
    known = sum(word in exact or word.startswith(stems) for word in words)
    return known >= LEAST_KNOWN * len(words) and not set(phrases("language")["denials"]) & {*words}


def as_read(references: Sequence[str], drafts: Sequence[str]) -> tuple[list[str], list[str]]:
    """References and drafts for the rules: a pair is blank, and not graded, where they cannot read its reference."""
    pairs = [pair if readable(pair[0]) else ("", "") for pair in zip(references, drafts, strict=True)]
    return [reference for reference, _ in pairs], [draft for _, draft in pairs]


@cache
def _vocabulary() -> tuple[frozenset[str], tuple[str, ...]]:
    """Words of all tables, and beginnings of words."""
    words = set[str]()
    for name in ("phrases", "chexpert-rules", "ctrate-rules"):
        text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
        words |= {*re.findall(r"[a-z]+\*?", text.lower())} - {*phrases("language")["denials"]}
    return frozenset(words), tuple(word[:-1] for word in words if word[5:].endswith("*"))
