"""IA3: one factor for each output of attention's keys and values, learnt around 1 (Liu et al., 2022), by PEFT.

On a layer that holds queries, keys and values in one (timm's ``qkv``) the queries' third stays at 1. Factors travel as
``base_model.model.<layer>.ia3_l``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedtar_flare.models.adapters.lora import extra_names, keep_extras, target_names
from fedtar_flare.models.adapters.peft_file import DEFAULT_ADAPTER

if TYPE_CHECKING:
    from peft import PeftModel


def add_ia3(model: nn.Module, *, targets: str, extra: Sequence[str] = ()) -> PeftModel:
    """Wrap ``model`` (changed in place); then only the factors and the extras are trained.

    Args:
        targets, extra: regular expressions, as for ``add_lora``.

    Raises:
        ConfigError: an expression that cannot be used.
    """
    from peft import IA3Config, get_peft_model

    names = target_names(model, targets)
    extras = {name: model.get_parameter(name) for name in extra_names(model, extra)}
    peft_model = get_peft_model(model, IA3Config(target_modules=targets, feedforward_modules=[]))
    for name in names:
        factor = peft_model.get_base_model().get_parameter(f"{name}.ia3_l.{DEFAULT_ADAPTER}")
        if name.endswith("qkv"):
            factor.register_hook(_without_queries)
    keep_extras(peft_model, DEFAULT_ADAPTER, extras)
    return peft_model


def _without_queries(gradient: Tensor) -> Tensor:
    """The gradient of a fused layer's factors (3 C, 1) with that of its first third, the queries, at 0."""
    moved = torch.ones_like(gradient)
    moved[: len(gradient) // 3] = 0
    return gradient * moved
