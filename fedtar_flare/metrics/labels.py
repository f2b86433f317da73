"""What a labeler of reports is: one object, also of another package, announced as a score is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Labeler"]

Pair = Callable[[str, str], float | None]
"""From reference and draft to a value; None where it is undefined."""


@dataclass(frozen=True)
class Labeler:
    """Labels reports by classes of its own.

    Attributes
    ----------
    name, classes : under which it is announced, and what it tells apart
    labels : from a text to its classes' labels: ``positive``, ``negative`` or ``uncertain``; one left out is blank
    """

    name: str
    classes: tuple[str, ...]
    labels: Callable[[str], Mapping[str, str]]

    def code(self, text: str) -> str:
        """Write the labels of a text as one word.

        Parameters
        ----------
        text : str

        Returns
        -------
        str
            Of each class in its order the label's first letter.
        """
        labels = self.labels(text)
        return "".join(labels.get(name, "blank")[0] for name in self.classes)
