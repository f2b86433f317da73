"""Vectors that are learnt in place of words: before the report (prompt tuning), and in every layer (prefix tuning).

Lester et al., EMNLP 2021; Li and Liang, ACL 2021, here as in P-tuning v2 (Liu et al., ACL 2022): each layer's own maps
make keys and values from learnt states, which replace the words' before every layer.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.decoder import PrefixDecoder
from fedtar_flare.models.report_generator import Encoded, PromptPosition, ReportGenerator

NOISE = 0.02  # standard deviation around the vectors' start; equal ones would stay equal for ever


class LearnedPrompts(nn.Module):
    """A prompter with the same learnt words for all images, which begin as copies of the begin token (E,)."""

    position: PromptPosition = "begin"

    def __init__(self, begin: Tensor, prompts: int, layers: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        noise = NOISE * torch.randn(layers, prompts, len(begin), generator=generator)
        self.embeddings = nn.Parameter((begin + noise[0].to(begin)).detach())
        self.states = nn.Parameter(noise[1:].to(begin)) if layers > 1 else None

    def prompts(self, seen: Encoded) -> Tensor:
        """(B, P, E), whatever the images' tokens are."""
        return self.embeddings.expand(len(seen.tokens), -1, -1)

    def before_layer(self, layer: int, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the prompts in the input (B, L, E) of a layer (from the second, 1); later words have none."""
        hidden, number = inputs[0], len(self.embeddings)
        if self.states is None or hidden.shape[1] <= number:
            return inputs
        learnt = self.states[layer - 1].to(hidden.dtype).expand(len(hidden), -1, -1)
        return (torch.cat([learnt, hidden[:, number:]], dim=1), *inputs[1:])


def extend(generator: ReportGenerator, prompts: int, every_layer: bool, seed: int) -> None:
    """Give a base model learnt prompts, in its first layer or, for the GPT-2 family alone, in every layer."""
    generator.require_parts("peft.kind 'prompt' or 'prefix'")
    decoder: Any = generator.decoder
    if every_layer and isinstance(decoder, PrefixDecoder):
        raise ConfigError("prefix tuning is for decoders of the GPT-2 family: take prompts in the first layer alone")
    begin = decoder.get_input_embeddings().weight.detach()[generator.bos_id]
    layers = len(decoder.transformer.h) if every_layer else 1
    learned = LearnedPrompts(begin, prompts, layers, seed)
    generator.diagnosis = learned
    if generator.cross_decoder is not None:
        generator.cross_decoder.at_begin = True
    for number in range(1, layers):
        decoder.transformer.h[number].register_forward_pre_hook(partial(learned.before_layer, number))
