"""The mean of the sites' updates, ``sum_k c_k (w_k - w)``, reproducible bit for bit (FedTAR, Eq. 6)."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from fedtar_flare.files import PRIVATE

Tensors = Mapping[str, torch.Tensor]
WEIGHTINGS = ("samples", "uniform", "inverse")
IN_MEMORY = 64 * 2**20
"""Bytes of one step's updates that are kept in memory; what comes beyond them waits on disk."""


def aggregation_weights(counts: Mapping[str, int], weighting: str = "samples") -> dict[str, float]:
    """Weights c_k of the sites in Eq. 6, normalised to sum to one, in sorted site order.

    The paper's 1/n_k does not sum to one and contradicts its Theorem 1; here ``inverse`` is 1/n_k normalised.

    Args:
        counts: site to n_k, its samples at this step, from 1.
        weighting: one of :data:`WEIGHTINGS`: ``samples`` (n_k / N), ``uniform`` or ``inverse``.
    """
    size = {"samples": float, "uniform": lambda n: 1.0, "inverse": lambda n: 1.0 / n}[weighting]
    raw = {site: size(counts[site]) for site in sorted(counts)}
    total = math.fsum(raw.values())
    return {site: value / total for site, value in raw.items()}


class SpilledUpdates:
    """Accepted updates of one step until they are summed: the first in memory, others on disk.

    So memory stays flat in the number of sites and in the size of the model. The sum runs tensor by tensor in sorted
    site order in float64: the same bits whatever the order of arrival, and wherever an update waited. A context
    manager: ``folder`` is its own, emptied at the start and removed at the end. One call at a time.

    ``names`` are the tensors that every update has. Updates are checked before they come here.
    """

    def __init__(self, folder: Path | str, names: Iterable[str]):
        self.folder = Path(folder)
        self.names = sorted(names)
        self._room = IN_MEMORY
        self._kept: dict[str, torch.Tensor] = {}  # one flat tensor a site: hundreds of small ones take longer
        self._shapes: list[torch.Size] = []
        self._files: dict[str, tuple[Path, list[torch.dtype]]] = {}

    def __enter__(self) -> SpilledUpdates:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._kept.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, site: str, update: Tensors) -> None:
        """Keep one site's difference; nothing of a half-written update is ever summed."""
        tensors = [update[name] for name in self.names]
        self._shapes = self._shapes or [tensor.shape for tensor in tensors]
        size = sum(tensor.nbytes for tensor in tensors)
        if size <= self._room:
            self._room -= size
            with torch.no_grad():
                self._kept[site] = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            return
        path = self.folder / f"{len(self._files):06d}"  # a number: a site's name need not be a file's
        with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, PRIVATE), "wb") as file:
            for tensor in tensors:
                file.write(_bytes_of(tensor.detach().cpu().contiguous()))
        self._files[site] = path, [tensor.dtype for tensor in tensors]

    def mean(self, weights: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """``sum_k c_k (w_k - w)`` in float64, by tensor name (Eq. 6).

        ``weights`` maps site to c_k (see :func:`aggregation_weights`).
        """
        if weights and not self._files:
            return self._parts(self._mean_of_kept(weights))
        total: dict[str, torch.Tensor] = {}
        # one piece of memory for all tensors: to ask the system for it each time takes longer than the sum
        scratch = torch.empty(max(shape.numel() for shape in self._shapes), dtype=torch.float64)
        for site in sorted(weights):
            for name, tensor in self._tensors(site):
                part = scratch[: tensor.numel()].view(tensor.shape).copy_(tensor).mul_(weights[site])
                total[name] = total[name].add_(part) if name in total else part.clone()
        return total

    def _mean_of_kept(self, weights: Mapping[str, float]) -> torch.Tensor:
        """As :meth:`mean`, of updates that are all in memory: the same sums, of all tensors at once."""
        first, *others = sorted(weights)
        total = self._kept[first].double() * weights[first]
        for site in others:
            total += self._kept[site].double() * weights[site]
        return total

    def _parts(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A flat update by tensor name, in memory of their own."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        return {n: part.clone().view(shape) for n, shape, part in zip(self.names, self._shapes, parts, strict=True)}

    def _tensors(self, site: str) -> Iterator[tuple[str, torch.Tensor]]:
        """An update's tensors by name; of one on disk, one tensor at a time is in memory, until the next is read."""
        if site in self._kept:
            yield from self._parts(self._kept[site]).items()
            return
        path, dtypes = self._files[site]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(self._shapes, dtypes, strict=True)]
        buffer = torch.empty(max(sizes), dtype=torch.uint8)
        with path.open("rb") as file:
            for name, shape, dtype, size in zip(self.names, self._shapes, dtypes, sizes, strict=True):
                read = buffer[:size]
                if file.readinto(_bytes_of(read)) != size:
                    raise OSError(f"{path}: an update that waited here is no longer whole")
                yield name, read.view(dtype).view(shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
