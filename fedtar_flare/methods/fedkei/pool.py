"""The server's pool: every module that a site has handed in, by site and task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedtar_flare.errors import ExchangeError
from fedtar_flare.methods.fedkei.mixing import Kind, Layout, origin_of
from fedtar_flare.methods.fedkei.objectives import IMPORTANCE, Curvature


@dataclass(frozen=True)
class Module:
    """What a site learnt in a task (``task`` counts the run's steps from 1): theta, by tensor name.

    ``gap``: by how much tuning lowered the validation loss, where the site said so. ``importance``: its Fisher
    information by tensor name, where the plan asks for it.
    """

    site: str
    task: int
    tensors: Mapping[str, Tensor]
    gap: float | None = None
    importance: Mapping[str, Tensor] = field(default_factory=dict)


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

    def add(
        self,
        site: str,
        task: int,
        difference: Mapping[str, Tensor],
        gap: float | None = None,
        importance: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Keep theta = w0 + ``difference``, which ADAPT sent; a site's earlier module of the task is replaced.

        Raises:
            ExchangeError: a tensor is missing, unknown, misshapen or not finite, or an importance is negative; names
                it, and keeps nothing.
        """
        for name, value in sorted((importance or {}).items()):
            if not (torch.isfinite(value) & (value >= 0)).all():
                raise ExchangeError(f"the importance of tensor '{name}' has values that are negative or not finite")
        if importance:
            self.layout.columns({name: value[None] for name, value in importance.items()})
        self.layout.columns({name: value[None] for name, value in difference.items()})
        for name, value in sorted(difference.items()):
            if not torch.isfinite(value).all():
                raise ExchangeError(f"tensor '{name}' of a module has values that are not finite (NaN or infinity)")
        theta = {name: value + difference[name].detach().cpu().to(value.dtype) for name, value in self.start.items()}
        kept = {name: value.detach().cpu().float() for name, value in (importance or {}).items()}
        self._modules[task, site] = Module(site, task, theta, gap, kept)

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

    def curvature(self, task: int) -> Curvature:
        """Of the sites' latest modules before this task (FedCurv); zero without any."""
        total, pull = ({name: torch.zeros_like(value) for name, value in self.start.items()} for _ in range(2))
        for module in self.last(task):
            for name, value in module.importance.items():
                total[name] += value
                pull[name] += value * module.tensors[name]
        return Curvature(total, pull)

    def matrix(self, kind: Kind, modules: Sequence[Module]) -> Tensor:
        """M (d, N), float32: these modules of one kind as columns, less the origin."""
        return torch.stack([self.layout.vectors(m.tensors)[kind] for m in modules], dim=1) - self.origin(kind)

    def origin(self, kind: Kind) -> Tensor:
        """The origin as a column (d, 1)."""
        return self.layout.vectors(origin_of(self.start))[kind][:, None]

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Tensors ``<n>.<name>`` and ``<n>.importance.<name>``; and site, task and gap of each module n as JSON
        primitives, for a checkpoint.
        """
        tensors = {f"{n}.{name}": value for n, m in enumerate(self.modules) for name, value in m.tensors.items()}
        for n, m in enumerate(self.modules):
            tensors |= {f"{n}.{IMPORTANCE}{name}": value for name, value in m.importance.items()}
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
            own = f"{n}.{IMPORTANCE}"
            importance = {key.removeprefix(own): value for key, value in tensors.items() if key.startswith(own)}
            site, task, gap = str(who["site"]), int(who["task"]), who.get("gap")
            found[task, site] = Module(site, task, module, None if gap is None else float(gap), importance)
        self._modules = found
