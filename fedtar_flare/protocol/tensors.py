"""Registration of torch tensors with FLARE's serialiser.

Without it a job that sends torch tensors hangs for ever, so every module that sends or receives calls
:func:`register_tensors` when imported; registering twice is harmless.
"""

from __future__ import annotations


def register_tensors() -> None:
    """Let FLARE send ``torch.Tensor`` as it is (float32 and bfloat16 both ways, no numpy in between)."""
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    fobs.register(TensorDecomposer)
