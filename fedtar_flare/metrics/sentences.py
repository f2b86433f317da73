"""Sentences and words of a report, and a table of phrases that finds its entries among them in linear time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from fedtar_flare.errors import ConfigError

Tag = TypeVar("Tag")

GAP = 3
"""Most words that a ``_`` in a phrase stands for."""
_NO_GAP = frozenset("no without but however although though except which , : ( ) ?".split())
_ABBREVIATIONS = frozenset({"vs", "dr", "approx", "resp", "ca", "e.g", "i.e", "eg", "ie"})

# a number with its decimals, a word, a blank line, a line that starts with a list mark, or one punctuation mark
_TOKEN = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+(?:'[^\W_]+)?|\n\s*\n|\n\s*(?=\d+[.)]\s|[-*•])|[.;!?,:()•\"“”]")


def sentences(text: str) -> Iterator[list[str]]:
    """Yield the lower-case words and the marks ``, : ( ) ?`` of each sentence.

    A sentence ends at ``. ; !``, a quote, a bullet, a blank line, a line with a list mark, and after ``?``. Hyphens and
    slashes separate words; the point in a number does not end a sentence.
    """
    words: list[str] = []
    previous = ""
    for token in _TOKEN.findall(unicodedata.normalize("NFKC", text).lower()):
        ends = token[0] in ".;!\n•\"“”" and not (token == "." and previous in _ABBREVIATIONS)
        # "pneumonia? edema": the mark belongs to the words before it; "(pneumonia?)" goes on
        if words and (ends or (previous == "?" and token not in ("?", ")", ","))):
            yield words
            words = []
        if token[0] not in ".;!\n•\"“”":
            words.append(token)
        previous = token
    if words:
        yield words


class Match(NamedTuple, Generic[Tag]):
    """A phrase found at ``words[start:end]``."""

    start: int
    end: int
    tag: Tag


@dataclass(frozen=True)
class _Element:
    """One word of a phrase: any of ``exact``, or what begins with one of ``stems``; neither for a gap."""

    exact: frozenset[str]
    stems: tuple[str, ...]

    def fits(self, word: str) -> bool:
        return word in self.exact or word.startswith(self.stems)

    @property
    def gap(self) -> bool:
        return not self.exact and not self.stems


class Phrasebook(Generic[Tag]):
    """Phrases, each with a tag, found wherever they occur.

    A phrase is words separated by spaces: ``a|b`` is either, ``opacit*`` any word that begins so, ``_`` up to ``GAP``
    words without punctuation or conjunction. The work per word is bounded by the table, so it is linear in the text.

    Raises:
        ConfigError: an empty phrase, or one that begins or ends with ``_``.
    """

    def __init__(self, entries: Iterable[tuple[str, Tag]]):
        exact: dict[str, list[tuple[tuple[_Element, ...], Tag]]] = {}
        stems: dict[str, list[tuple[tuple[_Element, ...], Tag]]] = {}
        for phrase, tag in entries:
            elements = tuple(_element(part) for part in phrase.split())
            if not elements or elements[0].gap or elements[-1].gap:
                raise ConfigError(f"phrase {phrase!r}: it must begin and end with a word, not with a gap")
            for word in elements[0].exact:
                exact.setdefault(word, []).append((elements, tag))
            for stem in elements[0].stems:
                stems.setdefault(stem, []).append((elements, tag))
        lengths = sorted({len(stem) for stem in stems})

        @lru_cache(maxsize=20_000)
        def beginning_with(word: str) -> tuple[tuple[tuple[_Element, ...], Tag], ...]:
            found = list(exact.get(word, ()))
            for length in lengths:
                found += stems.get(word[:length], ()) if len(word) >= length else ()
            return tuple(found)

        self._beginning_with = beginning_with

    def find(self, words: Sequence[str]) -> list[Match[Tag]]:
        """Every occurrence of every phrase, from left to right; occurrences may overlap."""
        found = []
        for i, word in enumerate(words):
            for elements, tag in self._beginning_with(word):
                end = _end(elements, 1, words, i + 1)
                if end:
                    found.append(Match(i, end, tag))
        return found

    def cover(self, words: Sequence[str]) -> list[Match[Tag]]:
        """Occurrences that do not overlap: from the left, the longest at each word."""
        covered: list[Match[Tag]] = []
        for match in sorted(self.find(words), key=lambda match: (match.start, -match.end)):
            if not covered or match.start >= covered[-1].end:
                covered.append(match)
        return covered


def listed(table: str) -> tuple[str, ...]:
    """Phrases of a table, which separates them by commas."""
    return tuple(phrase for phrase in (" ".join(part.split()) for part in table.split(",")) if phrase)


def _element(part: str) -> _Element:
    if part == "_":
        return _Element(frozenset(), ())
    words = part.split("|")
    return _Element(
        frozenset(word for word in words if not word.endswith("*")),
        tuple(word[:-1] for word in words if word.endswith("*")),
    )


def _end(elements: Sequence[_Element], k: int, words: Sequence[str], i: int) -> int:
    """Where the phrase ends if its elements from k on fit the words from i on; 0 if they do not."""
    while k < len(elements):
        if elements[k].gap:
            for skipped in range(GAP + 1):
                end = _end(elements, k + 1, words, i + skipped)
                if end:
                    return end
                if i + skipped >= len(words) or words[i + skipped] in _NO_GAP:
                    return 0
            return 0
        if i >= len(words) or not elements[k].fits(words[i]):
            return 0
        k, i = k + 1, i + 1
    return i
