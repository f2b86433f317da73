"""``Task``: all that a site needs to do one task, opened once and handed down."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedtar_flare.core.draws import SECRET, derived_seed
from fedtar_flare.core.errors import DataError
from fedtar_flare.core.settings import RunSettings
from fedtar_flare.data.cohort import Cohort
from fedtar_flare.learning.ranks import ALONE, Ranks
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.site.context import Site
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.learning.learner import ReportLearner

__all__ = ["Task"]

PRODUCTION_MIN_CELL = 5
"""Fewest distinct patients of a split at a step, at a real site whose policy sets no ``min_patients``."""

_LOGGER = logging.getLogger(__name__)

Answer = tuple[Reply, Tensors | None]
"""A reply, and the tensors that go up with it."""


@dataclass(frozen=True)
class Task:
    """One task at a site. :class:`SiteExecutor` makes it once; nothing of it changes while the task runs."""

    name: str
    """``handshake``, ``train``, ``close_round`` or a task of the method's own."""
    header: TaskHeader
    """What the server says of the task: run, round, step."""
    weights: Tensors
    """The weights that came down, by name; empty where the contract sends none."""
    site: Site
    """Where the task runs: the site's name and folders, and the abort signal."""
    config: SiteConfig
    """The site file, read once for this task."""
    state: SiteState
    """What the site keeps of this run between tasks."""
    cohort: Cohort
    """The site's patients with their prepared images."""
    settings: RunSettings
    """All settings by group, as they are for this site's source of data."""
    contract: Contract
    """What the method exchanges."""
    min_cell: int
    """Fewest distinct patients behind anything that leaves: the larger of the job's number and the site's."""
    job_seed: int
    """The job's seed, which everybody knows."""
    ranks: Ranks = ALONE
    """The processes that do the task together, this one among them."""
    on_opened: Callable[[], None] | None = None
    """Called by the first of several processes once what the others need is on disk."""
    logger: logging.Logger = _LOGGER
    """The executor's log."""

    def seed(self, purpose: str, cohort: Cohort | None = None, *, of_run: bool = False) -> int:
        """Give the seed of what is random in this task, or in the whole run.

        At a site with patients it is secret: it follows from the site's key, all settings and the visits. Who knew
        which visits each mean is of could solve many means for single visits, and who chose the seed alone, or waited
        for a report to be corrected, could ask for two means that differ in one.

        Parameters
        ----------
        purpose : str
            What is drawn: different purposes get independent seeds.
        cohort : Cohort, optional
            The patients that are learnt from, where these are not :attr:`cohort`.
        of_run : bool
            Whether the seed is the same in all tasks of the run.

        Returns
        -------
        int
            The same in every process, whatever ran before: of 256 bits where it is secret, else below 2 ** 56
            (:mod:`fedtar_flare.core.draws`).
        """
        round_, step = (0, 0) if of_run else (self.header.round, self.header.step)
        return derived_seed(self._base_seed(cohort or self.cohort), self.site.name, round_, step, purpose)

    def _base_seed(self, cohort: Cohort) -> int:
        """What seeds follow from: an HMAC by the site's key, or the job's seed where nobody is a patient."""
        if self.config.without_patients:
            return self.job_seed
        given = f"chance:{self.contract.method}/{self.settings.digest()}-{self.job_seed}/{cohort.digest()}"
        return int.from_bytes(hmac.digest(cohort.key, given.encode(), "sha256"), "big") | SECRET

    def load_private(self, learner: ReportLearner) -> None:
        """Load the newest private state of the site that is not later than the header's ``after``.

        Parameters
        ----------
        learner : ReportLearner
        """
        newest = self.state.latest(self.header.after)
        if newest is None:
            raise missing_state(self.state, self.header.after)
        learner.load_private(self.state.read(newest)[0])

    def save_private(self, learner: ReportLearner, name: str | None = None) -> None:
        """Save the private state; a non-finite one is never saved, so that the version before stays good.

        Parameters
        ----------
        learner : ReportLearner
        name : str, optional
            Of the version; by default that of the task's round and step.
        """
        from fedtar_flare.learning.training import require_finite

        header, private = self.header, learner.private()
        require_finite(private)
        name = name or version(header.round, header.step)
        self.state.save(name, private, {"round": header.round, "step": header.step}, keep=header.keep)


def missing_state(state: SiteState, after: str) -> DataError:
    """Make the error of a site whose state of the run, at or before a version, is missing."""
    text = f"{state.folder} has no state of this run at or before version {after}"
    return DataError(f"{text}: restore the folder from a backup, or submit the job anew", reason="no-site-state")
