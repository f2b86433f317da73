"""The mean of the sites' updates, ``sum_k c_k (w_k - w)``, reproducible bit for bit (FedTAR, Eq. 6)."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from fedtar_flare.files import PRIVATE

Tensors = Mapping[str, torch.Tensor]
WEIGHTINGS = ("samples", "uniform", "inverse")
IN_MEMORY = 64 * 2**20
"""Bytes of one step's updates that are kept in memory; what comes beyond them waits on disk."""
BLOCK = 2**20
"""Values that are summed at a time: more than a block of an update is not read from disk at once."""


def aggregation_weights(counts: Mapping[str, int], weighting: str = "samples") -> dict[str, float]:
    """Weights c_k of the sites in Eq. 6, normalised to sum to one, in sorted site order, given each site's n_k >= 1.

    ``samples`` is n_k / N. The paper's 1/n_k does not sum to one and contradicts its Theorem 1; here ``inverse`` is
    1/n_k normalised.
    """
    size = {"samples": float, "uniform": lambda n: 1.0, "inverse": lambda n: 1.0 / n}[weighting]
    raw = {site: size(counts[site]) for site in sorted(counts)}
    total = math.fsum(raw.values())
    return {site: value / total for site, value in raw.items()}


class SpilledUpdates:
    """Accepted updates of one step until they are summed: the first in memory, others on disk.

    So memory stays flat in the number of sites. The sum runs block by block in sorted site order in float64: the same
    bits whatever the order of arrival, and wherever an update waited. A context manager: ``folder`` is its own, emptied
    at the start and removed at the end. One call at a time.

    ``names`` are the tensors that every (already checked) update has. Of those in ``by_rows`` an update says nothing in
    a row that is zero: the mean of a row is over the sites whose row is not.
    """

    def __init__(self, folder: Path | str, names: Iterable[str], by_rows: Iterable[str] = ()):
        self.folder = Path(folder)
        self.names = sorted(names)
        self.by_rows = sorted(by_rows)
        self._said: dict[str, dict[str, torch.Tensor]] = {}
        self._room = IN_MEMORY
        self._kept: dict[str, torch.Tensor] = {}  # one flat tensor a site: hundreds of small ones take longer
        self._shapes: list[torch.Size] = []
        self._files: dict[str, tuple[Path, torch.dtype]] = {}

    def __enter__(self) -> SpilledUpdates:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._kept.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, site: str, update: Tensors) -> None:
        """Keep one site's difference; nothing of a half-written update is ever summed."""
        tensors = [update[name].detach() for name in self.names]
        self._shapes = self._shapes or [tensor.shape for tensor in tensors]
        self._said[site] = {name: update[name].detach()[..., None].flatten(1).any(1).cpu() for name in self.by_rows}
        size = sum(tensor.nbytes for tensor in tensors)
        if size <= self._room:
            self._room -= size
            self._kept[site] = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            return
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        path = self.folder / f"{len(self._files):06d}"  # a number: a site's name need not be a file's
        with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, PRIVATE), "wb") as file:
            for tensor in tensors:
                file.write(_bytes_of(tensor.to("cpu", dtype).contiguous()))
        self._files[site] = path, dtype

    def mean(self, weights: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """``sum_k c_k (w_k - w)`` in float64, by tensor name (Eq. 6), given site to c_k; the tensors are views of one.

        Of a tensor in ``by_rows`` the c_k of each row are those of the sites that say something in it, scaled to the
        sum of all; a row in which nobody does stays zero.
        """
        if not weights:
            return {}
        sizes = [shape.numel() for shape in self._shapes]
        total = torch.zeros(sum(sizes), dtype=torch.float64)
        scratch = torch.empty(min(BLOCK, len(total)), dtype=torch.float64)  # new memory for each block takes longer
        for site in sorted(weights):
            start = 0
            for block in self._blocks(site):
                part = scratch[: len(block)].copy_(block).mul_(weights[site])
                total[start : start + len(part)].add_(part)
                start += len(part)
        parts = zip(self.names, self._shapes, total.split(sizes), strict=True)
        mean = {name: part.view(shape) for name, shape, part in parts}
        for name in self.by_rows:
            shares = sum(weights[site] * self._said[site][name].double() for site in sorted(weights))
            assert isinstance(shares, torch.Tensor)
            scale = math.fsum(weights.values()) / shares.where(shares > 0, 1.0)
            mean[name] *= scale.view(-1, *[1] * (mean[name].dim() - 1))
        return mean

    def reduced(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The updates put together value by value in float64, by tensor name, such as their coordinate-wise median.

        ``reduce`` makes (values,) of a block of all sites' updates, (sites, values), in sorted order of the sites.
        """
        sites, sizes = sorted(self._said), [shape.numel() for shape in self._shapes]
        blocks = zip(*map(self._blocks, sites), strict=True)
        total = torch.cat([reduce(torch.stack([part.double() for part in parts])) for parts in blocks])
        parts = zip(self.names, self._shapes, total.split(sizes), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def _blocks(self, site: str) -> Iterator[torch.Tensor]:
        """A site's update, flat, in blocks; of one on disk, a block at a time is in memory, until the next is read."""
        if site in self._kept:
            yield from self._kept[site].split(BLOCK)
            return
        path, dtype = self._files[site]
        left = sum(shape.numel() for shape in self._shapes)
        buffer = torch.empty(min(BLOCK, left), dtype=dtype)
        with path.open("rb", buffering=0) as file:
            while left:
                block = buffer[: min(BLOCK, left)]
                if file.readinto(_bytes_of(block)) != block.nbytes:
                    raise OSError(f"{path}: an update that waited here is no longer whole")
                yield block
                left -= len(block)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
