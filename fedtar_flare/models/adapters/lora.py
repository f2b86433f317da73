"""The shared LoRA: made by PEFT, exchanged by PEFT's own tensor names, saved in PEFT's own file format.

Paper, Eq. 4: ``W + s A B^T`` with ``s = alpha / rank`` on every targeted linear layer. These factors, and parameters
that a run names as extras (cross-attention without pre-trained weights, say), are all that travels between sites.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.models.adapters.peft_file import write_adapter

if TYPE_CHECKING:
    from peft import PeftModel

_EXTRA = "exchanged_extra"  # attribute of the PEFT model: names of the extras, sorted


def add_shared_lora(
    model: nn.Module, *, targets: str, rank: int = 4, alpha: float = 128, seed: int, extra: Sequence[str] = ()
) -> PeftModel:
    """Wrap ``model`` (changed in place) so that only LoRA factors and extras are trained.

    ``A`` is Kaiming uniform, ``B`` zero (the model starts unchanged), both a function of ``seed`` and the layers'
    names and sizes alone; the global random state is neither read nor changed. No dropout.

    Args:
        model: any module; need not be a transformers model.
        targets: regular expression that must match the whole path of a module, as PEFT's ``target_modules``. It may
            match ``nn.Linear`` and transformers' ``Conv1D`` alone. A backbone that reads ``layer.weight`` itself
            instead of calling the layer (``qkv`` of timm's BEiT, EVA, Swin V2) would pass any LoRA by: do not target
            such a layer.
        rank: r.
        alpha: the scale is ``alpha / rank``.
        seed: of the initial ``A``.
        extra: regular expressions that must match whole parameter names of ``model`` as it is passed; those
            parameters are trained and exchanged whole. Buffers are never exchanged.

    Raises:
        ConfigError: a regular expression is invalid or matches nothing, ``targets`` matches another kind of module,
            ``rank`` or ``alpha`` is not positive, or the model has LoRA layers already.
    """
    from peft import LoraConfig, get_peft_model

    if rank < 1 or not math.isfinite(alpha) or alpha <= 0:
        raise ConfigError(f"LoRA rank is {rank!r} and alpha {alpha!r}: both must be above 0")
    names = _target_names(model, targets)
    extras = _extra_names(model, extra)
    scale = int(alpha) if alpha == int(alpha) else alpha  # PEFT declares an integer and divides by the rank
    config = LoraConfig(
        r=rank,
        lora_alpha=scale,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
    )
    # PEFT draws its own initial factors from the global generator; they are replaced below.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT corrects this field per layer, so a model with both nn.Linear and Conv1D always warns.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in names:
            weight = peft_model.get_base_model().get_parameter(f"{name}.lora_A.default.weight")
            weight.copy_((torch.rand(weight.shape, generator=generator) * 2 - 1) / math.sqrt(weight.shape[1]))
    setattr(peft_model, _EXTRA, extras)
    for name in extras:
        _extra_parameter(peft_model, name).requires_grad_(True)
    return peft_model


def exchange_names(peft_model: PeftModel) -> list[str]:
    """Names of what travels, sorted: PEFT's adapter state-dict names, and extras by their base-model names."""
    return list(_exchanged(peft_model))


def shared_state(peft_model: PeftModel) -> dict[str, Tensor]:
    """What travels, sorted by name (see :func:`exchange_names`): float32 clones on the CPU."""
    return {
        name: parameter.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
        for name, parameter in _exchanged(peft_model).items()
    }


def shared_parameters(peft_model: PeftModel) -> list[nn.Parameter]:
    """The model's own parameters that travel, in the order of :func:`exchange_names` (for optimisers, gradients)."""
    return list(_exchanged(peft_model).values())


def load_shared_state(peft_model: PeftModel, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the model's parameters, which stay the same objects, device and precision.

    Raises:
        ExchangeError: a tensor is missing, unknown, not floating point or of another shape; names it and changes
            nothing.
    """
    parameters = _exchanged(peft_model)
    missing, unknown = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
    for verb, names in (("lacks", missing), ("adds", unknown)):
        if names:
            raise ExchangeError(
                f"the shared state {verb} tensor {names[0]} ({len(names)} such in all): it must hold exactly the "
                f"{len(parameters)} tensors of this model's exchange"
            )
    for name, parameter in parameters.items():
        given = state[name]
        if not isinstance(given, Tensor) or not given.is_floating_point():
            kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise ExchangeError(f"tensor {name} is {kind}: it must be a floating-point torch tensor")
        if given.shape != parameter.shape:
            raise ExchangeError(f"tensor {name} has shape {tuple(given.shape)}, this model's {tuple(parameter.shape)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def adapter_config(peft_model: PeftModel) -> dict[str, Any]:
    """PEFT's ``adapter_config.json`` as JSON primitives, so that a process without PEFT can write an adapter folder.

    The path from which the base model was loaded is left out: it is a site's own.
    """
    config = peft_model.peft_config[_adapter_name(peft_model)].to_dict()
    base_class = type(peft_model.get_base_model())
    config.update(
        base_model_name_or_path=None,
        inference_mode=True,
        auto_mapping={"base_model_class": base_class.__name__, "parent_library": base_class.__module__},
    )
    return json.loads(json.dumps(config, default=sorted))  # sets become sorted lists, enums their values


def save_adapter(peft_model: PeftModel, folder: Path | str) -> None:
    """Write the shared part (float32) so that ``PeftModel.from_pretrained(base_model, folder)`` loads it.

    Extras go to ``extra.safetensors``; see :func:`fedtar_flare.models.adapters.peft_file.load_extra`.
    """
    write_adapter(folder, shared_state(peft_model), adapter_config(peft_model))


def lora_layers(peft_model: PeftModel) -> dict[str, Any]:
    """PEFT's LoRA layers by their path in the base model, sorted by it.

    Raises:
        ConfigError: there is none, or one that is no plain LoRA on ``nn.Linear`` or ``Conv1D``; names the layer.
    """
    from peft.tuners.lora import Linear, LoraLayer

    layers = {
        name: module for name, module in peft_model.get_base_model().named_modules() if isinstance(module, LoraLayer)
    }
    if not layers:
        raise ConfigError("the model has no LoRA layer: call add_shared_lora first")
    for name, layer in layers.items():
        if type(layer) is not Linear:
            raise ConfigError(
                f"layer {name} is {type(layer).__module__}.{type(layer).__name__}: patient-adaptive LoRA works on "
                "unquantised nn.Linear and Conv1D layers; leave it out of the LoRA targets"
            )
        plain_dropout = all(isinstance(module, nn.Identity) for module in layer.lora_dropout.values())
        if layer.lora_variant or any(layer.lora_bias.values()) or not plain_dropout:
            raise ConfigError(
                f"layer {name} has LoRA with dropout, a bias or a variant: patient-adaptive LoRA works on plain LoRA; "
                "make the adapter with add_shared_lora"
            )
    return dict(sorted(layers.items()))


def _exchanged(peft_model: PeftModel) -> dict[str, nn.Parameter]:
    """The exchanged parameters by name, sorted."""
    from peft import get_peft_model_state_dict

    # save_embedding_layers="auto" would ask a model hub over the network about the base model's vocabulary.
    exchanged = get_peft_model_state_dict(
        peft_model,
        state_dict=dict(peft_model.named_parameters()),
        adapter_name=_adapter_name(peft_model),
        save_embedding_layers=False,
    )
    for name in getattr(peft_model, _EXTRA, ()):
        exchanged[name] = _extra_parameter(peft_model, name)
    return dict(sorted(exchanged.items()))


def _adapter_name(peft_model: PeftModel) -> str:
    names = list(peft_model.peft_config)
    if len(names) != 1:
        raise ConfigError(f"the PEFT model has the adapters {names}: the exchange is defined for exactly one")
    return names[0]


def _extra_parameter(peft_model: PeftModel, name: str) -> nn.Parameter:
    from peft.tuners.tuners_utils import BaseTunerLayer

    path, _, leaf = name.rpartition(".")
    module = peft_model.get_base_model().get_submodule(path)
    if isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    return getattr(module, leaf)


def _target_names(model: nn.Module, targets: str) -> list[str]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    pattern = _compile("LoRA targets", targets)
    names = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            raise ConfigError(f"module {name} has an adapter already: add the shared LoRA to a plain model")
        if not pattern.fullmatch(name):
            continue
        # nn.MultiheadAttention reads its output projection's weight and never calls the layer.
        unseen = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        if not isinstance(module, nn.Linear | Conv1D) or unseen:
            raise ConfigError(
                f"LoRA targets {targets!r} match module {name!r} of type {type(module).__name__}: they may match "
                "nn.Linear and Conv1D layers alone"
            )
        names.append(name)
    if not names:
        raise ConfigError(f"LoRA targets {targets!r} match no module of {type(model).__name__}")
    return sorted(names)


def _extra_names(model: nn.Module, extra: Sequence[str]) -> tuple[str, ...]:
    """First name of every parameter that some expression matches under any of its names (tied weights have two)."""
    first: dict[int, str] = {}
    names = set()
    patterns = [_compile("extra", text) for text in extra]
    unmatched = {pattern.pattern for pattern in patterns}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
        for pattern in patterns:
            if pattern.fullmatch(name):
                names.add(first[id(parameter)])
                unmatched.discard(pattern.pattern)
    if unmatched:
        raise ConfigError(f"extra {sorted(unmatched)[0]!r} matches no parameter of {type(model).__name__}")
    return tuple(sorted(names))


def _compile(setting: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{setting} {text!r} is no valid regular expression: {error}") from error
