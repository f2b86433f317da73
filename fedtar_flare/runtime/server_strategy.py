"""``ServerStrategy``: a method's algorithm at the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import RunSettings, build
from fedtar_flare.data.splits import SPLITS
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.protocol.tasks import TRAIN
from fedtar_flare.runtime.aggregation import SpilledUpdates, aggregation_weights
from fedtar_flare.runtime.results import check_scores
from fedtar_flare.runtime.tasking import Tensors

if TYPE_CHECKING:
    from fedtar_flare.runtime.controller import FederatedController


class ServerStrategy(ABC):
    """A method at the server; it writes :meth:`one_round`, and overrides what of the rest differs.

    ``run`` has ``train``, ``close_round`` and ``ask`` for what the sites do, ``sites``, ``visits`` and ``record``. A
    setting that is unknown or not allowed is a :class:`ConfigError`.
    """

    def __init__(self, run: FederatedController):
        self.run = run
        method = run.definition
        if run.config.rounds_per_period and not method.reports:
            raise ConfigError(f"rounds_per_period: method '{run.method}' writes no reports, and has no time steps")
        if run.config.wait_seconds and TRAIN not in run.contract.task_names:
            raise ConfigError(f"wait_seconds: method '{run.method}' waits for every site")
        pooled = any(group.form == "pooled" for group in run.contract.groups)
        if run.config.aggregation != "mean" and (pooled or not run.contract.shares):
            raise ConfigError(f"aggregation: method '{run.method}' adds up no updates; it must be 'mean'")
        kinds = {} if method.server_settings is None else {"server": method.server_settings}
        kinds |= {name: method.settings[name] for name in method.server_groups}
        given = dict(run.settings or {})
        if unknown := sorted(set(given) - set(kinds)):
            raise ConfigError(f"{unknown[0]}: method '{run.method}' has no such group of settings at the server")
        self.settings = RunSettings(**{name: build(kind, given.get(name), name) for name, kind in kinds.items()})

    @abstractmethod
    def one_round(self, w: Tensors, r: int) -> Tensors:
        """The algorithm: run round r from the weights w, and return the weights after it."""

    def steps(self, r: int) -> range:
        """The time steps of round r: 1 to T, or to the newest where visits arrive period by period."""
        n = self.run.config.rounds_per_period
        return range(1, (-(-r // n) if n else self.run.config.time_steps) + 1)

    def on_start(self) -> None:
        """Called once after the handshake, to write the method's own events."""

    # ------------------------------------------------------------------ an exchange
    def extra_tensors(self, w: Tensors) -> Tensors:
        """Further tensors that go down with w in a training task; their mean difference comes back with that of w.

        Rows of a collected group may be among them; what comes back of these goes to :meth:`collect`.
        """
        return {}

    def collect(self, site: str, rows: Tensors) -> None:
        """Take the collected rows of a site's update; :class:`ExchangeError` refuses them, and the update with them."""

    def combine(self, updates: SpilledUpdates, shares: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """One update of the sites' updates, float64, given each site's share; by default their mean (Eq. 6), or what
        ``server.aggregation`` names in its place.
        """
        return updates.combined(self.run.config.aggregation, shares)

    def shares_of(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Weights of the sites in a mean, which sum to one, given the visits n_k of those that are in it."""
        return aggregation_weights(counts, self.run.config.weighting)

    def trainers(self) -> list[str]:
        """The sites that are asked to train; by default all but those outside."""
        return self.run.members

    def trained_visits(self, r: int, t: int) -> Callable[[list[int]], int]:
        """How many visits a site trains on at step t of round r, given its counts per step; by default those of t."""
        return lambda counts: counts[t - 1]

    def largest_message(self) -> int:
        """Most values that a site's answer to a task of a round may hold; more are not fetched."""
        return self.run.schema.parameters * max(len(task.up) for task in self.run.contract.tasks)

    def check_content(self, reply: Reply) -> None:
        """Raise :class:`ExchangeError` for an answer whose fields, each valid by itself, are not what can be used.

        By default: counts that are not T whole numbers per split, malformed scores, and a loss without reports.
        """
        steps = self.run.config.time_steps
        check_scores(reply, steps)
        if (counts := reply.payload.get("counts")) is not None:
            lists = [counts.get(split) if split in SPLITS else None for split in {*SPLITS, *counts}]
            whole = all(isinstance(n, int) and n >= 0 for values in lists for n in values or ())
            if not whole or any(not isinstance(v, list | tuple) or len(v) != steps for v in lists):
                raise ExchangeError(f"the field 'counts' is not {steps} whole numbers for each split")
        if "validation_loss" in reply.numbers and reply.numbers.get("reports", 0) < 1:
            raise ExchangeError("it sends a validation loss without a number of reports")

    # ------------------------------------------------------------------ what a resumed run needs
    def fixed_settings(self) -> dict[str, Any]:
        """Settings of the method that a resumed run must share, those of ``server`` without their group's name."""
        settings = self.settings.to_dict()
        return {**settings.pop("server", {}), **settings}

    def state(self) -> dict[str, torch.Tensor]:
        """Further tensors than w for the checkpoint."""
        return {}

    def info(self) -> Any:
        """What of the state is no tensor, as JSON primitives; None: nothing."""
        return None

    def load_info(self, info: Any) -> None:
        """Restore what :meth:`info` gave; called before :meth:`load_state`, which restores the tensors."""

    def load_state(self, state: Tensors) -> None:
        """Restore what :meth:`state` gave."""

    def numbers(self) -> dict[str, list[float]]:
        """Numbers to show with a run's progress."""
        return {}
