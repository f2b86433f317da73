"""Named sets of LoRA factors, made by PEFT and exchanged under PEFT's own tensor names.

FedTAR, Eq. 4: ``W + s A B^T`` with ``s = alpha / rank``. A model may carry several sets; all but ``default`` have their
name in their tensors' names (``...lora_A.generic.weight``), by which a guard tells them apart. Extras travel whole.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import MAX_GLOBS, matches, problem_of
from fedtar_flare.models.adapters.peft_file import DEFAULT_ADAPTER, KNOWN_SETTINGS, OTHER_KINDS, wire_name

if TYPE_CHECKING:
    from peft import PeftModel

_EXTRAS = "exchanged_extras"  # attribute of the PEFT model: by adapter, the extras by name
_WHOLE = "whole_adapter"  # and of one whose rank is its own: PEFT's configuration and A of what travels
_ADAPTER_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_FACTOR = re.compile(r"(base_model\.model\..+\.lora_[AB])\.([a-z0-9_]+)\.weight")  # as named_parameters() names it


def add_lora(
    model: nn.Module,
    *,
    targets: Sequence[str],
    rank: int = 4,
    alpha: float = 128,
    seed: int,
    extra: Sequence[str] = (),
    adapter: str = DEFAULT_ADAPTER,
    site_rank: int | None = None,
) -> PeftModel:
    """Add a named set of LoRA factors to ``model`` (changed in place), which does not change its outputs yet.

    A plain model is wrapped; then only these factors and the extras are trained. A PEFT model gets a further set, which
    is trained too and acts only inside :func:`active_adapters`. ``A`` is Kaiming uniform and ``B`` zero, by ``seed``
    and the layers' names and sizes alone. ``targets`` are globs on module paths, ``extra`` on names of parameters that
    travel whole. LoRA has no effect on a layer whose ``weight`` the backbone uses without calling it (``qkv`` of timm's
    BEiT, EVA, Swin V2). With ``site_rank`` the model gets the first so many ranks of the exchanged factors.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    if not _ADAPTER_NAME.fullmatch(adapter) or adapter in "lora_":  # PEFT takes a part of its own prefix for its own
        raise ConfigError(f"adapter name {adapter!r}: it must be at most 32 lower-case letters, digits and underscores")
    adapted = model if isinstance(model, PeftModel) else None
    if adapted is not None and (extra or adapter in adapted.peft_config):
        problem = "extras belong to the first adapter" if extra else "the model has an adapter of this name"
        raise ConfigError(f"adapter {adapter!r}: {problem}")
    names = target_names(adapted.get_base_model() if adapted else model, targets)
    extras = extra_parameters(model, extra)
    scale = int(alpha) if alpha == int(alpha) else alpha  # PEFT declares an integer and divides by the rank
    local = site_rank or rank
    local_scale: Any = scale if local == rank else alpha * local / rank
    config = LoraConfig(r=local, lora_alpha=local_scale, target_modules=names, lora_dropout=0.0, bias="none")
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()} if adapted else {}
    # PEFT draws its own initial factors from the global generator; they are replaced below.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT corrects this field per layer, so a model with both nn.Linear and Conv1D always warns.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        peft_model = adapted or get_peft_model(model, config, adapter_name=adapter)
        if adapted:
            adapted.add_adapter(adapter, config)
    generator, starts = torch.Generator().manual_seed(seed), {}
    with torch.no_grad():
        for name in names:
            weight = peft_model.get_base_model().get_parameter(f"{name}.lora_A.{adapter}.weight")
            start = (torch.rand(rank, weight.shape[1], generator=generator) * 2 - 1) / math.sqrt(weight.shape[1])
            weight.copy_(start[:local])
            starts[wire_name(f"base_model.model.{name}.lora_A", adapter)] = start
    if local != rank:
        setattr(peft_model, _WHOLE, ({"r": rank, "lora_alpha": scale}, starts))
    for parameter, was_trained in trained.items():
        parameter.requires_grad_(was_trained)
    keep_extras(peft_model, adapter, extras)
    return peft_model


def initial_weights(peft_model: PeftModel) -> dict[str, Tensor]:
    """Return the server's first weights at the exchanged rank, from a model that :func:`add_lora` gave a lower one."""
    state, (config, starts) = shared_state(peft_model), getattr(peft_model, _WHOLE)
    ends = {b: torch.zeros(len(state[b]), config["r"]) for b in (a.replace("lora_A", "lora_B") for a in starts)}
    return state | starts | ends


def keep_extras(peft_model: PeftModel, adapter: str, extras: Mapping[str, nn.Parameter]) -> None:
    """Exchange these parameters, by base-model name, with a set of factors; train the set and them."""
    setattr(peft_model, _EXTRAS, {**getattr(peft_model, _EXTRAS, {}), adapter: dict(extras)})
    for parameter in shared_parameters(peft_model, adapter).values():
        parameter.requires_grad_(True)


@contextmanager
def active_adapters(peft_model: PeftModel, adapters: Sequence[str], layers: str = "*") -> Iterator[None]:
    """Let these sets alone act in the layers that the glob ``layers`` picks; what is trained stays, contexts nest."""
    for adapter in adapters:
        _require_adapter(peft_model, adapter)
    chosen = [layer for name, layer in lora_layers(peft_model).items() if matches(name, [layers])]
    if not chosen:
        raise ConfigError(f"LoRA layers {layers!r} match no LoRA layer")
    before = [layer._active_adapter for layer in chosen]  # the public setter would move requires_grad
    try:
        for layer in chosen:
            layer._active_adapter = list(adapters)
        yield
    finally:
        for layer, active in zip(chosen, before, strict=True):
            layer._active_adapter = active


@contextmanager
def swapped_weights(
    peft_model: PeftModel, weights: Mapping[str, Tensor], adapter: str = DEFAULT_ADAPTER
) -> Iterator[None]:
    """Let ``weights``, by name of exchange, act in place of a set's own while the context is open; not for training."""
    before = shared_state(peft_model, adapter)
    load_shared_state(peft_model, {**before, **weights}, adapter)
    try:
        yield
    finally:
        load_shared_state(peft_model, before, adapter)


def extra_parameters(model: nn.Module, extra: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters whose names globs match, under their first names; ConfigError for a glob without any."""
    _require_globs("extra", extra, len(extra))  # drafting names every tensor of a file
    first: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    unmatched = {glob for glob in extra if glob[0] != "!"}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
        unmatched -= {glob for glob in unmatched if matches(name, [glob])}
        if matches(name, extra):
            parameters[first[id(parameter)]] = parameter
    if unmatched:
        raise ConfigError(f"extra {min(unmatched)!r} matches no parameter of {type(model).__name__}")
    return dict(sorted(parameters.items()))


def shared_parameters(peft_model: PeftModel, adapter: str = DEFAULT_ADAPTER) -> dict[str, nn.Parameter]:
    """Return the parameters that travel with a set: factors by name of exchange, extras by base-model name, sorted."""
    _require_adapter(peft_model, adapter)
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in peft_model.named_parameters():
        if match := _FACTOR.fullmatch(name):
            if match[2] == adapter:
                parameters[f"{match[1]}.weight" if adapter == DEFAULT_ADAPTER else name] = parameter
        elif matches(other := name.removesuffix(f".{DEFAULT_ADAPTER}"), OTHER_KINDS):
            parameters[other] = parameter
    parameters |= getattr(peft_model, _EXTRAS, {}).get(adapter, {})
    return dict(sorted(parameters.items()))


def shared_state(peft_model: PeftModel, adapter: str = DEFAULT_ADAPTER) -> dict[str, Tensor]:
    """Return copies of :func:`shared_parameters`, float32 on the CPU."""
    state = {}
    for name, parameter in shared_parameters(peft_model, adapter).items():
        state[name] = parameter.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
    return state


def load_shared_state(peft_model: PeftModel, state: Mapping[str, Tensor], adapter: str = DEFAULT_ADAPTER) -> None:
    """Copy ``state`` into one set's parameters; ExchangeError, and no change, unless it has exactly their tensors."""
    parameters = shared_parameters(peft_model, adapter)
    for verb, names in (("lacks", parameters.keys() - state.keys()), ("adds", state.keys() - parameters.keys())):
        if names:
            text = f"the shared state {verb} tensor {min(names)} ({len(names)} such in all)"
            raise ExchangeError(f"{text}: it must hold exactly the {len(parameters)} tensors of adapter '{adapter}'")
    for name, parameter in parameters.items():
        value = state[name]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ExchangeError(f"tensor {name} is {kind}: it must be a floating-point torch tensor")
        if value.shape != parameter.shape:
            raise ExchangeError(f"tensor {name} has shape {tuple(value.shape)}, this model's {tuple(parameter.shape)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def adapter_config(peft_model: PeftModel, adapter: str = DEFAULT_ADAPTER) -> dict[str, Any]:
    """Return PEFT's ``adapter_config.json`` of the exchanged rank, without its defaults and the base model's path."""
    _require_adapter(peft_model, adapter)
    every = peft_model.peft_config[adapter].to_dict() | {"inference_mode": True}
    every |= getattr(peft_model, _WHOLE, ({},))[0]
    config = {name: value for name, value in every.items() if name in KNOWN_SETTINGS}
    return json.loads(json.dumps(config, default=sorted))  # sets become sorted lists, enums their values


def lora_layers(peft_model: PeftModel) -> dict[str, Any]:
    """Return LoRA layers by their path in the base model, sorted; ConfigError where one is not plain LoRA."""
    from peft.tuners.lora import Linear, LoraLayer

    modules = peft_model.get_base_model().named_modules()
    layers = {name: module for name, module in modules if isinstance(module, LoraLayer)}
    if not layers:
        raise ConfigError("the model has no LoRA layer: call add_lora first")
    for name, layer in layers.items():
        if type(layer) is not Linear and type(layer).__name__ != "Linear4bit":
            kind = type(layer).__name__
            raise ConfigError(f"layer {name} is a {kind}, no nn.Linear or Conv1D: leave it out of the LoRA targets")
        plain_dropout = all(isinstance(module, nn.Identity) for module in layer.lora_dropout.values())
        if layer.lora_variant or any(layer.lora_bias.values()) or not plain_dropout:
            raise ConfigError(f"layer {name} has LoRA with dropout, bias or a variant: make the adapter with add_lora")
    return dict(sorted(layers.items()))


@torch.no_grad()
def require_modest(peft_model: PeftModel, adapter: str, most: float) -> None:
    """Refuse factors that change a layer by more than ``most`` times its weight, ``s ||B A|| / ||W||``."""
    from peft.utils.integrations import dequantize_module_weight

    for name, layer in lora_layers(peft_model).items():
        if adapter in layer.lora_A:
            down, up = layer.lora_A[adapter].weight.double(), layer.lora_B[adapter].weight.double()
            norm = layer.scaling[adapter] * float(((up.T @ up) * (down @ down.T)).sum().clamp(min=0).sqrt())
            own = float(dequantize_module_weight(layer.get_base_layer()).norm())
            if not norm <= most * own:
                text = f"changes layer {name} by {norm / max(own, 1e-30):.3g} times its weight"
                raise ExchangeError(f"the adapter that came down {text}; this site allows {most:g} (max_adapter_norm)")


def _require_adapter(peft_model: PeftModel, adapter: str) -> None:
    if adapter not in peft_model.peft_config:
        raise ConfigError(f"the model has no adapter {adapter!r} (it has: {', '.join(sorted(peft_model.peft_config))})")


def target_names(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the sorted paths of the linear layers that globs match; modules inside a LoRA layer do not count."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    _require_globs("LoRA targets", targets)
    names: list[str] = []
    adapted: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(adapted):
            continue
        if isinstance(module, BaseTunerLayer):
            adapted += (f"{name}.",)
            module = module.get_base_layer()
        if not matches(name, targets):
            continue
        # nn.MultiheadAttention reads its output projection's weight and never calls the layer.
        unseen = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        if not isinstance(module, nn.Linear | Conv1D) or unseen:
            kind = type(module).__name__
            raise ConfigError(f"LoRA targets match module {name!r} of type {kind}: take nn.Linear and Conv1D alone")
        names.append(name)
    if not names:
        raise ConfigError(f"LoRA targets {list(targets)!r} match no module of {type(model).__name__}")
    ends = tuple(f".{name}" for name in names)
    for other, _ in model.named_modules():
        if other.endswith(ends) and other not in names:
            raise ConfigError(f"LoRA targets: PEFT goes by the ends of names and would adapt {other} too")
    return sorted(names)


def _require_globs(setting: str, globs: Sequence[str], most: int = MAX_GLOBS) -> None:
    if problem := problem_of(globs, most):
        raise ConfigError(f"{setting} {globs!r:.300}: it must be {problem}")
