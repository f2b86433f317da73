"""What a score of drafts is, and a labeler of reports: one object each, also of another package.

A package announces them by entry points of their names::

    [project.entry-points."fedtar_flare.scores"]
    devices_named = "devices:SCORE"

    [project.entry-points."fedtar_flare.labelers"]
    devices = "devices:LABELER"

Installing a package lets nothing leave a hospital: a site file lists the ``scores`` of others that may be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fedtar_flare.data.minimum_cell import round_share

if TYPE_CHECKING:
    from fedtar_flare.metrics.reports import Reports

__all__ = ["Labeler", "Score"]

Pair = Callable[[str, str], float | None]
"""From reference and draft to a value; None where it is undefined."""


@dataclass(frozen=True)
class Score:
    """A score of drafts.

    Attributes
    ----------
    name, label : in records, and for people
    function : gives the raw value, at least 0; None where it is undefined
    unit, scale, decimals : people see the raw value times ``scale``, in ``unit``
    most : largest raw value
    higher_is_better : None: the nearer to 1, the better
    by_step : whether it is computed at each time step too, and not only over all steps
    needs : what reports must have besides the texts: ``findings``, or labels of the labeler of this name
    concerned : the patients that the value rests on, where these are not all; with fewer than a minimum cell it is None
    rounding : rounds the value, given the number of reports or patients that it rests on, and the minimum cell; a score
        of another package is rounded as a share of ``most``
    curve : whether a chart over rounds is drawn
    group : scores of a group share a table; all of them are computed at each step, or none is
    pair : the value of a single draft, of which the score is the mean
    """

    name: str
    label: str
    function: Callable[[Reports], float | None]
    unit: str = "x 100"
    scale: float = 100.0
    most: float = 1.0
    higher_is_better: bool | None = True
    decimals: int = 1
    by_step: bool = False
    needs: str = ""
    concerned: Callable[[Reports], AbstractSet[str]] | None = None
    rounding: Callable[[float, int, int], float] = round_share
    curve: bool = False
    group: str = "Classes and repetition"
    pair: Pair | None = None

    @property
    def tie(self) -> float:
        """Raw values that are no further apart than this are shown as equal, and nobody is better."""
        return 0.5 * 10.0**-self.decimals / self.scale

    @classmethod
    def of_pairs(cls, name: str, label: str, pair: Pair, **shown: Any) -> Score:
        """Make a score that is the mean of a function over pairs, which has intervals too.

        Parameters
        ----------
        name, label : str
        pair : function from a reference and a draft to a value, None where it is undefined
        **shown : further fields

        Returns
        -------
        Score
        """
        return cls(name, label, partial(_mean, pair), concerned=partial(_defined, pair), pair=pair, **shown)

    @classmethod
    def of_labels(cls, name: str, label: str, labeler: Labeler, **shown: Any) -> Score:
        """Make a score that is the micro F1 of a labeler's classes, of those that a minimum cell of patients has.

        Parameters
        ----------
        name, label : str
        labeler : Labeler
        **shown : further fields

        Returns
        -------
        Score
        """
        return cls(name, label, partial(_micro_f1, labeler), needs=labeler.name, **shown)


def _micro_f1(labeler: Labeler, reports: Reports) -> float | None:
    from fedtar_flare.metrics.agreement import label_counts  # a site file that lists a score needs no arrays

    counts = label_counts(labeler.classes, reports.labels(labeler.name)).guarded(reports.patients, reports.min_cell)
    return counts.averages(reports.min_cell)["micro"]["f1"] if counts.classes else None


def _mean(pair: Pair, reports: Reports) -> float | None:
    values = [value for value in reports.values(pair) if value is not None]
    return sum(values) / len(values) if values else None


def _defined(pair: Pair, reports: Reports) -> set[str]:
    pairs = zip(reports.patients, reports.values(pair), strict=True)
    return {patient for patient, value in pairs if value is not None}


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
