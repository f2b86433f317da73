"""The two adapters of each decoder layer: a generic one that travels, and a specialised one that stays at the site.

With frozen weight W, scale s, generic factors G, their copy Q as broadcast at the start of a task, and specialised
factors S, whose B starts at zero::

    generic       W x + s G x
    specialised   W x + s Q x + s S x
    at inference  W x + s G x + (1 - mu) s S x      mu = 1 is the generic model, mu = 0 the specialised as trained

All three are PEFT's sets of factors, switched in the decoder alone: an encoder's own adapters stay on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal

from fedtar_flare.models.adapters.lora import (
    active_adapters,
    add_lora,
    load_shared_state,
    lora_layers,
    shared_parameters,
    shared_state,
)

if TYPE_CHECKING:
    from peft import PeftModel

GENERIC, BROADCAST, SPECIALISED = "generic", "broadcast", "specialised"
"""Names of the sets G, Q and S; the first is on the wire, the last never."""
Backbone = Literal["whole", "lora", "frozen"]
_DECODER = "decoder.*"


def decoder_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """``targets`` within the decoder: globs that begin with ``decoder.``, and those with ``*``, prefixed by it."""
    below = (f"decoder.{glob}" if glob[0] == "*" else glob for glob in targets)
    return tuple(dict.fromkeys(glob for glob in below if glob.startswith(("decoder.", "!"))))


def add_specialised(model: PeftModel, targets: Sequence[str], seed: int) -> None:
    """Add Q and S, with G's rank and scale, to the decoder layers of ``targets``; Q is frozen."""
    generic = model.peft_config[GENERIC]
    for name in (BROADCAST, SPECIALISED):
        sizes = {"rank": generic.r, "alpha": generic.lora_alpha}  # type: ignore[attr-defined]
        add_lora(model, targets=decoder_targets(targets), **sizes, seed=seed, adapter=name)
    for parameter in shared_parameters(model, BROADCAST).values():
        parameter.requires_grad_(False)


def copy_broadcast(model: PeftModel) -> None:
    """Set Q to G."""
    copied = {name.replace(f".{GENERIC}.", f".{BROADCAST}."): v for name, v in shared_state(model, GENERIC).items()}
    load_shared_state(model, {name: copied[name] for name in shared_parameters(model, BROADCAST)}, BROADCAST)


def generic_model(model: PeftModel) -> AbstractContextManager[None]:
    """A context in which the decoder has G."""
    return active_adapters(model, [GENERIC], _DECODER)


def specialised_model(model: PeftModel) -> AbstractContextManager[None]:
    """A context in which the decoder has Q and S, as in training."""
    return active_adapters(model, [BROADCAST, SPECIALISED], _DECODER)


@contextmanager
def mixed_model(model: PeftModel, mix: float) -> Iterator[None]:
    """A context in which the decoder has G and (1 - mix) times S (Eq. 6)."""
    layers = [layer for layer in lora_layers(model).values() if SPECIALISED in layer.scaling]
    before = [layer.scaling[SPECIALISED] for layer in layers]
    try:
        for layer, scale in zip(layers, before, strict=True):
            layer.scaling[SPECIALISED] = (1 - mix) * scale
        with active_adapters(model, [GENERIC, SPECIALISED], _DECODER):
            yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
            layer.scaling[SPECIALISED] = scale
