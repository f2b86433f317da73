"""The text that says what was read: by a choice among beams, and by plain sentences for what none of them says."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedtar_flare.learning.comparison import CHANGES, NEW, NONE, RESOLVED, UNCERTAIN, UNCHANGED, ComparisonBranch
from fedtar_flare.learning.labels import LEVELS, NEGATIVE, PRESENT
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
        reading = self.branch.read(seen)
        rows = zip(reading.levels.tolist(), reading.changes.tolist(), strict=True)
        return [self._findings(levels, changes) for levels, changes in rows]

    def stated(self, text: str) -> Findings:
        """Findings that a text states; a change is uncertain where it states several."""
        reader = self.branch.reader
        changes = dict.fromkeys(reader.findings, NONE)
        for name, direction in reader.changes(text):
            changes[name] = UNCERTAIN if changes[name] else CHANGES.index(direction)
        return self._findings(reader.levels(text), list(changes.values()))

    def _findings(self, levels: Sequence[int], changes: Sequence[int]) -> Findings:
        """Without the label that is for no finding."""
        reader = self.branch.reader
        rows = zip(reader.findings, levels, changes, strict=True)
        levels, changes = zip(*((0, NONE) if n == reader.no_finding else (lv, c) for n, lv, c in rows), strict=True)
        return Findings(tuple(levels), tuple(changes))

    def count_differences(self, text: str, read: Findings) -> int:
        """Findings whose presence differs in the text; degrees and changes that differ break ties."""
        stated = self.stated(text)
        presence = sum(bool(a) != bool(b) for a, b in zip(stated.levels, read.levels, strict=True))
        others = sum(_differs(stated, read, i) for i in range(len(stated.levels)))
        return presence * (1 + len(stated.levels)) + others

    def complete(self, text: str, read: Findings) -> str:
        """The text, with a plain sentence for each finding that it leaves out or states otherwise than was read, and
        for each of which it claims a change that was not read.

        Sentences about such a finding alone are left out; of those that deny others too, these denials stay. Where
        the text would state, deny or doubt anything else otherwise than before, it stays as it is.
        """
        rows = zip(*read, self.stated(text).levels, strict=True)  # what the text alone states stays
        read = read._replace(levels=tuple(now or (of_text if c != RESOLVED else 0) for now, c, of_text in rows))
        for number, name in enumerate(self.branch.reader.findings if self.completes else ()):
            if _as_read(self.stated(text), read, number):
                continue
            plain = " ".join([*self._without(text, name), plain_sentence(name, *(of[number] for of in read))])
            same = self._others(plain, name) == self._others(text, name)
            if same and _as_read(self.stated(plain), read, number):
                text = plain
        return text

    def _without(self, text: str, name: str) -> list[str]:
        """The sentences of a text without those about a finding."""
        rest = []
        for sentence in filter(None, map(str.strip, _SENTENCE_ENDS.split(text))):
            others = {other: of for other, of in self._others(sentence, name).items() if any(of)}
            denied = [" ".join(_words(other)) for other, of in others.items() if of == (0, NONE, NEGATIVE)]
            if not self._mentions(sentence, name) or len(denied) < len(others):
                rest.append(sentence)
            elif denied:
                rest.append(f"No {' or '.join(denied)}.")
        return rest

    def _mentions(self, sentence: str, name: str) -> bool:
        """Whether a sentence states, denies or doubts a finding, or names it."""
        reader = self.branch.reader
        named = {*_words(name)} - {*_SIDES} <= {*_words(sentence)}
        return named or reader.label(sentence)[reader.findings.index(name)] != 0

    def _others(self, text: str, name: str) -> dict[str, tuple[int, int, int]]:
        """Level, change and label of every other finding; that its other side is denied follows from the side."""
        reader, others = self.branch.reader, {}
        for other, level, change, label in zip(reader.findings, *self.stated(text), reader.label(text), strict=True):
            if other not in (name, reader.no_finding):
                sided = {*_words(other)} - {*_SIDES} == {*_words(name)} - {*_SIDES}
                others[other] = (level, change, 0 if sided and label == NEGATIVE else label)
        return others


def _as_read(stated: Findings, read: Findings, number: int) -> bool:
    """Whether a text states a finding as it was read."""
    return bool(stated.levels[number]) == bool(read.levels[number]) and not _differs(stated, read, number)


def _differs(stated: Findings, read: Findings, number: int) -> bool:
    """Whether a text states a finding's degree, or its change, otherwise than it was read."""
    level, wanted = stated.levels[number], read.levels[number]
    of_degree = level and wanted and level != wanted and PRESENT not in (level, wanted)
    said, change = stated.changes[number], read.changes[number]  # NONE: there was nothing to compare with
    return bool(of_degree) or _claim(said) != _claim(change) or (said == UNCHANGED and change == NONE)


def plain_sentence(name: str, level: int, change: int) -> str:
    """A finding with its degree and its change; a stable one without any word for it."""
    words = " ".join(_words(name))
    if change == RESOLVED:
        return f"Resolution of {words}."
    if not level:
        return f"No {words}."
    degree = f"{LEVELS[level]} " * (level != PRESENT)
    course = f", {CHANGES[change]}" * (NEW <= change < RESOLVED and change != UNCHANGED)
    doubt = " Its course is not certain." * (change == UNCERTAIN)
    return f"{degree}{words}".capitalize() + f"{course}.{doubt}"


def _claim(change: int) -> int:
    """A change that a text claims; a stable finding needs no word, and an uncertain one has none."""
    return NONE if change in (UNCHANGED, UNCERTAIN) else change


def _words(text: str) -> list[str]:
    """Words of a text or of a finding's name, whose side, the last after an underscore, comes first."""
    *words, last = re.findall(r"[a-z0-9]+", text.lower().replace("_", " ")) or [""]
    return [last, *words] if last in _SIDES else [*words, last]
