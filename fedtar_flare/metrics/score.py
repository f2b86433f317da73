"""What a score of drafts is: one object, also of another package.

A package announces its scores and labelers by entry points of their names::

    [project.entry-points."fedtar_flare.scores"]
    devices_named = "devices:SCORE"

    [project.entry-points."fedtar_flare.labelers"]
    devices = "devices:LABELER"

Installing a package lets nothing leave a hospital: a site file lists the ``scores`` of others that may be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fedtar_flare.data.minimum_cell import round_share
from fedtar_flare.metrics.labels import Pair

if TYPE_CHECKING:
    from fedtar_flare.metrics.reports import Reports

__all__ = ["Score"]


@dataclass(frozen=True)
class Score:
    """A score of drafts.

    Attributes
    ----------
    name, label : in records, and for people
    function : gives the raw value of all reports, at least 0, or None where it is undefined; by default
        the mean of ``pair``, or micro F1 of the classes of the labeler that it ``needs``
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
    pair : gives the value of a reference and a draft, None where it is undefined; a mean has intervals too
    """

    name: str
    label: str
    function: Callable[[Reports], float | None] | None = None
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

    def __post_init__(self) -> None:
        if self.pair is not None and self.concerned is None:
            object.__setattr__(self, "concerned", partial(_defined, self.pair))

    @property
    def tie(self) -> float:
        """Raw values that are no further apart than this are shown as equal, and nobody is better."""
        return 0.5 * 10.0**-self.decimals / self.scale


def raw_value(score: Score, reports: Reports) -> float | None:
    """What the function gives, else the mean over pairs, else micro F1 of a labeler's classes of a cell of patients."""
    from fedtar_flare.metrics.agreement import finding_f1  # a site file that lists a score needs no arrays

    if score.function is not None:
        return score.function(reports)
    if score.pair is not None:
        values = [value for value in reports.values(score.pair) if value is not None]
        return sum(values) / len(values) if values else None
    codes = zip(*reports.labels(score.needs), strict=True)
    sides = ([{i for i, label in enumerate(code) if label == "p"} for code in side] for side in codes)
    return finding_f1(*reports.counted(*sides))["finding_f1"]


def _defined(pair: Pair, reports: Reports) -> set[str]:
    pairs = zip(reports.patients, reports.values(pair), strict=True)
    return {patient for patient, value in pairs if value is not None}
