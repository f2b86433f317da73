"""The mean of the sites' updates, ``sum_k c_k (w_k - w)``, reproducible bit for bit (FedTAR, Eq. 6)."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fedtar_flare.files import replacing

Tensors = Mapping[str, torch.Tensor]
WEIGHTINGS = ("samples", "uniform", "inverse")
IN_MEMORY = 64 * 2**20
"""Bytes of one step's updates that are kept in memory; what comes beyond them waits on disk."""
BLOCK = 2**20
"""Values that are summed at a time: more than a block of an update is not read from disk at once."""
_FLAT = "update"


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

    So memory stays flat in the number of sites. Each update is one flat tensor, as hundreds of small ones take longer.
    The sum runs block by block in sorted site order in float64: the same bits whatever the order of arrival, and
    wherever an update waited. A context manager: ``folder`` is its own, emptied at the start and removed at the end.
    One call at a time.

    ``names`` are the tensors that every update has. Updates are checked before they come here.
    """

    def __init__(self, folder: Path | str, names: Iterable[str]):
        self.folder = Path(folder)
        self.names = sorted(names)
        self._room = IN_MEMORY
        self._kept: dict[str, torch.Tensor] = {}
        self._shapes: list[torch.Size] = []
        self._files: dict[str, Path] = {}

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
        with torch.no_grad():  # a copy: the message's memory is FLARE's
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
        if flat.nbytes <= self._room:
            self._room -= flat.nbytes
            self._kept[site] = flat
            return
        path = self.folder / f"{len(self._files):06d}.safetensors"  # a number: a site's name need not be a file's
        with replacing(path) as temporary:
            save_file({_FLAT: flat}, temporary)
        self._files[site] = path

    def mean(self, weights: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """``sum_k c_k (w_k - w)`` in float64, by tensor name (Eq. 6); the tensors are views of one.

        ``weights`` maps site to c_k (see :func:`aggregation_weights`).
        """
        if not weights:
            return {}
        sizes = [shape.numel() for shape in self._shapes]
        total = torch.empty(sum(sizes), dtype=torch.float64)
        first = min(weights)
        for site in sorted(weights):
            with self._open(site) as flat:
                for start in range(0, len(total), BLOCK):
                    own, part = total[start : start + BLOCK], flat[start : start + BLOCK].double() * weights[site]
                    own.copy_(part) if site == first else own.add_(part)
        parts = zip(self.names, self._shapes, total.split(sizes), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    @contextmanager
    def _open(self, site: str) -> Iterator[Any]:
        """A site's flat update, to be sliced; of one on disk, a slice at a time is in memory."""
        if site in self._kept:
            yield self._kept[site]
        else:
            with safe_open(str(self._files[site]), framework="pt") as file:
                yield file.get_slice(_FLAT)
