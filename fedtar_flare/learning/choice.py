"""Of a report's beams, one that says what the decoder was told.

A decoder does not always write the findings that its prompts name. Its beams differ in them, and the labeler that made
the prompts of training can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.learning.comparison import UNKNOWN, Comparison, changes_of
from fedtar_flare.learning.labels import POSITIVE
from fedtar_flare.learning.plain_words import completed, is_none


class Reader(Protocol):
    """What reads findings off images: a :class:`~fedtar_flare.learning.diagnosis.DiagnosisBranch`."""

    @property
    def comparison(self) -> Comparison | None:
        """Compares the findings with those of the visit before."""

    def read(
        self, tokens: Tensor, slice_mask: Tensor, prior: PriorBatch | None, prior_tokens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Classes (B, D) of the findings now, and before."""


class PromptedFindings(NamedTuple):
    """Number of each finding's class, and of what became of it; None where nothing is known of the visit before."""

    classes: list[int]
    changes: list[int] | None = None


@dataclass(frozen=True)
class FindingsChoice:
    """A :class:`~fedtar_flare.models.report_generator.Choice` by the findings that the head reads off the image.

    Args:
        reader: of the images.
        label: number of the class of each of the D findings in a text.
        candidates: beams to choose from; 1: there is no choice.
        names: of the findings, where a report that leaves one out is to be completed by a plain sentence.
    """

    reader: Reader
    label: Callable[[str], Sequence[int]]
    candidates: int
    names: tuple[str, ...] = ()

    def told(
        self,
        tokens: Tensor,
        slice_mask: Tensor,
        prior: PriorBatch | None = None,
        prior_tokens: Tensor | None = None,
    ) -> list[PromptedFindings]:
        """For each of B images; arguments as of the protocol ``Prompter``."""
        now, before = self.reader.read(tokens, slice_mask, prior, prior_tokens)
        if before is None:
            return [PromptedFindings(classes) for classes in now.tolist()]
        shown = (before != UNKNOWN).any(1).tolist()
        rows = zip(now.tolist(), changes_of(now, before).tolist(), shown, strict=True)
        return [PromptedFindings(classes, changes if known else None) for classes, changes, known in rows]

    def differing(self, text: str, told: PromptedFindings) -> int:
        """Findings that are in another class in the text; of two texts with as many, the one that says of fewer
        findings otherwise what became of them differs less.
        """
        found = sum(said != was_told for said, was_told in zip(self.label(text), told.classes, strict=True))
        comparison = self.reader.comparison
        if comparison is None or told.changes is None:
            return found
        return found * (1 + len(told.changes)) + comparison.differing(text, told.changes)

    def completed(self, text: str, told: PromptedFindings) -> str:
        """The text, with a plain sentence for each finding that it was told and does not state."""
        for number, name in enumerate(self.names):
            if told.classes[number] == POSITIVE and not is_none(name) and number not in self._stated(text):
                text = completed(text, name, number, self._stated)
        return text

    def _stated(self, text: str) -> frozenset[int]:
        """Numbers of the findings in a text, without the one that says that there is none."""
        pairs = zip(self.label(text), self.names, strict=True)
        return frozenset(i for i, (label, name) in enumerate(pairs) if label == POSITIVE and not is_none(name))
