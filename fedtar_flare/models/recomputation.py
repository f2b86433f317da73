"""Gradient checkpointing of a decoder: its layers keep their inputs alone, and run once more in the backward pass.

By transformers' own layers (Chen et al., 2016). Two things are added: models here are trained in evaluation mode, in
which transformers checkpoints nothing, and a method's adapters act in a context that the backward pass has left.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fedtar_flare.core.errors import ConfigError

_SETTING = "training.gradient_checkpointing"
_ACTS = ("forward", "patient_batch", "_active_adapter", "_disable_adapters", "scaling")
"""Attributes that switch the adapters of a PEFT layer, and those of a method's own ``forward``."""
_States = Sequence[tuple[nn.Module, dict[str, Any]]]


class RecomputedLayers:
    """The layers of a decoder that are computed again in the backward pass, inside :meth:`checkpointing` alone, with
    dropout, autocast, PEFT's switches and a method's ``forward`` as in the first pass.
    """

    def __init__(self, language_model: Any):
        from transformers.modeling_layers import GradientCheckpointingLayer

        # its name up to transformers 5.22, and since then
        old, new = (f"{kind}_checkpointing_enable" for kind in ("gradient", "activation"))
        enable = getattr(language_model, new if hasattr(language_model, new) else old)
        try:
            enable({"use_reentrant": False, "context_fn": lambda: (self._first_modes(), _with_states(self._states))})
        except ValueError as error:
            raise ConfigError(f"{_SETTING}: {error}; set it to false for this decoder") from error
        self._model = language_model
        modules = [module for module in language_model.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._layers = [module for module in modules if module.gradient_checkpointing]
        if not self._layers:
            raise ConfigError(f"{_SETTING}: no layer of this decoder can be computed again; set it to false")
        self._modes = [False] * len(self._layers)
        self._states: _States = ()

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Around a forward pass of the decoder: its layers keep their inputs alone, where a gradient is needed."""
        if not torch.is_grad_enabled():
            yield
            return
        self._modes = [layer.training for layer in self._layers]
        self._states = _states(self._model)
        try:
            self._set_modes([True] * len(self._layers))
            yield
        finally:
            self._set_modes(self._modes)
            self._states = ()

    @contextmanager
    def _first_modes(self) -> Iterator[None]:
        """Restore the layers' training modes of the first pass, on which their dropout depends."""
        try:
            self._set_modes(self._modes)
            yield
        finally:
            self._set_modes([True] * len(self._layers))

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for layer, mode in zip(self._layers, modes, strict=True):
            layer.training = mode


def _states(model: nn.Module) -> _States:
    """The switches of each adapted layer's adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    states = [(module, _state(module)) for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for _, state in states:
        if "scaling" in state:
            state["scaling"] = dict(state["scaling"])  # contexts change it in place
    return states


def _state(layer: nn.Module) -> dict[str, Any]:
    return {name: layer.__dict__[name] for name in _ACTS if name in layer.__dict__}


@contextmanager
def _with_states(states: _States) -> Iterator[None]:
    """Let the adapters act as when ``states`` were taken."""
    before = [(layer, _state(layer)) for layer, _ in states]
    try:
        _restore(states)
        yield
    finally:
        _restore(before)


def _restore(states: _States) -> None:
    for layer, state in states:
        for name in _ACTS:
            layer.__dict__.pop(name, None)
        layer.__dict__.update(state)
