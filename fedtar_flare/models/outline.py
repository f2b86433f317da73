"""Names and sizes of a report generator's parts, without its weights, and what its encoder keeps in training."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fedtar_flare.core.settings import matches
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.build import make_model
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.models.sources import load_libraries

logger = logging.getLogger(__name__)

EMBEDDING = re.compile(r"(.*\.)?((patch_|pos_)?embed(ding)?s?|lm_head|wte|wpe)(\..*)?|encoder\.backbone\.conv1(\..*)?")
"""Layers that take words or pixels; in a ResNet, its first convolution."""


@dataclass(frozen=True)
class Outline:
    """Names and sizes of a model without any adapter."""

    parameters: int  # number of values in all
    linear: Mapping[str, int]  # inputs plus outputs of each layer: LoRA of rank r adds r times as many values
    # of the output layer and of all embeddings, under every name of a tied weight: they reveal words, or pixels
    barred: frozenset[str]
    tensors: Mapping[str, int]  # values of each parameter; of a tied weight under its first name, 0 under others

    def targeted(self, globs: Sequence[str]) -> list[str]:
        """Return the layers that globs pick for LoRA, barred ones among them, sorted."""
        layers = {*self.linear, *self.barred} - set(self.tensors)
        return [name for name in sorted(layers) if matches(name, globs)]

    def lora_values(self, globs: Sequence[str], rank: int) -> int:
        """Return how many values LoRA of this rank adds to the layers that the globs pick."""
        return rank * sum(self.linear.get(name, 0) for name in self.targeted(globs))

    def exchanged(self, globs: Sequence[str]) -> list[str]:
        """Return the parameters that globs pick, sorted."""
        return [name for name in sorted(self.tensors) if matches(name, globs)]


_EVERYWHERE = (
    *("decoder.lm_head", "decoder.transformer.wte", "decoder.transformer.wpe"),
    *("decoder.lm.lm_head", "decoder.lm.model.embed_tokens"),
)
_WEIGHTS = tuple(f"{name}.weight" for name in _EVERYWHERE)
UNKNOWN = Outline(0, {}, frozenset(_EVERYWHERE + _WEIGHTS), dict.fromkeys(_WEIGHTS, 0))
"""Outline of a model that cannot be built here: the output layer and the embeddings that every model has."""


@lru_cache(maxsize=4)
def outline(config: ModelConfig, extend: Callable[[ReportGenerator], None] = lambda model: None) -> Outline:
    """Outline a model without its weights; ConfigError where a named part's configuration cannot be loaded."""
    load_libraries()
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = make_model(config, load_pretrained=False)
    modules = {n: module for n, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    output = model.decoder.get_output_embeddings()
    barred = {n for n, module in modules.items() if isinstance(module, nn.Embedding) or module is output}
    barred |= {name for name in modules if EMBEDDING.fullmatch(name)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = {id(p) for n, p in parameters.items() if n.rpartition(".")[0] in barred or EMBEDDING.fullmatch(n)}
    barred |= {name for name, parameter in parameters.items() if id(parameter) in tied}
    extend(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first = {name for name, _ in model.named_parameters()}
    return Outline(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear={n: sum(module.weight.shape) for n, module in modules.items() if isinstance(module, nn.Linear | Conv1D)},
        barred=frozenset(barred),
        tensors={name: p.numel() if name in first else 0 for name, p in parameters.items()},
    )


@lru_cache(maxsize=4)
def encoder_memory(config: ModelConfig) -> tuple[int, int, Any]:
    """Estimate what an encoder keeps of one study for the backward pass, by a pass without values."""
    stored: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        stored[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    adapted = {*outline(config).targeted(config.lora_targets)}
    with torch.device("meta"):
        model = make_model(config, load_pretrained=False).eval()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[0] in adapted)
        slices = torch.ones(1, config.slices)
        images = torch.zeros(1, config.slices, 3, config.image_size, config.image_size, dtype=torch.uint8)
        tokens = config.slices * config.queries
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                tokens = model.pooling(model.tokens(ImageBatch(images, slices, slices.bool())), slices).shape[1]
        except (NotImplementedError, RuntimeError) as error:  # of PyTorch, for a tensor without values
            logger.warning("the memory estimate leaves out the encoder '%s': %.200s", config.encoder_name, error)
            stored.clear()
    for parameter in model.parameters():
        stored.pop(parameter.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in stored.values()), tokens, model.decoder.config
