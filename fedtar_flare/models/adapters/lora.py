"""LoRA factors, made by PEFT and exchanged under PEFT's own tensor names.

FedTAR, Eq. 4: ``W + s A B^T`` with ``s = alpha / rank`` on every targeted linear layer. Parameters that a run names as
extras (such as cross-attention without pre-trained weights) travel whole.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtar_flare.errors import ConfigError, ExchangeError

if TYPE_CHECKING:
    from peft import PeftModel

_EXTRAS = "exchanged_extras"  # attribute of the PEFT model: the extras by name
_FACTOR = re.compile(r"(base_model\.model\..+\.lora_[AB])\.default\.weight")  # as named_parameters() names it


def add_lora(
    model: nn.Module, *, targets: str, rank: int = 4, alpha: float = 128, seed: int, extra: Sequence[str] = ()
) -> PeftModel:
    """Wrap ``model`` (changed in place); then only the LoRA factors and the extras are trained.

    ``A`` is Kaiming uniform and ``B`` zero, so the model starts unchanged. Both depend only on ``seed`` and the layers'
    names and sizes; the global random state is neither read nor changed. No dropout.

    Args:
        targets: regular expression on whole module paths; may match ``nn.Linear`` and transformers' ``Conv1D`` alone.
            LoRA has no effect on a layer whose ``weight`` the backbone reads without calling the layer (``qkv`` of
            timm's BEiT, EVA, Swin V2): do not target one.
        rank: above 0.
        alpha: above 0; the scale is ``alpha / rank``.
        extra: regular expressions on whole parameter names of ``model``; these parameters are trained and exchanged
            whole. Buffers are never exchanged.

    Raises:
        ConfigError: an expression is invalid, or matches nothing or what it may not.
    """
    from peft import LoraConfig, get_peft_model

    names = _target_names(model, targets)
    extras = {name: model.get_parameter(name) for name in extra_names(model, extra)}
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
    setattr(peft_model, _EXTRAS, extras)
    for parameter in extras.values():
        parameter.requires_grad_(True)
    return peft_model


def extra_names(model: nn.Module, extra: Sequence[str]) -> tuple[str, ...]:
    """First name of every parameter that some expression matches under any of its names (tied weights have two).

    Raises:
        ConfigError: an expression is invalid or matches nothing.
    """
    first: dict[int, str] = {}
    names = set()
    patterns = [_compiled("extra", text) for text in extra]
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


def shared_parameters(peft_model: PeftModel) -> dict[str, nn.Parameter]:
    """Factors by wire name and extras by base-model name, sorted: the model's own parameters, no copies."""
    factors = {
        f"{match[1]}.weight": parameter
        for name, parameter in peft_model.named_parameters()
        if (match := _FACTOR.fullmatch(name))
    }
    return dict(sorted({**factors, **getattr(peft_model, _EXTRAS, {})}.items()))


def shared_state(peft_model: PeftModel) -> dict[str, Tensor]:
    """Values of :func:`shared_parameters` as float32 clones on the CPU."""
    return {
        name: parameter.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
        for name, parameter in shared_parameters(peft_model).items()
    }


def load_shared_state(peft_model: PeftModel, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the shared parameters, which stay the same objects, device and precision.

    Raises:
        ExchangeError: a tensor is missing, unknown, misshapen or not floating point; names it and changes nothing.
    """
    parameters = shared_parameters(peft_model)
    missing, unknown = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
    for verb, names in (("lacks", missing), ("adds", unknown)):
        if names:
            raise ExchangeError(
                f"the shared state {verb} tensor {names[0]} ({len(names)} such in all): it must hold exactly the "
                f"{len(parameters)} tensors of this model's adapter"
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

    The path that the base model was loaded from is left out: it is the site's own.
    """
    config = peft_model.peft_config["default"].to_dict()
    base_class = type(peft_model.get_base_model())
    config.update(
        base_model_name_or_path=None,
        inference_mode=True,
        auto_mapping={"base_model_class": base_class.__name__, "parent_library": base_class.__module__},
    )
    return json.loads(json.dumps(config, default=sorted))  # sets become sorted lists, enums their values


def lora_layers(peft_model: PeftModel) -> dict[str, Any]:
    """PEFT's LoRA layers by their path in the base model, sorted by it.

    Raises:
        ConfigError: there is none, or one that is not plain LoRA on ``nn.Linear`` or ``Conv1D``; names the layer.
    """
    from peft.tuners.lora import Linear, LoraLayer

    layers = {
        name: module for name, module in peft_model.get_base_model().named_modules() if isinstance(module, LoraLayer)
    }
    if not layers:
        raise ConfigError("the model has no LoRA layer: call add_lora first")
    for name, layer in layers.items():
        if type(layer) is not Linear:
            raise ConfigError(
                f"layer {name} is {type(layer).__module__}.{type(layer).__name__}: adapters of a method's own work on "
                "unquantised nn.Linear and Conv1D layers; leave it out of the LoRA targets"
            )
    return dict(sorted(layers.items()))


def _target_names(model: nn.Module, targets: str) -> list[str]:
    """Paths of the linear layers that ``targets`` matches as a whole, sorted; ConfigError as in :func:`add_lora`."""
    from transformers.pytorch_utils import Conv1D

    pattern = _compiled("LoRA targets", targets)
    matched = {name: module for name, module in sorted(model.named_modules()) if pattern.fullmatch(name)}
    for name, module in matched.items():
        # nn.MultiheadAttention reads its output projection's weight and never calls the layer.
        unseen = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        if not isinstance(module, nn.Linear | Conv1D) or unseen:
            raise ConfigError(
                f"LoRA targets {targets!r} match module {name!r} of type {type(module).__name__}: they may match "
                "nn.Linear and Conv1D layers alone"
            )
    if not matched:
        raise ConfigError(f"LoRA targets {targets!r} match no module of {type(model).__name__}")
    return list(matched)


def _compiled(setting: str, text: str) -> re.Pattern[str]:
    """The regular expression of a setting; a ConfigError that names the setting where it is invalid."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{setting} {text!r} is no valid regular expression: {error}") from error
