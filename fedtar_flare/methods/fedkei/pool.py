"""The server's pool: every module that a site has handed in, by site and task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.tensor_file import without_prefix
from fedtar_flare.methods.fedkei.contract import IMPORTANCE, PULL
from fedtar_flare.methods.fedkei.mixing import Kind, Layout, origin_of


@dataclass(frozen=True)
class Module:
    """theta that a site learnt in a task (counted from 1), as tensors by name.

    ``gap`` is how much tuning lowered the validation loss, where the site reports it, ``importance`` the Fisher
    information by tensor name, where the plan uses it.
    """

    site: str
    task: int
    tensors: Mapping[str, Tensor]
    gap: float | None = None
    importance: Mapping[str, Tensor] = field(default_factory=dict)


class Pool:
    """Modules of all sites, ordered by task and site, whenever they arrived.

    Each has the names and shapes of ``start``, which is w0, float32 by name.
    """

    def __init__(self, start: Mapping[str, Tensor]):
        self.start = {name: start[name].detach().cpu().clone() for name in sorted(start)}
        self.layout = Layout.of(self.start)
        self._modules: dict[tuple[int, str], Module] = {}

    @property
    def modules(self) -> tuple[Module, ...]:
        """All modules, by task and site."""
        return tuple(self._modules[key] for key in sorted(self._modules))

    def add(self, site: str, task: int, sent: Mapping[str, Tensor], gap: float | None = None) -> None:
        """Add the module that ADAPT ``sent``, of checked names and shapes: theta = w0 + its difference, and importance.

        It replaces the site's earlier module of the task. Raises :class:`ExchangeError` for a negative importance.
        """
        importance = without_prefix(sent, IMPORTANCE)
        for name, value in sorted(importance.items()):
            if (value < 0).any():
                raise ExchangeError(f"the importance of tensor '{name}' has negative values")
        theta = {name: value + sent[name] for name, value in self.start.items()}
        self._modules[task, site] = Module(site, task, theta, gap, importance)

    def leave(self, site: str) -> int:
        """Remove all modules of a site; returns their number."""
        keys = [key for key in self._modules if key[1] == site]
        for key in keys:
            del self._modules[key]
        return len(keys)

    def before(self, task: int) -> tuple[Module, ...]:
        """Modules of tasks before this one."""
        return tuple(module for module in self.modules if module.task < task)

    def last(self, task: int) -> tuple[Module, ...]:
        """Each site's latest module before this task, by site."""
        latest = {module.site: module for module in self.before(task)}
        return tuple(latest[site] for site in sorted(latest))

    def curvature(self, task: int) -> dict[str, Tensor]:
        """FedCurv's sums over the sites' latest modules before this task: (1, *shape) each, 0 without any module.

        They are ``sum_j F_j`` under IMPORTANCE and ``sum_j F_j theta_j`` under PULL. FedCurv leaves a site's own module
        out of its sum; here it is included, so that all sites get one message and need not remember what they sent.
        """
        sums = {
            f"{prefix}{name}": torch.zeros_like(v) for prefix in (IMPORTANCE, PULL) for name, v in self.start.items()
        }
        for module in self.last(task):
            for name, value in module.importance.items():
                sums[f"{IMPORTANCE}{name}"] += value
                sums[f"{PULL}{name}"] += value * module.tensors[name]
        return {name: value[None] for name, value in sums.items()}

    def matrix(self, kind: Kind, modules: Sequence[Module]) -> Tensor:
        """M (d, N), float32: these modules of one kind as columns, minus the origin."""
        return torch.stack([self.layout.vectors(m.tensors)[kind] for m in modules], dim=1) - self.origin(kind)

    def origin(self, kind: Kind) -> Tensor:
        """The origin as a column (d, 1)."""
        return self.layout.vectors(origin_of(self.start))[kind][:, None]

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Tensors ``<n>.<name>`` and ``<n>.importance.<name>``; and site, task and gap of each module n as JSON
        primitives, for a checkpoint.
        """
        tensors = {
            f"{n}.{prefix}{name}": value
            for n, m in enumerate(self.modules)
            for prefix, own in (("", m.tensors), (IMPORTANCE, m.importance))
            for name, value in own.items()
        }
        return tensors, [{"site": m.site, "task": m.task, "gap": m.gap} for m in self.modules]

    def load(self, tensors: Mapping[str, Tensor], info: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state` gave."""
        self._modules = {}
        for n, who in enumerate(info):
            own = without_prefix(tensors, f"{n}.")
            theta = {name: own[name] for name in self.start}
            module = Module(who["site"], who["task"], theta, who["gap"], without_prefix(own, IMPORTANCE))
            self._modules[module.task, module.site] = module
