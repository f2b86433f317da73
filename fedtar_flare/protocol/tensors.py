"""Registration of torch tensors with FLARE's serialiser.

A job that sends tensors without it hangs for ever, so every module that sends or receives them calls
:func:`register_tensors` on import; registering twice is harmless.
"""

from __future__ import annotations


def register_tensors() -> None:
    """Let FLARE send ``torch.Tensor`` as it is (float32 and bfloat16, no numpy in between)."""
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    fobs.register(TensorDecomposer)
