"""The aggregate of the sites' updates: their mean, ``sum_k c_k (w_k - w)`` (FedTAR, Eq. 6), and robust ones.

All are reproducible bit for bit. ``median``, ``trimmed_mean``: Yin et al., "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates" (ICML 2018), Algorithm 1, by coordinate; every site counts the same.
``norm_bounded_mean``: Sun et al., "Can You Really Backdoor Federated Learning?" (2019), ``sum_k c_k d_k min(1, M /
|d_k|)``, with M the median of the step's norms as in Andrew et al., "Differentially Private Learning with Adaptive
Clipping" (NeurIPS 2021).
"""

import functools
import math
import os
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch

from fedtar_flare.core.files import PRIVATE
from fedtar_flare.protocol.exchange import Tensors

__all__ = ["SpilledUpdates"]

Weighting = Literal["samples", "uniform", "inverse"]
Aggregation = Literal["mean", "norm_bounded_mean", "median", "trimmed_mean"]
FEWEST_SITES: Mapping[Aggregation, int] = {"mean": 1, "norm_bounded_mean": 2, "median": 3, "trimmed_mean": 3}
"""Fewest sites with which an aggregation means something: of two that differ, nothing shows which one lies."""
MAJORITY = 3
"""With fewer updates ``median`` and ``trimmed_mean`` are 0, and no share is limited."""
TRIMMED = 0.2
"""Share of the sites left out at either end by ``trimmed_mean``, and at least one."""
PLAUSIBLE = 10
"""No site is believed to have more visits of a split than so many times the median of the others."""
IN_MEMORY = 64 * 2**20
"""Bytes of one step's updates that stay in memory; further updates wait on disk."""
BLOCK = 2**20
"""Values that are summed at a time: more than a block of an update is not read from disk at once."""


def site_weights(counts: Mapping[str, int], weighting: Weighting = "samples") -> dict[str, float]:
    """Compute the weights c_k of the sites in Eq. 6, which sum to one, in sorted order, from their n_k >= 1.

    ``samples`` is n_k / N. The paper's 1 / n_k does not sum to one and contradicts its Theorem 1; here ``inverse`` is
    1 / n_k normalised.
    """
    weights = {}
    for site in sorted(counts):
        n = counts[site]
        weights[site] = 1.0 if weighting == "uniform" else 1.0 / n if weighting == "inverse" else float(n)
    total = math.fsum(weights.values())
    return {site: weight / total for site, weight in weights.items()}


def limited_shares(shares: Mapping[str, float], most: float) -> dict[str, float]:
    """Shares, which sum to one, none above ``most`` or 1 / n; the others get what is cut off, in proportion.

    >>> limited_shares({"a": 0.8, "b": 0.1, "c": 0.1}, 0.5)
    {'a': 0.5, 'b': 0.25, 'c': 0.25}
    """
    most, left, limited = max(most, 1 / max(1, len(shares))), 1.0, dict(shares)
    if max(shares.values(), default=0.0) <= most:
        return limited
    order = sorted(shares, key=lambda site: -shares[site])
    for number, site in enumerate(order):
        rest = math.fsum(shares[other] for other in order[number:])
        limited[site] = min(most, left * shares[site] / rest if rest else left / (len(order) - number))
        left -= limited[site]
    return limited


def plausible_counts(counts: Mapping[str, Mapping[str, list[int]]]) -> dict[str, dict[str, list[int]]]:
    """Visits by site, split and step, those of a site scaled down that has far more of a split than the others."""
    plausible: dict[str, dict[str, list[int]]] = {site: {} for site in counts}
    for site, splits in counts.items():
        for split, steps in splits.items():
            others = [sum(other.get(split, [])) for name, other in counts.items() if name != site]
            most = int(PLAUSIBLE * statistics.median(filter(None, others))) if any(others) else sum(steps)
            plausible[site][split] = [n * most // sum(steps) for n in steps] if sum(steps) > most else list(steps)
    return plausible


def trimmed_mean(values: torch.Tensor, beta: float) -> torch.Tensor:
    """Average (sites, values) over the sites without the largest and the smallest values (Yin et al., Algorithm 1).

    A share ``beta`` is left out at either end, but at least one value; 0.5 gives the median. NaN is where a site has no
    value; the mean is 0 where fewer than three have one.
    """
    number = (~values.isnan()).sum(0)
    cut = torch.minimum((beta * number).long().clamp(min=1), ((number - 1) // 2).clamp(min=0))
    rank = torch.arange(len(values))[:, None]
    inner = (rank >= cut) & (rank < number - cut) & (number >= MAJORITY)
    return values.sort(0).values.where(inner, 0.0).sum(0) / inner.sum(0).clamp(min=1)


class SpilledUpdates:
    """Accepted updates of one step until they are aggregated: the first in memory, others on disk.

    So memory stays flat in the number of sites. Sums run block by block in sorted site order in float64: the same bits
    whatever the order of arrival, and wherever an update waited. A context manager: the folder is emptied at the start
    and removed at the end. One call at a time.

    Parameters
    ----------
    folder : Path or str
        Folder of updates that do not fit into memory.
    names : iterable of str
        Tensors that every (already checked) update has.
    by_rows : iterable of str
        Those of them in which a row of zeros has no say: the mean of a row is over the sites whose row is not zero.
    """

    def __init__(self, folder: Path | str, names: Iterable[str], by_rows: Iterable[str] = ()):
        self.folder = Path(folder)
        self.names = sorted(names)
        self.by_rows = sorted(by_rows)
        self._nonzero: dict[str, dict[str, torch.Tensor]] = {}  # by site and tensor: (rows,), which rows are not zero
        self._room = IN_MEMORY
        self._in_memory: dict[str, torch.Tensor] = {}  # one flat tensor a site: hundreds of small ones take longer
        self._files: dict[str, tuple[Path, torch.dtype]] = {}
        self._shapes: list[torch.Size] = []
        self._sizes: list[int] = []

    def __enter__(self) -> "SpilledUpdates":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, mode=0o700)
        return self

    def __exit__(self, *error: object) -> None:
        self._in_memory.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, site: str, update: Tensors) -> None:
        """Store the update of a site; nothing of a half-written update is ever summed.

        Parameters
        ----------
        site : str
        update : mapping of str to Tensor
        """
        tensors, nonzero, size = list[torch.Tensor](), dict[str, torch.Tensor](), 0
        for name in self.names:
            tensor = update[name].detach().cpu()
            if name in self.by_rows:
                nonzero[name] = tensor[..., None].flatten(1).any(1)
                zero = ~nonzero[name].view(-1, *[1] * (tensor.dim() - 1))
                tensor = tensor.masked_fill(zero, math.nan)  # sums leave it out
            tensors.append(tensor)
            size += tensor.nbytes
        for tensor in tensors if not self._sizes else ():
            self._shapes.append(tensor.shape)
            self._sizes.append(tensor.numel())
        self._nonzero[site] = nonzero
        if size <= self._room:
            self._room -= size
            self._in_memory[site] = torch.cat([*map(torch.flatten, tensors)])
            return
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        path = self.folder / f"{len(self._files):06d}"  # a number: a site's name need not be a file's
        with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, PRIVATE), "wb") as file:
            for tensor in tensors:
                file.write(_bytes_of(tensor.to(dtype).contiguous()))
        self._files[site] = path, dtype

    def aggregate(self, aggregation: Aggregation, shares: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """Combine the updates.

        Parameters
        ----------
        aggregation : {"mean", "norm_bounded_mean", "median", "trimmed_mean"}
        shares : mapping of str to float
            c_k by site.

        Returns
        -------
        dict of str to Tensor
            In float64.
        """
        if aggregation in ("median", "trimmed_mean"):
            return self.reduce(functools.partial(trimmed_mean, beta=0.5 if aggregation == "median" else TRIMMED))
        if aggregation == "mean":
            return self.mean(shares)
        norms = {}
        for site in sorted(shares):
            squares = (float(block.double().square().nansum()) for block in self._blocks(site))
            norms[site] = math.sqrt(math.fsum(squares))
        bound = statistics.median_low(norms.values())
        return self.mean(shares, {site: min(1.0, bound / max(norm, 1e-300)) for site, norm in norms.items()})

    def mean(self, shares: Mapping[str, float], factors: Mapping[str, float] | None = None) -> dict[str, torch.Tensor]:
        """Sum the updates by weight, ``sum_k c_k (w_k - w)`` (Eq. 6).

        Of a tensor in ``by_rows`` a row's c_k are those of the sites whose row is not zero, scaled to the sum of all.

        Parameters
        ----------
        shares : mapping of str to float
            c_k by site.
        factors : mapping of str to float, optional
            What the sites' updates are multiplied by.

        Returns
        -------
        dict of str to Tensor
            Views of one float64 tensor; empty without a site.
        """
        if not shares:
            return {}
        total = torch.zeros(sum(self._sizes), dtype=torch.float64)
        scratch = torch.empty(min(BLOCK, len(total)), dtype=torch.float64)  # new memory for each block takes longer
        for site in sorted(shares):
            start, weight = 0, shares[site] * (factors or {}).get(site, 1.0)
            for block in self._blocks(site):
                part = scratch[: len(block)].copy_(block).mul_(weight)
                part = part.nan_to_num_() if self.by_rows else part
                total[start : start + len(part)].add_(part)
                start += len(part)
        mean = self._by_name(total)
        for name in self.by_rows:
            heard = torch.zeros(len(mean[name]), dtype=torch.float64)
            for site in sorted(shares):
                heard += shares[site] * self._nonzero[site][name].double()
            scale = math.fsum(shares.values()) / heard.where(heard > 0, 1.0)
            mean[name] *= scale.view(-1, *[1] * (mean[name].dim() - 1))
        return mean

    def reduce(self, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Combine the updates value by value, as by their coordinate-wise median.

        Parameters
        ----------
        function : callable
            Makes (values,) of a block of all updates, (sites, values) in float64, in sorted order of the sites; NaN is
            where a row of ``by_rows`` is zero.

        Returns
        -------
        dict of str to Tensor
            In float64.
        """
        sites = sorted({*self._in_memory, *self._files})
        blocks = zip(*(self._blocks(site, max(1, BLOCK // len(sites))) for site in sites), strict=True)
        return self._by_name(torch.cat([function(torch.stack([part.double() for part in parts])) for parts in blocks]))

    def each(self, name: str) -> dict[str, torch.Tensor]:
        """Look up one tensor of every update; of those on disk, no more is read.

        Parameters
        ----------
        name : str

        Returns
        -------
        dict of str to Tensor
            In float64, by site.
        """
        flat, tensors = dict(self._in_memory), dict[str, torch.Tensor]()
        for site, (path, dtype) in self._files.items():
            flat[site] = torch.from_file(str(path), size=sum(self._sizes), dtype=dtype)
        i = self.names.index(name)
        for site, values in flat.items():
            tensors[site] = values.split(self._sizes)[i].view(self._shapes[i]).double()
        return tensors

    def _by_name(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(self.names, self._shapes, flat.split(self._sizes), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def _blocks(self, site: str, size: int = 0) -> Iterator[torch.Tensor]:
        """A site's update, flat, in blocks; of one on disk, a block at a time is in memory, until the next is read."""
        size = size or BLOCK
        if site in self._in_memory:
            yield from self._in_memory[site].split(size)
            return
        path, dtype = self._files[site]
        left = sum(self._sizes)
        buffer = torch.empty(min(size, left), dtype=dtype)
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
