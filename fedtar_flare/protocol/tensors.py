"""Torch tensors in FLARE's messages: their registration with its serialiser, and a bound on what comes.

A job that sends tensors without the registration hangs for ever, so every module that sends or receives them calls
:func:`register_tensors` on import; registering twice is harmless.

A message names its large tensors; the receiver fetches them chunk by chunk and would keep on for as long as the sender
has more. Here it counts, and gives up at a limit. FLARE holds one chunk in memory before it can be counted, and its
size is the sender's choice; FLARE has no limit for that on the receiving side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedtar_flare.errors import ExchangeError
from fedtar_flare.protocol.exchange import MAX_TENSORS, MAX_VALUES

_most_bytes = 4 * MAX_VALUES


def register_tensors() -> None:
    """Let FLARE send ``torch.Tensor`` as it is (float32 and bfloat16, no numpy in between), and fetch bounded many."""
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    decomposer = TensorDecomposer()
    decomposer._download = _bounded_download
    fobs.register(decomposer)


def expect_at_most(values: int) -> None:
    """Fetch at most so many float32 values in one message from now on, in this process."""
    global _most_bytes
    _most_bytes = 4 * values


class Counted:
    """Adds up what is fetched of one message; raises :class:`ExchangeError` beyond the limits."""

    def __init__(self) -> None:
        self.tensors = self.bytes = 0

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take in the tensors of one chunk; returns them."""
        self.tensors += len(tensors)
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self.tensors > MAX_TENSORS or self.bytes > _most_bytes:
            raise ExchangeError(f"a message of more than {MAX_TENSORS} tensors or {_most_bytes} bytes is not fetched")
        return dict(tensors)


def _bounded_download(*, use_disk: bool, root_dir: str | None = None, **settings: Any) -> tuple[str, Any]:
    """In place of FLARE's own; tensors are never fetched to disk, which this package does not ask for."""
    from nvflare.app_opt.pt.tensor_downloader import download_tensors

    return download_tensors(**settings, tensors_received_cb=Counted())
