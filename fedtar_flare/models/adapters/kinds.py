"""Further kinds of adapters, made by PEFT: AdaLoRA, VeRA, LoHa and IA3; and none, where other parameters travel.

A linear layer W (o, i), with scale ``s = alpha / rank``, becomes

- AdaLoRA: ``W + s B diag(E) A``; A (r, i), B (o, r) and E (r) are trained and travel (Zhang et al., ICLR 2023);
- VeRA: ``W + diag(b) B diag(d) A``; b (o), d (r); A and B are random, one pair for all layers, drawn from the seed at
  every site (Kopiczko et al., ICLR 2024);
- LoHa: ``W + s (C1 D1) * (C2 D2)``; C (o, r), D (r, i), twice; * by element: FedPara's update (Hyeon-Woo et al., ICLR
  2022), which has a rank up to r^2;
- IA3: ``diag(l) W``; l (o), learnt around 1, on attention's keys and values (Liu et al., 2022). On a layer that holds
  queries, keys and values in one (timm's ``qkv``) the queries' third stays at 1.

They travel under the names of PEFT's files, which :mod:`fedtar_flare.models.adapters.lora` reads and loads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.adapters.lora import add_lora, extra_parameters, keep_extras, target_names
from fedtar_flare.models.adapters.peft_file import DEFAULT_ADAPTER

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

Kind = Literal["adalora", "vera", "loha"]


class Unadapted(nn.Module):
    """Stand-in for a PEFT model without any adapter: the base model, some of whose parameters travel whole."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.base_model = model
        self.peft_config: dict[str, Any] = {DEFAULT_ADAPTER: None}

    def get_base_model(self) -> nn.Module:
        """Return the base model, as PEFT's method of this name."""
        return self.base_model


def add_adapter(
    model: nn.Module,
    kind: Kind,
    *,
    targets: Sequence[str],
    rank: int,
    alpha: float,
    seed: int,
    extra: Sequence[str] = (),
    updates: int = 2,
) -> PeftModel:
    """Wrap ``model`` (changed in place) in an adapter that changes no output yet; all follows from ``seed``."""
    from peft import AdaLoraConfig, LoHaConfig, VeraConfig, get_peft_model

    if kind == "loha":
        replace_conv1d(model, targets)
    names, extras = target_names(model, targets), extra_parameters(model, extra)
    config: PeftConfig
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # per layer, by PEFT itself
        warnings.filterwarnings("ignore", message="Note that `r` is not used in AdaLora")
        warnings.filterwarnings("ignore", message="Specified to not save vera_A")  # the seed restores them
        if kind == "adalora":
            more: dict[str, Any] = schedule(updates) | {"lora_alpha": alpha}  # PEFT declares an integer
            config = AdaLoraConfig(init_r=rank, target_r=max(1, rank // 2), target_modules=names, **more)
        elif kind == "vera":
            config = VeraConfig(r=rank, target_modules=names, projection_prng_key=seed, save_projection=False)
        else:
            config = LoHaConfig(r=rank, alpha=alpha, target_modules=names)  # type: ignore[arg-type]
        peft_model = get_peft_model(model, config)
    for parameter in peft_model.parameters():
        parameter.requires_grad_(False)  # PEFT leaves the rank by which AdaLoRA divides to be trained
    keep_extras(peft_model, DEFAULT_ADAPTER, extras)
    return peft_model


def schedule(updates: int) -> dict[str, int]:
    """When AdaLoRA prunes, of so many updates: between the first and the last fifth."""
    return {"tinit": updates // 5, "tfinal": updates // 5, "total_step": max(2, updates)}


def add_ia3(model: nn.Module, *, targets: Sequence[str], extra: Sequence[str] = ()) -> PeftModel:
    """Add IA3's factors to the targeted layers of ``model`` (changed in place), arguments as :func:`add_adapter`."""
    from peft import IA3Config, get_peft_model

    names, extras = target_names(model, targets), extra_parameters(model, extra)
    peft_model = get_peft_model(model, IA3Config(target_modules=names, feedforward_modules=[]))
    for name in names:
        factor = peft_model.get_base_model().get_parameter(f"{name}.ia3_l.{DEFAULT_ADAPTER}")
        if name.endswith("qkv"):
            factor.register_hook(_without_queries)
    keep_extras(peft_model, DEFAULT_ADAPTER, extras)
    return peft_model


def _without_queries(gradient: Tensor) -> Tensor:
    """Set the gradient of a fused layer's factors (3 C, 1) to 0 for the queries, its first third."""
    trained = torch.ones_like(gradient)
    trained[: len(gradient) // 3] = 0
    return gradient * trained


def without_adapter(model: nn.Module, extra: Sequence[str]) -> Unadapted:
    """Train and exchange some parameters of ``model`` whole, and nothing else."""
    extras = extra_parameters(model, extra)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    bare = Unadapted(model)
    keep_extras(bare, DEFAULT_ADAPTER, extras)  # type: ignore[arg-type]
    return bare


def add_like(
    model: nn.Module, config: Mapping[str, Any], *, targets: Sequence[str], extra: Sequence[str], name: str
) -> Any:
    """Wrap ``model`` for weights that are loaded next (``load_shared_state``)."""
    if not config:
        return without_adapter(model, extra)
    kind = str(config.get("peft_type")).lower()
    if kind == "lora":
        rank, alpha = config["r"], config["lora_alpha"]
        return add_lora(model, targets=targets, rank=rank, alpha=alpha, seed=0, extra=extra, adapter=name)
    if kind not in get_args(Kind):
        raise ConfigError(f"adapter_config.json is of type {config.get('peft_type')!r}: not an adapter of this package")
    return add_adapter(
        model,
        cast(Kind, kind),
        targets=targets,
        rank=config["init_r" if kind == "adalora" else "r"],
        alpha=config.get("lora_alpha" if kind == "adalora" else "alpha", 1),
        seed=config.get("projection_prng_key", 0),  # of VeRA
        extra=extra,
    )


def replace_conv1d(model: nn.Module, targets: Sequence[str]) -> None:
    """Replace each targeted ``Conv1D`` by an equal ``nn.Linear``, since LoHa cannot adapt the former."""
    from transformers.pytorch_utils import Conv1D

    for name in target_names(model, targets):
        layer = model.get_submodule(name)
        if isinstance(layer, Conv1D):
            parent, _, attribute = name.rpartition(".")
            with torch.device("meta"):
                linear = nn.Linear(*layer.weight.shape)
            linear.weight = nn.Parameter(layer.weight.detach().T.contiguous(), requires_grad=False)
            linear.bias = layer.bias
            setattr(model.get_submodule(parent), attribute, linear)
