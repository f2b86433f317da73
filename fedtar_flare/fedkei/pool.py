"""The server's pool: every module that a site has handed in, by site and task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtar_flare.errors import ExchangeError
from fedtar_flare.fedkei.mixing import Kind, Layout, Origin, origin_of


@dataclass(frozen=True)
class Module:
    """What a site learnt in a task (``task`` counts the run's steps from 1): theta, by tensor name.

    ``gap``: by how much tuning lowered the validation loss, where the site said so.
    """

    site: str
    task: int
    tensors: Mapping[str, Tensor]
    gap: float | None = None


class Pool:
    """Modules of all sites, ordered by task and site, whenever they arrived.

    Args:
        start: w0, the common start, float32 by name on the CPU; every module has its names and shapes.
    """

    def __init__(self, start: Mapping[str, Tensor]):
        self.start = {name: start[name].detach().cpu().clone() for name in sorted(start)}
        self.layout = Layout.of(self.start)
        self._modules: dict[tuple[int, str], Module] = {}

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def modules(self) -> tuple[Module, ...]:
        """All, by task and site."""
        return tuple(self._modules[key] for key in sorted(self._modules))

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites with a module, sorted."""
        return tuple(sorted({module.site for module in self.modules}))

    def add(self, site: str, task: int, difference: Mapping[str, Tensor], gap: float | None = None) -> None:
        """Keep theta = w0 + ``difference``, which ADAPT sent; a site's earlier module of the task is replaced.

        Raises:
            ExchangeError: a tensor is missing, unknown, misshapen or not finite; names it, and keeps nothing.
        """
        self.layout.columns({name: value[None] for name, value in difference.items()})
        for name, value in sorted(difference.items()):
            if not torch.isfinite(value).all():
                raise ExchangeError(f"tensor '{name}' of a module has values that are not finite (NaN or infinity)")
        theta = {name: value + difference[name].detach().cpu().to(value.dtype) for name, value in self.start.items()}
        self._modules[task, site] = Module(site, task, theta, gap)

    def leave(self, site: str) -> int:
        """Forget all modules of a site; how many there were."""
        gone = [key for key in self._modules if key[1] == site]
        for key in gone:
            del self._modules[key]
        return len(gone)

    def before(self, task: int) -> tuple[Module, ...]:
        """Modules of tasks before this one."""
        return tuple(module for module in self.modules if module.task < task)

    def last(self, task: int) -> tuple[Module, ...]:
        """Each site's latest module before this task, by site."""
        latest = {module.site: module for module in self.before(task)}
        return tuple(latest[site] for site in sorted(latest))

    def matrix(self, kind: Kind, modules: Sequence[Module], origin: Origin = "zero") -> Tensor:
        """M (d, N), float32: these modules of one kind as columns, less the origin."""
        return torch.stack([self.layout.vectors(m.tensors)[kind] for m in modules], dim=1) - self.origin(kind, origin)

    def origin(self, kind: Kind, origin: Origin) -> Tensor:
        """The origin as a column (d, 1)."""
        return self.layout.vectors(origin_of(self.start, origin))[kind][:, None]

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Tensors ``<n>.<name>``, and site, task and gap of each module n as JSON primitives, for a checkpoint."""
        tensors = {f"{n}.{name}": value for n, m in enumerate(self.modules) for name, value in m.tensors.items()}
        return tensors, [{"site": m.site, "task": m.task, "gap": m.gap} for m in self.modules]

    def load(self, tensors: Mapping[str, Tensor], info: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state` gave, bit by bit; tensors of other names are ignored.

        Raises:
            ExchangeError: a tensor is missing or misshapen.
        """
        found: dict[tuple[int, str], Module] = {}
        for n, who in enumerate(info):
            module = {name: tensors[f"{n}.{name}"] for name in self.start if f"{n}.{name}" in tensors}
            self.layout.columns({name: value[None] for name, value in module.items()})
            site, task, gap = str(who["site"]), int(who["task"]), who.get("gap")
            found[task, site] = Module(site, task, module, None if gap is None else float(gap))
        self._modules = found
