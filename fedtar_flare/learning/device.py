"""Choice of a site's device and precision, by its site file; ``auto`` takes a GPU where the model is large enough."""

import logging
import math
from functools import cache

import torch
from torch import distributed

from fedtar_flare.core.errors import ConfigError

SMALL_MODEL = 4_000_000
"""Parameters below which ``auto`` takes the CPU. Launching the kernels of an update of 1.9 million parameters took an
H200 as long as the whole update took two CPU cores; a CPU's time grows with the model, that of launches does not."""
_say_once = cache(logging.getLogger(__name__).info)


def device_of_each(device: str, processes: int) -> str:
    """Choose the device kind of several processes, each with its GPU (rank r on ``cuda:r``) or on the CPU."""
    kind, _ = choose_device(device)
    if kind == "cuda" and torch.cuda.device_count() < processes:
        text = f"processes: {processes} in the site file: this machine shows {torch.cuda.device_count()} GPU(s)"
        raise ConfigError(text, public="the site file asks for more processes than the site has GPUs")
    return kind


def choose_device(device: str = "auto", precision: str = "auto", parameters: float = math.inf) -> tuple[str, bool]:
    """Choose the torch device and precision."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and parameters < SMALL_MODEL and not distributed.is_initialized():
            device = "cpu"
            size = f"{parameters / 1e6:.1f} million parameters"
            _say_once(f"device: auto takes the CPU, as a GPU is no faster at {size}; device: cuda takes the GPU")
    if device != "cpu":
        if not device.startswith("cuda"):
            raise ConfigError(f"device '{device}' in the site file is not one of auto, cpu, cuda, cuda:<i>")
        index = int(device[5:]) if device[5:].isdigit() else 0
        if index >= torch.cuda.device_count():
            text = f"device '{device}' in the site file: this machine shows {torch.cuda.device_count()} GPU(s)"
            raise ConfigError(f"{text}; check the driver (nvidia-smi) or write device: cpu")
    if precision == "auto":
        return device, device != "cpu" and torch.cuda.is_bf16_supported()
    return device, precision == "bfloat16"
