"""Which layers and parameters of a model an adapter's regular expressions match."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from fedtar_flare.errors import ConfigError


def target_names(model: nn.Module, targets: str, further: bool) -> list[str]:
    """Paths of the linear layers that ``targets`` matches as a whole, sorted.

    ``further`` allows LoRA layers in the model: they count by their own path, and what is inside them does not count.

    Raises:
        ConfigError: the expression is invalid, or matches nothing or another kind of module.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    pattern = compiled("LoRA targets", targets)
    names: list[str] = []
    adapted: list[str] = []
    for name, module in model.named_modules():
        if name.startswith(tuple(adapted)):
            continue
        if isinstance(module, BaseTunerLayer):
            if not further:
                raise ConfigError(f"module {name} has an adapter already: pass the PEFT model, not its base model")
            adapted.append(f"{name}.")
            module = module.get_base_layer()
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


def extra_names(model: nn.Module, extra: Sequence[str]) -> tuple[str, ...]:
    """First name of every parameter that some expression matches under any of its names (tied weights have two).

    Raises:
        ConfigError: an expression is invalid or matches nothing.
    """
    first: dict[int, str] = {}
    names = set()
    patterns = [compiled("extra", text) for text in extra]
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


def compiled(setting: str, text: str) -> re.Pattern[str]:
    """The regular expression of a setting; a ConfigError that names the setting where it is invalid."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{setting} {text!r} is no valid regular expression: {error}") from error
