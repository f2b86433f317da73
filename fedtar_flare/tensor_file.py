"""Tensors with a JSON header in one ``safetensors`` file; nothing is ever unpickled."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedtar_flare.errors import FedTARError
from fedtar_flare.files import replacing


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


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of tensors by name, dtype, shape and bits, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()
