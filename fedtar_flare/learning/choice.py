"""The text that says what was read: by a choice among beams, and by plain sentences for what none of them says."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedtar_flare.learning.comparison import (
    CHANGES,
    NEW,
    NONE,
    RESOLVED,
    UNCERTAIN,
    UNCHANGED,
    ComparisonBranch,
    Reading,
)
from fedtar_flare.learning.labels import LEVELS, PRESENT
from fedtar_flare.models.report_generator import Encoded

_SIDES = ("right", "left")
_SENTENCE_ENDS = re.compile(r"(?<=[.;!])\s+|\n+")


class Findings(NamedTuple):
    """Levels of D findings and what became of each: numbers among :data:`.LEVELS` and :data:`.CHANGES`."""

    levels: tuple[int, ...]
    changes: tuple[int, ...]


@dataclass(frozen=True)
class FindingsChoice:
    """Chooses, of ``candidates`` beams (1: no choice), the one that says what the branch read, and completes it."""

    branch: ComparisonBranch
    candidates: int
    completes: bool

    def prompted_findings(self, seen: Encoded) -> list[Findings]:
        """Findings that the decoder is prompted with, for each of B visits."""
        reading: Reading = self.branch.read(seen)
        rows = zip(reading.levels.tolist(), reading.changes.tolist(), strict=True)
        return [Findings(tuple(levels), tuple(changes)) for levels, changes in rows]

    def stated(self, text: str) -> Findings:
        """Findings that a text states; a change is uncertain where it states several."""
        reader = self.branch.reader
        changes = dict.fromkeys(reader.findings, NONE)
        for name, direction in reader.changes(text):
            changes[name] = UNCERTAIN if changes[name] else CHANGES.index(direction)
        levels = zip(reader.findings, reader.levels(text), strict=True)
        return Findings(tuple(level * (n != reader.no_finding) for n, level in levels), tuple(changes.values()))

    def count_differences(self, text: str, read: Findings) -> int:
        """Findings whose presence differs in the text; degrees and changes that differ break ties."""
        said = self.stated(text)
        presence = sum(bool(a) != bool(b) for a, b in zip(said.levels, read.levels, strict=True))
        others = sum(self._differs(said, read, i) for i in range(len(said.levels)))
        return presence * (1 + len(said.levels)) + others

    def complete(self, text: str, read: Findings) -> str:
        """The text, with a plain sentence for each finding that it leaves out or says otherwise than was read.

        Sentences that name such a finding, and state nothing else, are left out. The text then states nothing else
        anew: where it would, it stays as it is.
        """
        for number, name in enumerate(self.branch.reader.findings if self.completes else ()):
            said = self.stated(text)
            present, gone = bool(read.levels[number]), read.changes[number] == RESOLVED
            right = bool(said.levels[number]) == present and not self._differs(said, read, number)
            if right or not (present or gone) or name == self.branch.reader.no_finding:
                continue
            kept = [sentence for sentence in _sentences(text) if not self._is_about(sentence, number, name)]
            plain = " ".join([*kept, plain_sentence(name, read.levels[number], read.changes[number])])
            if self._agrees(said, self.stated(plain), read, number):
                text = plain
        return text

    def _differs(self, said: Findings, read: Findings, number: int) -> bool:
        """Whether a text says a finding's degree, or its change, otherwise than it was read."""
        level, wanted = said.levels[number], read.levels[number]
        of_degree = level and wanted and level != wanted and PRESENT not in (level, wanted)
        return bool(of_degree) or _claim(said.changes[number]) != _claim(read.changes[number])

    def _is_about(self, sentence: str, number: int, name: str) -> bool:
        """Whether a sentence states this finding alone, or names it and states none."""
        said = self.stated(sentence)
        stated = {i for i in range(len(said.levels)) if said.levels[i] or said.changes[i]}
        named = set(_words(name)) - {*_SIDES} <= set(_words(sentence))
        return stated == {number} or (not stated and named)

    def _agrees(self, before: Findings, after: Findings, read: Findings, number: int) -> bool:
        """Whether a new text states this finding as it was read, and every other one as before."""
        others = [i for i in range(len(before.levels)) if i != number]
        same = all((before.levels[i], before.changes[i]) == (after.levels[i], after.changes[i]) for i in others)
        return (
            same and bool(after.levels[number]) == bool(read.levels[number]) and not self._differs(after, read, number)
        )


def plain_sentence(name: str, level: int, change: int) -> str:
    """Say a finding with its degree and its change; a stable one without any word for it."""
    *words, last = _words(name)
    words = [last, *words] if last in _SIDES else [*words, last]
    if change == RESOLVED:
        return f"Resolution of {' '.join(words)}."
    degree = [LEVELS[level]] if level != PRESENT else []
    told = f", {CHANGES[change]}" if NEW <= change < RESOLVED and change != UNCHANGED else ""
    doubt = " Its course is not certain." if change == UNCERTAIN else ""
    return f"{' '.join([*degree, *words]).capitalize()}{told}.{doubt}"


def _claim(change: int) -> int:
    """A change that a text claims; a stable finding needs no word, and an uncertain one has none."""
    return NONE if change in (UNCHANGED, UNCERTAIN) else change


def _sentences(text: str) -> list[str]:
    return list(filter(None, map(str.strip, _SENTENCE_ENDS.split(text))))


def _words(text: str) -> Sequence[str]:
    """Words of a text or of a finding's name, in which underscores may separate them; a side is the last."""
    return re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))
