"""Which of a site's versions of a run belongs to the adapter of a round, for drafting after the run."""

from __future__ import annotations

import logging
from pathlib import Path

from fedtar_flare.errors import ConfigError
from fedtar_flare.protocol.messages import version
from fedtar_flare.site.state import SiteState

logger = logging.getLogger(__name__)


def state_of_run(folder: Path, run_id: str, part: str) -> SiteState:
    """The state in a folder ``<run id>/<site>``; :class:`ConfigError` where it is of another run.

    ``part`` says what the site keeps, for messages.
    """
    if folder.parent.name != run_id:
        raise ConfigError(
            f"{folder} is the state of run {folder.parent.name}, the adapter is of run {run_id}; the {part} "
            "fits only the run that it was trained in"
        )
    return SiteState(folder.parent.parent, folder.parent.name, folder.name)


def trained_version(state: SiteState, round_: int, time_steps: int, part: str) -> str:
    """The version that was the site's last trained one at the end of a round.

    It is of an earlier round where the site did not train in this one, and its state shows that it was there later: the
    run then scored the site with this version too. Raises :class:`ConfigError` where it cannot be told.
    """
    found = state.latest(version(round_, time_steps))
    if found is None or found == version(0, 0):
        raise ConfigError(
            f"{state.folder} has no {part} of round {round_}, the adapter's (versions there: "
            f"{', '.join(state.versions()) or 'none'}). Those of early rounds are deleted while a run goes on, and "
            "one of another round does not fit. Draft with the shared adapter alone (without --state)"
        )
    trained, last = (int(name[:4]) for name in (found, max([found, *state.answered().values()])))
    if last < round_:
        raise ConfigError(
            f"{state.folder} has the {part} of round {trained} and ends with round {last}; the adapter is of "
            f"round {round_}. Either this is an older copy of the state, or the site left the run; the two do not fit. "
            f"Name the state as it was after round {round_}, or draft with the shared adapter alone (without --state)"
        )
    if trained != round_:
        logger.warning("the site did not train in round %d; its %s is of round %d", round_, part, trained)
    return found
