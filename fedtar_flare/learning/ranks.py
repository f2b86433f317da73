"""Processes that train one model together, each on its share of every batch (data parallelism).

Of a batch of B samples, rank r of n takes samples r, r + n, ... and accumulates the gradient of its share of
``sum_i l_i / B``; one sum gives each the whole gradient, to the rounding of float32. What follows is done by each on
equal bits, so an update that is skipped is skipped by all. Sums go through NCCL between GPUs, gloo on the CPU.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import checksum

_Item = TypeVar("_Item")
PATIENCE = timedelta(minutes=30)
"""How long one process waits for another at a sum."""


class LostRank(FedTARError):
    """Another of the processes ended, or did not answer in time."""


@dataclass(frozen=True)
class Ranks:
    """The number of this process, and how many train together, whose group is torch's default one; by default one."""

    rank: int = 0
    size: int = 1

    def share(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Choose the items of this rank."""
        return items[self.rank :: self.size]

    def summed(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Sum the loss over the ranks, and each gradient; one that no rank has stays None, as in one process."""
        if self.size == 1:
            return loss
        learnt = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        has = [float(loss), *(p.grad is not None for p in learnt)]
        sums = self._sum(torch.tensor(has, dtype=torch.float64, device=_device()))
        moved = [parameter for parameter, count in zip(learnt, sums[1:].tolist(), strict=True) if count]
        if moved:
            flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in moved]
            total = self._sum(torch.cat([gradient.detach().float().flatten() for gradient in flat]))
            gradients = total.split([parameter.numel() for parameter in moved])
            for parameter, gradient in zip(moved, gradients, strict=True):
                # as the parameter lies in memory, which a fused optimiser asks for
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient.view_as(parameter))
        return sums[0].to(loss.device)

    def gather(self, value: Any) -> list[Any]:
        """Collect a value from each rank."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [size.item() for size in self._all(torch.tensor([len(text)]))]
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(text)] = text
        rows = zip(self._all(padded), sizes, strict=True)
        return [json.loads(row[: int(size)].cpu().numpy().tobytes()) for row, size in rows]

    def wait(self) -> None:
        """Until every rank has come here."""
        self.gather(None)

    def require_equal(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse to go on unless all ranks hold the same bits."""
        if self.size > 1 and len(set(self.gather(checksum(tensors)))) > 1:
            public = f"the {self.size} processes that trained together hold different weights"
            raise FedTARError(f"{public}; nothing was saved: set processes: 1", public=public)

    def _sum(self, values: Tensor) -> Tensor:
        with self._together():
            distributed.all_reduce(values)
        return values

    def _all(self, values: Tensor) -> list[Tensor]:
        """The ranks' tensors of one shape, on the CPU."""
        mine = values.to(_device())
        tensors = [torch.empty_like(mine) for _ in range(self.size)]
        with self._together():
            distributed.all_gather(tensors, mine)
            return [tensor.cpu() for tensor in tensors]

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = f"rank {self.rank} of {self.size} lost touch with another that trains with it"
            raise LostRank(f"{text} ({error})", public=text) from error


ALONE = Ranks()


def join(ranks: Ranks, device: str, folder: Path) -> None:
    """Enter the process group, computing on this rank's device."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    if device == "cuda":
        torch.cuda.set_device(ranks.rank)  # what 'cuda' means from here on
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=PATIENCE,
    )


def _device() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"
