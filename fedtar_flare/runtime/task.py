"""``Task``: all that a site needs to do one task, opened once and handed down."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fedtar_flare.core.errors import DataError
from fedtar_flare.core.settings import RunSettings
from fedtar_flare.data.cohort import Cohort
from fedtar_flare.learning.ranks import ALONE, Ranks
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader
from fedtar_flare.site.context import Site
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import SiteState

__all__ = ["Answer", "PRODUCTION_MIN_CELL", "Task", "missing_state", "seed_of"]

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
    send_scalar: Callable[[str, float, int], None] = lambda tag, value, step: None
    """Sends one point of the curve ``tag`` at ``step`` to the server's TensorBoard."""
    on_opened: Callable[[], None] | None = None
    """Called by the first of several processes once what the others need is on disk."""
    logger: logging.Logger = _LOGGER
    """The executor's log."""

    def seed(self, purpose: str, cohort: Cohort | None = None, *, of_run: bool = False) -> int:
        """Seed of what is random in this task, or in the whole run.

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
            Below 2 ** 56; the same in every process, whatever ran before.
        """
        round_, step = (0, 0) if of_run else (self.header.round, self.header.step)
        return seed_of(self.secret(cohort or self.cohort), self.site.name, round_, step, purpose)

    def secret(self, cohort: Cohort) -> str:
        """What :meth:`seed` follows from: an HMAC by the site's key, or the job's seed where nobody is a patient.

        Parameters
        ----------
        cohort : Cohort
            The patients that are learnt from.

        Returns
        -------
        str
            Hexadecimal digits, or the seed in decimal ones.
        """
        if self.config.without_patients:
            return str(self.job_seed)
        given = f"chance:{self.contract.method}/{self.settings.digest()}-{self.job_seed}/{cohort.digest()}"
        return hmac.digest(cohort.key, given.encode(), "sha256").hex()


def seed_of(base: int | str, site: str, round_: int, step: int, purpose: str) -> int:
    """Seed that is the same in every process, independent of what ran before.

    Parameters
    ----------
    base : int or str
        The job's seed, or a site's secret.
    site : str
        The site's name.
    round_, step : int
        Of the task.
    purpose : str
        What is drawn.

    Returns
    -------
    int
        Below 2 ** 56.
    """
    text = f"{base}/{site}/{round_}/{step}/{purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def missing_state(state: SiteState, after: str) -> DataError:
    """The error of a site whose state of the run is missing.

    Parameters
    ----------
    state : SiteState
        The state that was looked for.
    after : str
        The newest version that would have done.

    Returns
    -------
    DataError
        With reason ``no-site-state``.
    """
    return DataError(
        f"{state.folder} has no state of this run at or before version {after}; it was deleted, or the run began on "
        "another machine. Restore the folder from a backup, or submit the job anew",
        reason="no-site-state",
    )
