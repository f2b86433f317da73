"""Where a site computes: its own choice, from its site file; ``auto`` takes the GPU when there is one."""

from __future__ import annotations

import torch

from fedtar_flare.errors import ConfigError


def choose_device(device: str = "auto", precision: str = "auto") -> tuple[str, bool]:
    """The torch device, and whether to compute in bfloat16 autocast.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<i>``.
        precision: ``auto`` (bfloat16 on a GPU that has it, else float32), ``float32`` or ``bfloat16``.

    Raises:
        ConfigError: a GPU that is not there, or an unknown word.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        if not device.startswith("cuda"):
            raise ConfigError(f"device '{device}' in the site file is not one of auto, cpu, cuda, cuda:<i>")
        index = int(device[5:]) if device[5:].isdigit() else 0
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device '{device}' in the site file: this machine shows {torch.cuda.device_count()} GPU(s); "
                "check the driver (nvidia-smi) or write device: cpu"
            )
    if precision == "auto":
        return device, device != "cpu" and torch.cuda.is_bf16_supported()
    return device, precision == "bfloat16"
