"""Reports that state one finding more than their image shows, so that a decoder learns to write what it is told.

A decoder that has always seen in the image what it was told remembers the image, and does not heed a prompt of which
it has few examples. Here a sentence that states one finding alone is taken from another report of the site and put into
one that does not state it; the prompts tell it, the image does not.

Of a finding that too few of the site's reports state, the sentence is a plain one ("There is right pneumothorax."), so
that the decoder can write what a head that has learnt it at other hospitals tells.

What goes where is read off the site's own reports. A sentence that states no finding, and never stands beside the
finding, gives way to it ("There is no pleural effusion."); else the sentence stands after the one before which, in its
own report, it stood.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedtar_flare.learning.labels import POSITIVE
from fedtar_flare.learning.plain_words import is_none, names, plain_sentence, sentences

FEWEST = 2
"""Patients that must have a finding for its sentences to be put into others' reports, or its row of a head to leave."""
COMMON = 0.05
"""Share of the reports that a sentence must be in before its absence beside a finding says anything."""


@dataclass(frozen=True)
class _Donor:
    """A sentence that states one finding alone, and those before and after it in its report."""

    sentence: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def shared(self, said: frozenset[str]) -> int:
        """How many of its report's other sentences are among ``said``."""
        return len(said.intersection(self.before + self.after))

    def place(self, said: Sequence[str]) -> int:
        """Where among ``said`` it belongs: beside the nearest sentence that both have, else as far on as it was."""
        for one in reversed(self.before):
            if one in said:
                return said.index(one) + 1
        for one in self.after:
            if one in said:
                return said.index(one)
        if not self.before and not self.after:
            return len(said)
        return len(said) * len(self.before) // (len(self.before) + len(self.after))


class Recombination:
    """Puts findings of some reports into others.

    Args:
        reports: of the visits that may be learned from.
        patients: whose each report is.
        label: number of the class of each of the D findings in a text.
        least: patients that must have a finding for the site's own sentences of it to be put into reports, and at least
            :data:`FEWEST`.
        findings: names of the D findings, words apart by underscores or spaces, the side last; of one of fewer
            patients a plain sentence is put in, if ``label`` reads it as that finding. Empty: nothing is.
    """

    def __init__(
        self,
        reports: Sequence[str],
        patients: Sequence[str],
        label: Callable[[str], Sequence[int]],
        least: int = FEWEST,
        findings: Sequence[str] = (),
    ):
        self._label = label
        donors: defaultdict[int, list[_Donor]] = defaultdict(list)
        stated: defaultdict[int, set[str]] = defaultdict(set)
        plain: Counter[str] = Counter()
        beside: set[tuple[str, int]] = set()
        for report, patient in zip(reports, patients, strict=True):
            said, found = sentences(report), self._found(report)
            for finding in found:
                stated[finding].add(patient)
            for i, sentence in enumerate(said):
                states = self._found(sentence)
                if not states:
                    plain[sentence] += 1
                    beside.update((sentence, finding) for finding in found)
                elif len(states) == 1:
                    donors[next(iter(states))].append(_Donor(sentence, tuple(said[:i]), tuple(said[i + 1 :])))
        self._none = frozenset(i for i, name in enumerate(findings) if is_none(name))
        own = {i: donors[i] for i in donors if len(stated[i]) >= max(least, FEWEST)}
        others = {i: plain_sentence(name) for i, name in enumerate(findings) if i not in own}
        lent = {i: [_Donor(said, (), ())] for i, said in others.items() if self._found(said) == {i}}
        self._donors = {i: found for i, found in sorted((own | lent).items()) if i not in self._none}
        common = [sentence for sentence, n in plain.items() if n >= COMMON * len(reports)]
        self._against = {f: frozenset(s for s in common if (s, f) not in beside) for f in own}
        for i in lent:  # of what hardly stands in the reports, only a sentence that names it says anything against it
            self._against[i] = frozenset(s for s in plain if names(s, findings[i]))

    def with_one_more(self, report: str, seed: str) -> tuple[str, int] | None:
        """The report with one finding more, drawn by ``seed``, and the finding's number from 0.

        None where there is none to put in, or where the text would not state just that besides what it stated. That
        there was no finding is stated no more.
        """
        drawn, there = random.Random(seed), self._found(report)
        lacking = [finding for finding in self._donors if finding not in there]
        if not lacking:
            return None
        finding = drawn.choice(lacking)
        said, against = sentences(report), self._against[finding]
        # a site may write in several ways: the half of the donors whose reports are most like this one
        like = sorted(self._donors[finding], key=lambda donor: -donor.shared(frozenset(said)))
        donor = drawn.choice(like[: (len(like) + 1) // 2])
        kept = [sentence for sentence in said if sentence not in against]
        first = next((i for i, sentence in enumerate(said) if sentence in against), None)
        at = donor.place(kept) if first is None else first
        text = " ".join([*kept[:at], donor.sentence, *kept[at:]])
        return (text, finding) if self._found(text) - self._none == (there | {finding}) - self._none else None

    def _found(self, text: str) -> frozenset[int]:
        return frozenset(i for i, label in enumerate(self._label(text)) if label == POSITIVE)
