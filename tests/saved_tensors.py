"""What autograd keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def kept_bytes(run: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes of all tensors that autograd holds when ``run``, a forward pass, is over; ``parameters`` do not count."""
    own = {parameter.untyped_storage()._cdata for parameter in parameters}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in own)
