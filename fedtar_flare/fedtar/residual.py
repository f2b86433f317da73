"""Temporal residual aggregation at the server, as pure tensor functions (FedTAR, Eq. 6 and 7, Theorem 1).

Sites send differences ``w_k - w_{t-1}``. The aggregation weights sum to one, so the weighted mean of the differences is
``wbar_t - w_{t-1}``, and Eq. 7 is one scaled addition.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fedtar_flare.errors import ConfigError, ExchangeError

Tensors = Mapping[str, torch.Tensor]
WEIGHTINGS = ("samples", "uniform", "inverse")


def aggregation_weights(counts: Mapping[str, int], weighting: str = "samples") -> dict[str, float]:
    """Weights c_k of the sites in Eq. 6, normalised to sum to one.

    The paper's 1/n_k does not sum to one and contradicts its Theorem 1; here ``inverse`` is 1/n_k normalised.

    Args:
        counts: site to n_k, its samples at this step; a site with none never enters.
        weighting: ``samples`` (n_k / N, the default), ``uniform`` or ``inverse``.

    Returns:
        site to weight, in sorted site order.

    Raises:
        ConfigError: for an unknown weighting, a negative count, or when no site has a sample.
    """
    if weighting not in WEIGHTINGS:
        raise ConfigError(f"weighting '{weighting}' is not one of {', '.join(WEIGHTINGS)}")
    if any(n < 0 for n in counts.values()):
        raise ConfigError("a count of samples is negative")
    size = {"samples": float, "uniform": lambda n: 1.0, "inverse": lambda n: 1.0 / n}[weighting]
    raw = {site: size(counts[site]) for site in sorted(counts) if counts[site] > 0}
    if not raw:
        raise ConfigError("no site has a sample at this step: there is nothing to average")
    total = math.fsum(raw.values())
    return {site: value / total for site, value in raw.items()}


class SpilledUpdates:
    """Accepted updates of one step, on disk until they are summed, so that memory stays flat in the number of sites.

    The sum runs tensor by tensor in sorted site order in float64: it does not depend on the order of arrival and gives
    the same bits every time. A context manager; the folder is removed at the end.

    Args:
        folder: made empty at the start.
        names: names of the tensors that every update has.
    """

    def __init__(self, folder: Path | str, names: Iterable[str]):
        self.folder = Path(folder)
        self.names = sorted(names)
        self._files: dict[str, Path] = {}

    def __enter__(self) -> SpilledUpdates:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, site: str, update: Tensors) -> None:
        """Keep one site's difference.

        Raises:
            ExchangeError: when the site has sent one already, or a tensor is missing or unknown.
        """
        if site in self._files:
            raise ExchangeError("the site has sent an update of this step already")
        if sorted(update) != self.names:
            raise ExchangeError(
                f"the update has other tensors than agreed: {sorted(set(update) ^ set(self.names))[:3]}"
            )
        path = self.folder / f"{len(self._files):06d}.safetensors"  # a number: a site's name need not be a file's
        save_file({name: update[name].detach().cpu().contiguous() for name in self.names}, path)
        self._files[site] = path

    def mean(self, weights: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """``sum_k c_k (w_k - w_{t-1})``, float64 by tensor name (Eq. 6).

        Args:
            weights: site to c_k, as :func:`aggregation_weights` gives it.

        Raises:
            ConfigError: when a site of ``weights`` has sent nothing.
        """
        missing = sorted(set(weights) - set(self._files))
        if missing:
            raise ConfigError(f"no update of {missing[0]} is here")
        result: dict[str, torch.Tensor] = {}
        for site in sorted(weights):
            with safe_open(str(self._files[site]), framework="pt") as file:
                for name in self.names:
                    part = file.get_tensor(name).double().mul_(weights[site])
                    result[name] = part if name not in result else result[name].add_(part)
        return result


def residual_step(w: Tensors, mean: Tensors, alpha: float) -> tuple[dict[str, torch.Tensor], float, float]:
    """Eq. 7: ``w_t = w_{t-1} + alpha_t (wbar_t - w_{t-1})``.

    Args:
        w: w_{t-1}, the float32 master.
        mean: ``wbar_t - w_{t-1}``, float64.
        alpha: alpha_t in [0, 1].

    Returns:
        w_t (float32), ``||w_t - w_{t-1}||`` and ``||wbar_t - w_{t-1}||``; Theorem 2: the first norm is alpha_t times
        the second.

    Raises:
        ConfigError: when alpha_t is not within [0, 1].
        ExchangeError: when the names differ.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"alpha_t = {alpha} is not within [0, 1]")
    if set(w) != set(mean):
        raise ExchangeError(f"the mean update has other tensors than the weights: {sorted(set(w) ^ set(mean))[:3]}")
    moved = {name: (w[name].double() + alpha * mean[name]).float() for name in w}
    update_norm = math.sqrt(math.fsum(float(mean[name].double().square().sum()) for name in sorted(mean)))
    return moved, alpha * update_norm, update_norm


def telescoped_weights(alphas: Sequence[float], taken: Sequence[bool]) -> list[float]:
    """Theorem 1: ``w_T = beta_0 w_0 + sum_x beta_x wbar_x`` with betas that are non-negative and sum to one.

    Args:
        alphas: alpha_1..alpha_T.
        taken: which steps anybody answered; a skipped step has beta 0, and products run over the steps taken.

    Returns:
        beta_0..beta_T.
    """
    betas = [0.0] * (len(alphas) + 1)
    rest = 1.0
    for t in range(len(alphas), 0, -1):
        if taken[t - 1]:
            betas[t] = alphas[t - 1] * rest
            rest *= 1.0 - alphas[t - 1]
    betas[0] = rest
    return betas
