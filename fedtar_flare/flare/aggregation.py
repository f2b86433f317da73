"""The mean of the sites' updates, ``sum_k c_k (w_k - w)``, reproducible bit for bit (FedTAR, Eq. 6)."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.files import replacing

Tensors = Mapping[str, torch.Tensor]
WEIGHTINGS = ("samples", "uniform", "inverse")


def aggregation_weights(counts: Mapping[str, int], weighting: str = "samples") -> dict[str, float]:
    """Weights c_k of the sites in Eq. 6, normalised to sum to one, in sorted site order.

    The paper's 1/n_k does not sum to one and contradicts its Theorem 1; here ``inverse`` is 1/n_k normalised.

    Args:
        counts: site to n_k, its samples at this step; a site with none gets no weight.
        weighting: ``samples`` (n_k / N), ``uniform`` or ``inverse``.

    Raises:
        ConfigError: the weighting is unknown, a count is not a whole number from 0, or no site has a sample.
    """
    if weighting not in WEIGHTINGS:
        raise ConfigError(f"weighting '{weighting}' is not one of {', '.join(WEIGHTINGS)}")
    for site in sorted(counts):
        if not isinstance(counts[site], Integral) or counts[site] < 0:
            raise ConfigError(f"site {site}: the count of samples must be a whole number from 0, not {counts[site]!r}")
    size = {"samples": float, "uniform": lambda n: 1.0, "inverse": lambda n: 1.0 / n}[weighting]
    raw = {site: size(counts[site]) for site in sorted(counts) if counts[site] > 0}
    if not raw:
        raise ConfigError("no site has a sample at this step: there is nothing to average")
    total = math.fsum(raw.values())
    return {site: value / total for site, value in raw.items()}


class SpilledUpdates:
    """Accepted updates of one step, on disk until they are summed: memory stays flat in the number of sites.

    The sum runs tensor by tensor in sorted site order in float64: the same bits whatever the order of arrival. A
    context manager: ``folder`` is its own, emptied at the start and removed at the end. One call at a time.

    ``names`` are the tensors that every update has; without any, :class:`ConfigError`.
    """

    def __init__(self, folder: Path | str, names: Iterable[str]):
        self.folder = Path(folder)
        self.names = sorted(names)
        if not self.names:
            raise ConfigError("an update must have at least one tensor; no name was given")
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> SpilledUpdates:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, site: str, update: Tensors) -> None:
        """Keep one site's difference; nothing of a refused or half-written update is ever summed.

        Raises:
            ExchangeError: the site has sent one already, or a tensor is missing, unknown, not finite or of another
                shape than in the first update.
        """
        if site in self._files:
            raise ExchangeError("the site has sent an update of this step already")
        if sorted(update) != self.names:
            raise ExchangeError(
                f"the update has other tensors than agreed: {sorted(set(update) ^ set(self.names))[:3]}"
            )
        shapes = self._shapes or _shapes(update)
        _check_update(update, shapes)
        path = self.folder / f"{len(self._files):06d}.safetensors"  # a number: a site's name need not be a file's
        # cloned: safetensors refuses tensors that share memory
        with replacing(path) as temporary:
            save_file({name: update[name].detach().cpu().contiguous().clone() for name in self.names}, temporary)
        self._files[site], self._shapes = path, shapes

    def mean(self, weights: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """``sum_k c_k (w_k - w)`` in float64, by tensor name (Eq. 6); one tensor of one site is in memory at a time.

        ``weights`` maps site to c_k (see :func:`aggregation_weights`).

        Raises:
            ConfigError: a site of ``weights`` has sent nothing, or the weights do not sum to one.
        """
        _check_weights(weights, self._files)
        total: dict[str, torch.Tensor] = {}
        for site in sorted(weights):
            with safe_open(str(self._files[site]), framework="pt") as file:
                for name in self.names:
                    _add(total, name, file.get_tensor(name), weights[site])
        return total


def _add(total: dict[str, torch.Tensor], name: str, value: torch.Tensor, weight: float) -> None:
    """``total[name] += weight * value`` in float64; never changes ``value``."""
    part = value.double() * weight
    total[name] = part if name not in total else total[name].add_(part)


def _shapes(update: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in update.items()}


def _check_update(update: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(shapes):
        if tuple(update[name].shape) != shapes[name]:
            raise ExchangeError(
                f"tensor '{name}' has shape {tuple(update[name].shape)}; in the first update it has {shapes[name]}"
            )
        if not torch.isfinite(update[name]).all():
            raise ExchangeError(f"tensor '{name}' has values that are not finite (NaN or infinity)")


def _check_weights(weights: Mapping[str, float], senders: Iterable[str]) -> None:
    missing = sorted(set(weights) - set(senders))
    if missing:
        raise ConfigError(f"site {missing[0]} has a weight but has sent no update")
    for site, weight in weights.items():
        if not 0.0 <= weight <= 1.0:
            raise ConfigError(f"site {site}: the weight {weight} is not within [0, 1]")
    if abs(math.fsum(weights.values()) - 1.0) > 1e-9:
        raise ConfigError(f"the weights of {len(weights)} site(s) sum to {math.fsum(weights.values())}, not to 1")
