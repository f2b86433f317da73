"""Adapter folders in PEFT's file format, written and read without PEFT, as on a server that never builds the model.

``peft.PeftModel.from_pretrained(base_model, folder)`` loads the factors. Other parameters that travel are in
``extra.safetensors``, by their names in the base model; ``fedtar.json`` names the base model and the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.files import write_bytes, write_text

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
EXTRA_WEIGHTS = "extra.safetensors"
ADAPTER_INFO = "fedtar.json"

_FACTOR = re.compile(r"base_model\.model\..+\.lora_[AB]\.weight")


def is_factor(name: str) -> bool:
    """Whether a travelling tensor is a factor, by its name; the others are parameters of the base model.

    >>> is_factor("base_model.model.h.0.mlp.lora_A.weight")
    True
    """
    return _FACTOR.fullmatch(name) is not None


def write_adapter(
    folder: Path | str,
    state: Mapping[str, Tensor],
    adapter_config: Mapping[str, Any],
    info: Mapping[str, Any] | None = None,
) -> None:
    """Write ``state`` as a PEFT adapter folder (made where absent); each file appears whole or not at all.

    ``state`` and ``adapter_config`` are as :mod:`fedtar_flare.models.adapters.lora` gives them. An earlier adapter's
    files are replaced, and its extras removed where ``state`` has none. ``info`` is for :func:`read_adapter_info`
    (JSON).

    Raises:
        ConfigError: ``adapter_config`` is not one of LoRA.
        ExchangeError: ``state`` has no LoRA factor.
    """
    if adapter_config.get("peft_type") != "LORA":
        raise ConfigError(
            f"adapter_config['peft_type'] is {adapter_config.get('peft_type')!r}: it must be 'LORA', as "
            "models.adapters.lora.adapter_config gives it"
        )
    factors = {name: tensor for name, tensor in state.items() if is_factor(name)}
    extra = {name: tensor for name, tensor in state.items() if name not in factors}
    if not factors:
        raise ExchangeError("the state to be written has no LoRA factor named base_model.model.*.lora_A.weight")
    folder = Path(folder)
    _write_tensors(folder / ADAPTER_WEIGHTS, factors)
    if extra:
        _write_tensors(folder / EXTRA_WEIGHTS, extra)
    else:
        (folder / EXTRA_WEIGHTS).unlink(missing_ok=True)
    write_text(folder / ADAPTER_CONFIG, json.dumps(dict(adapter_config), indent=2, sort_keys=True))
    if info is not None:
        write_text(folder / ADAPTER_INFO, json.dumps(dict(info), indent=2, sort_keys=True))


def read_adapter_info(folder: Path | str) -> dict[str, Any]:
    """What ``fedtar.json`` says: ``model`` (settings of the base model), ``fingerprint``, ``run_id``, ``round``, ...

    Raises:
        ConfigError: the folder is no adapter, or has no readable ``fedtar.json`` (an older release, another program).
    """
    folder = Path(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(
            f"{folder} is no adapter folder: it has no {ADAPTER_WEIGHTS} (a run leaves one as <results>/adapter)"
        )
    try:
        info = json.loads((folder / ADAPTER_INFO).read_text(encoding="utf-8"))
        if not isinstance(info["model"], dict) or not isinstance(info["fingerprint"], str):
            raise ValueError("model and fingerprint")
        return dict(info)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} has no {ADAPTER_INFO}: an adapter of an older release or of another program, whose base model "
            "is not known"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / ADAPTER_INFO} is damaged ({error})") from error


def read_adapter(folder: Path | str) -> dict[str, Tensor]:
    """Factors and extras of a folder, on the CPU, sorted by name; for ``load_shared_state``."""
    from safetensors.torch import load_file

    files = [Path(folder) / name for name in (ADAPTER_WEIGHTS, EXTRA_WEIGHTS)]
    return dict(sorted(item for file in files if file.is_file() for item in load_file(file).items()))


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    write_bytes(path, save(whole, metadata={"format": "pt"}))
