"""Adapter folders in PEFT's file format, written and read without PEFT, as on a server that never builds the model.

Other exchanged parameters are in ``extra.safetensors``, by their names in the base model; ``fedtar.json`` names the
base model and the run. Without an adapter the folder has these two files alone.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.files import hashes, is_pointer, read_text, write_bytes, write_text
from fedtar_flare.core.settings import matches
from fedtar_flare.protocol.exchange import lowered

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
EXTRA_WEIGHTS = "extra.safetensors"
ADAPTER_INFO = "fedtar.json"
ADAPTER_FILES = (ADAPTER_WEIGHTS, ADAPTER_CONFIG, EXTRA_WEIGHTS, ADAPTER_INFO)

DEFAULT_ADAPTER = "default"  # name of the set of factors whose tensors travel without a set's name

OTHER_KINDS = tuple(
    f"base_model.model.*.{name}" for name in ("ia3_l", "lora_[ABE]", "vera_lambda_[bd]", "hada_w[12]_[ab]")
)
"""Names of parameters of other kinds of adapters (IA3, AdaLoRA, VeRA, LoHa) in PEFT's files and on the wire."""

KNOWN_SETTINGS = frozenset(
    ("peft_type", "r", "lora_alpha", "alpha", "target_modules", "feedforward_modules", "inference_mode", "bias")
    + ("lora_dropout", "fan_in_fan_out", "init_r", "target_r", "tinit", "tfinal", "total_step")
    + ("projection_prng_key", "save_projection")
)
"""Settings of PEFT that adapters here set; all others stay at their defaults, since some name code to import."""

_TYPES: dict[str, Any] = dict.fromkeys(("fingerprint", "prior", "method", "run_id", "adapter"), str)
_TYPES |= {"model": dict, "extension": dict, "transforms": list, "modality": list, "round": int, "priors": int}
"""Types of what ``fedtar.json`` states."""

_KINDS = ("LORA", "ADALORA", "VERA", "LOHA")
_FACTOR = re.compile(r"(base_model\.model\..+\.lora_[AB])(?:\.([a-z][a-z0-9_]*))?\.weight")


def wire_name(factor: str, adapter: str) -> str:
    """Return the name under which a factor travels; ``factor`` is PEFT's path of it up to ``lora_A`` or ``lora_B``."""
    return f"{factor}.weight" if adapter == DEFAULT_ADAPTER else f"{factor}.{adapter}.weight"


def adapter_of(name: str) -> str | None:
    """Return the set to which an exchanged tensor belongs."""
    if matches(name, OTHER_KINDS):
        return DEFAULT_ADAPTER
    match = _FACTOR.fullmatch(name)
    return (match[2] or DEFAULT_ADAPTER) if match else None


def write_adapter(
    folder: Path | str,
    state: Mapping[str, Tensor],
    adapter_config: Mapping[str, Any],
    info: Mapping[str, Any] | None = None,
) -> None:
    """Write ``state`` as a PEFT adapter folder, in place of an earlier one; each file appears whole or not at all."""
    from safetensors.torch import save

    if adapter_config and (kind := adapter_config.get("peft_type")) not in _KINDS:
        raise ConfigError(f"adapter_config['peft_type'] is {kind!r}: it must be one of {', '.join(_KINDS)}")
    factors: dict[str, Tensor] = {}
    extra: dict[str, Tensor] = {}
    adapters = set()
    for name, tensor in state.items():
        if (adapter := adapter_of(name)) is None:
            extra[name] = tensor
        else:
            adapters.add(adapter)
            match = _FACTOR.fullmatch(name)
            factors[f"{match[1]}.weight" if match else name] = tensor  # in the file a set has no name
    if len(adapters) != bool(adapter_config) or not state:
        raise ExchangeError(
            f"a folder {'holds the factors of one adapter' if adapter_config else 'without adapter_config holds none'}:"
            f" the state to be written has {len(adapters)} adapters ({', '.join(sorted(adapters))})"
        )
    folder = Path(folder)
    for name, tensors in ((ADAPTER_WEIGHTS, factors), (EXTRA_WEIGHTS, extra)):
        if tensors:
            whole = {key: tensor.detach().cpu().contiguous() for key, tensor in sorted(tensors.items())}
            write_bytes(folder / name, save(whole, metadata={"format": "pt"}))
        else:
            (folder / name).unlink(missing_ok=True)
    if adapter_config:
        known = {name: value for name, value in adapter_config.items() if name in KNOWN_SETTINGS}
        write_text(folder / ADAPTER_CONFIG, json.dumps(known, indent=2, sort_keys=True))
    else:
        (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
    if info is not None:
        write_text(folder / ADAPTER_INFO, json.dumps(dict(info), indent=2, sort_keys=True))


def adapter_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that decide what an adapter writes, by name."""
    return {name: digest for name, digest in hashes(folder).items() if name in ADAPTER_FILES}


def read_adapter_info(folder: Path | str) -> dict[str, Any]:
    """Read ``fedtar.json``: which base model, run and round an adapter belongs to."""
    folder = Path(folder)
    # extras alone are whole only where no adapter belongs to them
    extras_alone = (folder / EXTRA_WEIGHTS).is_file() and not (folder / ADAPTER_CONFIG).exists()
    if not (folder / ADAPTER_WEIGHTS).is_file() and not extras_alone:
        raise ConfigError(f"{folder} is no adapter folder (a run leaves one as <results>/adapter)")
    try:
        info = dict(json.loads(read_text(folder / ADAPTER_INFO)))
        info["model"], info["fingerprint"]  # a KeyError tells which is missing
        if wrong := [name for name, kind in _TYPES.items() if not isinstance(info.get(name, kind()), kind)]:
            raise TypeError(f"of the wrong type: {', '.join(wrong)}")
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no {ADAPTER_INFO}: nothing names the adapter's base model") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder / ADAPTER_INFO} is damaged ({error})") from error
    return info


def read_adapter(folder: Path | str, adapter: str = DEFAULT_ADAPTER) -> dict[str, Tensor]:
    """Read factors and extras, for ``load_shared_state``; ConfigError for damaged files or non-finite values."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for part in (ADAPTER_WEIGHTS, EXTRA_WEIGHTS):
        file = Path(folder) / part
        try:
            tensors = load_file(file) if file.is_file() else {}
        except (SafetensorError, OSError) as error:
            hint = "; it is a pointer of git-lfs: run 'git lfs pull'" if is_pointer(file) else ""
            raise ConfigError(f"{file} is not readable as safetensors ({error}){hint}") from error
        for name, tensor in sorted(tensors.items()):
            if not tensor.isfinite().all():
                raise ConfigError(f"{file}: {name} holds values that are no number; the training has failed")
            factor = part == ADAPTER_WEIGHTS and not matches(name, OTHER_KINDS)
            state[wire_name(name.removesuffix(".weight"), adapter) if factor else name] = tensor
    return dict(sorted(state.items()))


def read_adapter_config(folder: Path | str) -> dict[str, Any]:
    """Read ``adapter_config.json`` of a folder that :func:`read_adapter_info` accepts."""
    file = Path(folder) / ADAPTER_CONFIG
    try:
        return dict(json.loads(read_text(file))) if file.with_name(ADAPTER_WEIGHTS).is_file() else {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is missing or damaged ({error})") from error


def at_most(
    rank: int | None, config: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Lower an adapter to its first ranks, at the same scale ``alpha / r``."""
    if rank is None or rank >= (whole := config.get("r", 0)):
        return config, weights
    return {**config, "r": rank, "lora_alpha": config["lora_alpha"] * rank / whole}, lowered(weights, rank)
