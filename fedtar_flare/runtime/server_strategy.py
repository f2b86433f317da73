"""``ServerStrategy``: a method's algorithm at the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import RunSettings, build, check_names
from fedtar_flare.data.cells import SPLITS
from fedtar_flare.protocol.contract import TRAIN
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.runtime.aggregation import SpilledUpdates, site_weights
from fedtar_flare.runtime.results import check_scores

if TYPE_CHECKING:
    from fedtar_flare.runtime.controller import FederatedController

__all__ = ["ServerStrategy"]


class ServerStrategy(ABC):
    """A method at the server: it writes :meth:`one_round` and overrides what else differs.

    Parameters
    ----------
    run : FederatedController
        The run: ``train``, ``close_round`` and ``send_task`` have the sites work, ``config`` has the settings of every
        method, ``membership`` the sites and their numbers of visits, ``record`` takes events.

    Attributes
    ----------
    settings : RunSettings
        The method's own settings at the server, by group.

    Raises
    ------
    ConfigError
        A setting is unknown or not allowed for the method.
    """

    def __init__(self, run: FederatedController):
        self.run = run
        method, contract, config = run.definition, run.contract, run.config
        for name in ("rounds_per_period", "unseen"):
            if getattr(config, name) and not method.reports:
                raise ConfigError(f"{name}: method '{run.method}' writes no reports, and this setting is about them")
        if config.wait_seconds and TRAIN not in contract.task_names:
            raise ConfigError(f"wait_seconds: method '{run.method}' waits for every site")
        pooled = any(group.form == "pooled" for group in contract.groups)
        if config.aggregation != "mean" and (pooled or not contract.shares):
            raise ConfigError(f"aggregation: method '{run.method}' adds up no updates; it must be 'mean'")
        kinds = {} if method.server_settings is None else {"server": method.server_settings}
        kinds |= {name: method.settings[name] for name in method.server_groups}
        given = run.settings or {}
        check_names(given, kinds, f"method '{run.method}' at the server", "group")
        self.settings = RunSettings(**{name: build(kind, given.get(name), name) for name, kind in kinds.items()})

    @abstractmethod
    def one_round(self, w: Tensors, r: int) -> Tensors:
        """Run round r of the algorithm.

        Parameters
        ----------
        w : mapping of str to Tensor
            Weights before the round.
        r : int
            Round, from 1.

        Returns
        -------
        mapping of str to Tensor
            Weights after the round, float32.
        """

    def steps(self, r: int) -> range:
        """List the time steps of round r.

        Parameters
        ----------
        r : int

        Returns
        -------
        range
            1 to T, or to the newest period where visits arrive period by period.
        """
        n = self.run.config.rounds_per_period
        return range(1, (-(-r // n) if n else self.run.config.time_steps) + 1)

    def on_start(self) -> None:
        """Write the method's own events; called once after the handshake."""

    # ------------------------------------------------------------------ an exchange
    def extra_tensors(self, w: Tensors) -> Tensors:
        """Give further tensors that go down with the weights in a training task.

        Parameters
        ----------
        w : mapping of str to Tensor

        Returns
        -------
        mapping of str to Tensor
            The aggregate holds their differences too; rows of a collected group come back to :meth:`collect` instead.
        """
        return {}

    def collect(self, site: str, rows: Tensors) -> None:
        """Take the rows of a collected group that came with a site's update.

        Parameters
        ----------
        site : str
        rows : mapping of str to Tensor
            Not empty. :class:`ExchangeError` refuses them, and the update with them.
        """

    def aggregate(self, updates: SpilledUpdates, shares: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """Make one update of the sites' updates: their mean (Eq. 6), or what ``server.aggregation`` names.

        Parameters
        ----------
        updates : SpilledUpdates
        shares : mapping of str to float
            c_k by site, which sum to one.

        Returns
        -------
        dict of str to Tensor
            In float64.
        """
        return updates.aggregate(self.run.config.aggregation, shares)

    def shares_of(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Weight the sites in a mean.

        Parameters
        ----------
        counts : mapping of str to int
            Visits n_k of each site whose update is in the mean.

        Returns
        -------
        dict of str to float
            c_k by site, which sum to one.
        """
        return site_weights(counts, self.run.config.weighting)

    def trainers(self) -> list[str]:
        """Choose the sites that train, by default all but those in ``server.unseen``.

        Returns
        -------
        list of str
        """
        return self.run.membership.members

    def trained_visits(self, counts: Sequence[int], r: int, t: int) -> int:
        """Count the visits that a site trains on, by default those of step t.

        Parameters
        ----------
        counts : sequence of int
            The site's training visits per time step.
        r, t : int
            Round and time step.

        Returns
        -------
        int
        """
        return counts[t - 1]

    def largest_message(self) -> int:
        """Bound the values that an answer to a task of a round may hold; more is not fetched.

        Returns
        -------
        int
        """
        return self.run.membership.schema.parameters * max(len(task.up) for task in self.run.contract.tasks)

    def check_content(self, reply: Reply) -> None:
        """Check fields of an answer, each valid by itself, against each other and the run.

        Parameters
        ----------
        reply : Reply

        Raises
        ------
        ExchangeError
            Counts are not T whole numbers per split, scores are malformed, or a loss comes without reports.
        """
        steps, counts = self.run.config.time_steps, reply.payload.get("counts")
        check_scores(reply, steps)
        if counts is not None:
            lists = [counts.get(split) if split in SPLITS else None for split in {*SPLITS, *counts}]
            whole = all(isinstance(n, int) and n >= 0 for values in lists for n in values or ())
            if not whole or any(not isinstance(v, list | tuple) or len(v) != steps for v in lists):
                raise ExchangeError(f"the field 'counts' is not {steps} whole numbers for each split")
        if "validation_loss" in reply.numbers and reply.numbers.get("reports", 0) < 1:
            raise ExchangeError("it sends a validation loss without a number of reports")

    # ------------------------------------------------------------------ what a resumed run needs
    def fixed_settings(self) -> dict[str, Any]:
        """List the method's settings that a resumed run must share.

        Returns
        -------
        dict
            By name for the group ``server``, by group for others.
        """
        settings = {name: group.model_dump(mode="json") for name, group in self.settings.items()}  # as it is read back
        return {**settings.pop("server", {}), **settings}

    def state(self) -> dict[str, torch.Tensor]:
        """Give further tensors than the weights for the checkpoint.

        Returns
        -------
        dict of str to Tensor
        """
        return {}

    def info(self) -> Any:
        """Give what of the state is no tensor, as JSON primitives.

        Returns
        -------
        Any
        """
        return None

    def load_info(self, info: Any) -> None:
        """Restore :meth:`info`; called before :meth:`load_state`.

        Parameters
        ----------
        info : Any
        """

    def load_state(self, state: Tensors) -> None:
        """Restore :meth:`state`.

        Parameters
        ----------
        state : mapping of str to Tensor
        """

    def numbers(self) -> dict[str, list[float]]:
        """Give numbers to show with the progress of a run, by name.

        Returns
        -------
        dict of str to list of float
        """
        return {}
