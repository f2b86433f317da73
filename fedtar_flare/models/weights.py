"""Weights of a whole report generator as one safetensors file, loaded strictly."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import checksum, open_regular, write_bytes

Named = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

PATIENTS = "fedtar_patients"
# one tensor of a GPT-2 by two names, which safetensors refuses
_TIED, _WORDS = "decoder.lm_head.weight", "decoder.transformer.wte.weight"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors, each once, sorted by name; they share memory with the model."""
    state = model.state_dict()
    return {name: state[name] for name in sorted(state) if name != _TIED or _WORDS not in state}


def fingerprint(model: nn.Module) -> str:
    """Hash all weights of a model without adapter: an adapter fits only the base model that it was trained on."""
    return checksum(model_tensors(model))[:16]


def with_fingerprint(model: Mapping[str, Any], adapter_config: Mapping[str, Any]) -> dict[str, Any]:
    """Extend a fingerprint of weights to all settings that decide which report a model writes."""
    settings = [model.get(name) or None for name in ("config", "prior", "transforms", "extension")]
    text = json.dumps([model["fingerprint"], *settings, dict(adapter_config)], sort_keys=True)
    return {**model, "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}


def save_weights(
    model: nn.Module, path: Path, dtype: torch.dtype = torch.float16, patients: Collection[str] = ()
) -> None:
    """Write all parameters and buffers of a model."""
    from safetensors.torch import save

    state = {}
    for name, tensor in model_tensors(model).items():
        state[name] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        if not state[name].isfinite().all():
            raise ConfigError(f"weights cannot be written to {path}: tensor {name} is not finite as {dtype}")
    write_bytes(path, save(state, {PATIENTS: json.dumps(sorted(patients))} if patients else None))


def training_patients(path: Path) -> frozenset[str]:
    """Return digests of the patients that a weights file was trained on."""
    from safetensors import SafetensorError, safe_open

    file = path / "model.safetensors" if path.is_dir() else path
    unread = (OSError, SafetensorError, ValueError, TypeError, RecursionError)  # whoever wrote it chose its text
    with suppress(*unread):
        open_regular(file).close()
        with safe_open(str(file), framework="pt") as opened:
            return frozenset(map(str, json.loads((opened.metadata() or {}).get(PATIENTS, "[]"))))
    return frozenset()


def load_weights(model: nn.Module, path: Path, named: Named = dict, leave: Sequence[str] = ()) -> None:
    """Copy a weights file into the model, which keeps its precision and device."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        file = path / "model.safetensors" if path.is_dir() else path
        open_regular(file).close()
        loaded = named(load_file(file))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"weights file {path} cannot be read: {error}") from error
    tensors = model_tensors(model)
    more = {name for name in loaded.keys() - tensors.keys() if name.split(".")[0] not in leave}
    for verb, names in (("lacks", tensors.keys() - loaded.keys()), ("has the unknown", more)):
        if names:
            raise ConfigError(f"weights file {path} {verb} tensor {min(names)} ({len(names)} such in all): other model")
    for name, tensor in tensors.items():
        if loaded[name].shape != tensor.shape:
            shapes = f"{tuple(loaded[name].shape)}, in the model {tuple(tensor.shape)}"
            raise ConfigError(f"weights file {path}: tensor {name} has shape {shapes}")
        if loaded[name].is_floating_point() and not loaded[name].isfinite().all():
            raise ConfigError(f"weights file {path}: tensor {name} is not finite")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(loaded[name])
