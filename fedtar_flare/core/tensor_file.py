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
    """Write tensors of any device, and a JSON-able ``info`` as the file's header, whole or not at all (OSError)."""
    data = {name: value.detach().to("cpu").contiguous().clone() for name, value in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(data, temporary, metadata={"info": json.dumps(info, sort_keys=True)})
        except SafetensorError as error:  # it wraps the system's errors in words of its own
            if "os error 28" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote; :class:`StateError` when it is missing, truncated or of another form."""
    try:
        with safe_open(str(path), framework="pt") as file:
            info = json.loads((file.metadata() or {})["info"])
            return {name: file.get_tensor(name) for name in file.keys()}, info  # noqa: SIM118
    except FileNotFoundError as error:
        raise StateError(f"{path}: not found") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise StateError(f"{path}: damaged or not written by this package ({error})") from error


def without_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with ``prefix``, by what follows it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of tensors by name, dtype, shape and bits, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def near_checksums(tensors: Mapping[str, torch.Tensor]) -> str:
    """Three short checksums of tensors in eighths of their largest value, on grids that are a third apart.

    Two states that differ by rounding errors alone, as those of two kinds of processor do where normal numbers are
    drawn, have one of the three in common almost surely (:func:`near`).
    """
    found = []
    for shift in (0, 1, 2):
        digest = hashlib.sha256()
        for name in sorted(tensors):
            value = tensors[name].detach().cpu().double()
            largest = float(value.abs().max()) if value.numel() else 0.0
            top = 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0
            digest.update(f"{name} {tuple(value.shape)} {top}\n".encode())
            digest.update((value * (8 / top) + shift / 3).floor().to(torch.int8).contiguous().numpy().tobytes())
        found.append(digest.hexdigest()[:16])
    return "-".join(found)


def near(one: str, other: str) -> bool:
    """Whether two states are the same up to rounding errors, by their :func:`near_checksums`."""
    return any(a == b for a, b in zip(one.split("-"), other.split("-"), strict=False))
