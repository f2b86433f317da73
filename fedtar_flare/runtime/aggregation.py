"""The mean of the sites' updates, ``sum_k c_k (w_k - w)``, reproducible bit for bit (FedTAR, Eq. 6), and robust ones.

``median``, ``trimmed_mean``: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates"
(ICML 2018), Algorithm 1, by coordinate; every site counts the same. ``norm_bounded_mean``: Sun et al., "Can You Really
Backdoor Federated Learning?" (2019), ``sum_k c_k d_k min(1, M / |d_k|)``, with M the median of the step's norms as in
Andrew et al., "Differentially Private Learning with Adaptive Clipping" (NeurIPS 2021).

Where sites make as many of their updates as time allows (``training.seconds``), normalised averaging: Wang et al.,
"Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova, NeurIPS 2020), Eq. 10:
``tau sum_k c_k (w_k - w) / tau_k`` with ``tau = sum_k c_k tau_k``. Weighted by c_k as they are, the sum would be that
of an objective in which a site counts by c_k tau_k.
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

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.files import PRIVATE

Tensors = Mapping[str, torch.Tensor]
Weighting = Literal["samples", "uniform", "inverse"]
Aggregation = Literal["mean", "norm_bounded_mean", "median", "trimmed_mean"]
FEWEST_SITES: Mapping[Aggregation, int] = {"mean": 1, "norm_bounded_mean": 2, "median": 3, "trimmed_mean": 3}
"""Fewest sites with which an aggregation means something: of two that differ, nothing shows which one lies."""
MAJORITY = 3
"""Of fewer updates ``median`` and ``trimmed_mean`` are 0, and no share is limited."""
TRIMMED = 0.2
"""Share of the sites left out at either end by ``trimmed_mean``, and at least one."""
PLAUSIBLE = 10
"""No site is believed to have more visits of a split than so many times the median of the others."""
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


def work_of(numbers: Mapping[str, float]) -> float:
    """tau_k in (0, 1], the share of its planned updates that a site says it made; 1 where it does not say.

    ExchangeError for more than were planned.
    """
    made, planned = (numbers.get(name, 1.0) for name in ("updates", "planned_updates"))
    if made > planned:
        raise ExchangeError(f"it says that it made {made:g} of {planned:g} planned updates")
    return made / planned


def rescaled(tensors: Tensors, names: Iterable[str], factor: float) -> dict[str, torch.Tensor]:
    """The tensors, those of ``names`` times a factor; with 1 bit for bit as they are."""
    return dict(tensors) | ({name: tensors[name] * factor for name in names if name in tensors} if factor != 1 else {})


def with_ceiling(shares: Mapping[str, float], most: float) -> dict[str, float]:
    """Shares, which sum to one, none above ``most`` or 1 / n; the others get what is cut off, in proportion.

    >>> with_ceiling({"a": 0.8, "b": 0.1, "c": 0.1}, 0.5)
    {'a': 0.5, 'b': 0.25, 'c': 0.25}
    """
    most, left, found = max(most, 1 / max(1, len(shares))), 1.0, dict(shares)
    if max(shares.values(), default=0.0) <= most:
        return found
    order = sorted(shares, key=lambda site: -shares[site])
    for place, site in enumerate(order):
        rest = math.fsum(shares[other] for other in order[place:])
        found[site] = min(most, left * shares[site] / rest if rest else left / (len(order) - place))
        left -= found[site]
    return found


def plausible(counts: Mapping[str, Mapping[str, list[int]]]) -> dict[str, dict[str, list[int]]]:
    """Visits by site, split and step, those of a site scaled down that has far more of a split than the others."""
    found: dict[str, dict[str, list[int]]] = {site: {} for site in counts}
    for site, own in counts.items():
        for split, steps in own.items():
            others = [sum(one.get(split, [])) for name, one in counts.items() if name != site]
            most = int(PLAUSIBLE * statistics.median(filter(None, others))) if any(others) else sum(steps)
            found[site][split] = [n * most // sum(steps) for n in steps] if sum(steps) > most else list(steps)
    return found


def trimmed_mean(values: torch.Tensor, beta: float) -> torch.Tensor:
    """Mean by column of (sites, values) without the ``beta`` largest and smallest; 0.5 is the median (Yin et al.).

    At least one is left out at either end. NaN is a site that says nothing; 0 where fewer than three say something.
    """
    said = (~values.isnan()).sum(0)
    cut = torch.minimum((beta * said).long().clamp(min=1), ((said - 1) // 2).clamp(min=0))
    place = torch.arange(len(values))[:, None]
    kept = (place >= cut) & (place < said - cut) & (said >= MAJORITY)
    return values.sort(0).values.where(kept, 0.0).sum(0) / kept.sum(0).clamp(min=1)


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

    def __enter__(self) -> "SpilledUpdates":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._kept.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, site: str, update: Tensors) -> None:
        """Keep one site's difference; nothing of a half-written update is ever summed."""
        tensors, self._said[site] = [update[name].detach().cpu() for name in self.names], {}
        for place, name in enumerate(self.names):
            if name in self.by_rows:
                said = tensors[place][..., None].flatten(1).any(1)
                silent = ~said.view(-1, *[1] * (tensors[place].dim() - 1))
                self._said[site][name], tensors[place] = said, tensors[place].masked_fill(silent, math.nan)
        self._shapes = self._shapes or [tensor.shape for tensor in tensors]
        size = sum(tensor.nbytes for tensor in tensors)
        if size <= self._room:
            self._room -= size
            self._kept[site] = torch.cat([tensor.reshape(-1) for tensor in tensors])
            return
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        path = self.folder / f"{len(self._files):06d}"  # a number: a site's name need not be a file's
        with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, PRIVATE), "wb") as file:
            for tensor in tensors:
                file.write(_bytes_of(tensor.to(dtype).contiguous()))
        self._files[site] = path, dtype

    @property
    def spilled(self) -> bool:
        """Whether some wait on disk."""
        return bool(self._files)

    def combined(self, aggregation: str, weights: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """The updates by one of :data:`AGGREGATIONS` in float64, by tensor name, given site to c_k."""
        if aggregation in ("median", "trimmed_mean"):
            return self.reduced(functools.partial(trimmed_mean, beta=0.5 if aggregation == "median" else TRIMMED))
        if aggregation == "mean":
            return self.mean(weights)
        squares = {s: math.fsum(float(b.double().square().nansum()) for b in self._blocks(s)) for s in sorted(weights)}
        norms = {site: math.sqrt(square) for site, square in squares.items()}
        bound = statistics.median_low(norms.values())
        return self.mean(weights, {site: min(1.0, bound / max(norm, 1e-300)) for site, norm in norms.items()})

    def mean(self, weights: Mapping[str, float], factors: Mapping[str, float] | None = None) -> dict[str, torch.Tensor]:
        """``sum_k c_k (w_k - w)`` in float64, by tensor name (Eq. 6), given site to c_k; the tensors are views of one.

        Of a tensor in ``by_rows`` the c_k of each row are those of the sites that say something in it, scaled to the
        sum of all; a row in which nobody does stays zero. ``factors`` multiply the sites' updates.
        """
        if not weights:
            return {}
        sizes = [shape.numel() for shape in self._shapes]
        total = torch.zeros(sum(sizes), dtype=torch.float64)
        scratch = torch.empty(min(BLOCK, len(total)), dtype=torch.float64)  # new memory for each block takes longer
        for site in sorted(weights):
            start = 0
            for block in self._blocks(site):
                part = scratch[: len(block)].copy_(block).mul_(weights[site] * (factors or {}).get(site, 1.0))
                part = part.nan_to_num_() if self.by_rows else part
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

        ``reduce`` makes (values,) of a block of all sites' updates, (sites, values), in sorted order of the sites; NaN
        is where a site says nothing.
        """
        sites, sizes = sorted({*self._kept, *self._files}), [shape.numel() for shape in self._shapes]
        blocks = zip(*(self._blocks(site, max(1, BLOCK // len(sites))) for site in sites), strict=True)
        total = torch.cat([reduce(torch.stack([part.double() for part in parts])) for parts in blocks])
        parts = zip(self.names, self._shapes, total.split(sizes), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def of(self, name: str) -> dict[str, torch.Tensor]:
        """One tensor of every site's update, float64; of those on disk, no more is read."""
        sizes, place = [shape.numel() for shape in self._shapes], self.names.index(name)
        files = self._files.items()
        flat = {site: torch.from_file(str(path), size=sum(sizes), dtype=dtype) for site, (path, dtype) in files}
        flat |= self._kept
        return {site: one.split(sizes)[place].view(self._shapes[place]).double() for site, one in flat.items()}

    def _blocks(self, site: str, size: int | None = None) -> Iterator[torch.Tensor]:
        """A site's update, flat, in blocks; of one on disk, a block at a time is in memory, until the next is read."""
        size = size or BLOCK
        if site in self._kept:
            yield from self._kept[site].split(size)
            return
        path, dtype = self._files[site]
        left = sum(shape.numel() for shape in self._shapes)
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
