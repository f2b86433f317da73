"""Tensors with a JSON header in one ``safetensors`` file; nothing is ever unpickled."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import replacing


class StateError(FedTARError):
    """A file of saved state is missing or cannot be read."""

    default_public = "the site's state of this run is missing or unreadable"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
    """Write tensors and a header to a ``safetensors`` file, whole or not at all."""
    data = {}
    for name, value in tensors.items():
        data[name] = value.detach().to("cpu").contiguous().clone()
    with replacing(path) as temporary:
        try:
            save_file(data, temporary, metadata={"info": json.dumps(info, sort_keys=True)})
        except SafetensorError as error:  # it wraps the system's errors in words of its own
            if "os error 28" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote."""
    try:
        with safe_open(str(path), framework="pt") as file:
            info = json.loads((file.metadata() or {})["info"])
            names = list(file.keys())
            return dict(zip(names, map(file.get_tensor, names), strict=True)), info
    except FileNotFoundError as error:
        raise StateError(f"{path}: not found") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise StateError(f"{path}: damaged or not written by this package ({error})") from error


def without_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Select tensors by the beginning of their names."""
    chosen = {}
    for name, value in tensors.items():
        if name.startswith(prefix):
            chosen[name.removeprefix(prefix)] = value
    return chosen


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def coarse_checksums(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash tensors so that rounding errors almost surely do not matter (:func:`coarsely_equal`).

    Processors of two kinds draw normal numbers that differ by rounding errors. A value that rounds differently on one
    grid does not on another one, so the values are rounded on three grids.
    """
    hashes = []
    for shift in (0, 1, 2):
        digest = hashlib.sha256()
        for name in sorted(tensors):
            value = tensors[name].detach().cpu().double()
            largest = float(value.abs().max()) if value.numel() else 0.0
            top = 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0
            digest.update(f"{name} {tuple(value.shape)} {top}\n".encode())
            digest.update((value * (8 / top) + shift / 3).floor().to(torch.int8).contiguous().numpy().tobytes())
        hashes.append(digest.hexdigest()[:16])
    return "-".join(hashes)


def coarsely_equal(first: str, second: str) -> bool:
    """Tell whether two states are equal up to rounding errors."""
    return any(a == b for a, b in zip(first.split("-"), second.split("-"), strict=False))
