"""The models that papers compare against: a vanilla Transformer, and R2Gen, which has a relational memory besides.

Vaswani et al., "Attention Is All You Need" (2017); Chen et al., "Generating Radiology Reports via Memory-driven
Transformer" (EMNLP 2020). Encoder layers read the image's features, decoder layers write the report. The decoder is
GPT-2's of transformers in the sizes of R2Gen: normalisation before each part, ReLU, inner width as the width; other
than in the papers, positions are learnt, and there is no dropout.

R2Gen's memory M (slots, E) is rewritten at each word, and each normalisation in the decoder's layers is shifted by it.
With y the embedding of the word, f and g networks of two layers:

    Z = MHA(M, [M; y], [M; y]),  N = f(Z + M) + Z + M
    M' = sigmoid(y W_f + tanh(M) U_f) * M + sigmoid(y W_i + tanh(M) U_i) * tanh(N)
    MCLN(x) = (gamma + g_gamma(M')) * (x - mean) / deviation + beta + g_beta(M')
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.models.config import ModelConfig

SLOTS = 3  # of the memory, as the paper has them


def image_layers(config: ModelConfig) -> nn.TransformerEncoder:
    """Self-attention among an image's tokens, as many layers as the decoder has."""
    width, heads = config.decoder_config["n_embd"], config.decoder_config["n_head"]
    layer = nn.TransformerEncoderLayer(width, heads, width, dropout=0.0, batch_first=True, norm_first=True)
    norm = nn.LayerNorm(width)
    return nn.TransformerEncoder(layer, config.decoder_config["n_layer"], norm, enable_nested_tensor=False)


def add_memory(lm: Any) -> None:
    """Give a GPT-2 (``GPT2LMHeadModel``) the memory, in place of the embeddings' dropout, which is none here."""
    memory = RelationalMemory(lm.config.n_embd, lm.config.n_head, lm.config.n_layer)
    lm.transformer.drop = memory
    lm.transformer.register_forward_pre_hook(memory.resume, with_kwargs=True)
    for block in lm.transformer.h:
        for name in ("ln_1", "ln_cross_attn", "ln_2"):
            setattr(block, name, MemoryNorm(lm.config.n_embd, lm.config.layer_norm_epsilon, memory))


class RelationalMemory(nn.Module):
    """Passes embeddings on, and sets ``states``, the memory after each: a further ``layer`` of the cache."""

    def __init__(self, width: int, heads: int, layer: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.of_word, self.of_memory = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.register_buffer("begin", torch.eye(SLOTS, width), persistent=False)
        self.begin: Tensor
        self.states: Tensor | None = None  # (B, L, slots * E), of the embeddings that were handed on last
        self._layer, self._cache = layer, None

    def resume(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember the decoder's cache, before its forward pass."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))  # its name before and after transformers 5.24
        self._cache = getattr(cache, "self_attention_cache", cache)

    def forward(self, embeddings: Tensor) -> Tensor:
        """(B, L, E), unchanged; without a cache they are the first embeddings of their texts."""
        cache: Any = self._cache
        memory = self.begin.expand(len(embeddings), -1, -1)
        if cache is not None and cache.get_seq_length():
            memory = cache.layers[self._layer].keys[:, 0, -1].view_as(memory)
        states = []
        for word in embeddings.unbind(1):
            memory = self.step(word, memory)
            states.append(memory.flatten(1))
        self.states = torch.stack(states, dim=1)
        if cache is not None:
            cache.update(self.states[:, None], self.states[:, None, :, :0], self._layer)
        return embeddings

    def step(self, word: Tensor, memory: Tensor) -> Tensor:
        """M' (B, slots, E) after a word (B, E)."""
        seen = torch.cat([memory, word[:, None]], dim=1)
        new = memory + self.attention(memory, seen, seen, need_weights=False)[0]
        new = new + self.mlp(new)
        take, keep = (self.of_word(word)[:, None] + self.of_memory(memory.tanh())).sigmoid().chunk(2, dim=-1)
        return take * new.tanh() + keep * memory


class MemoryNorm(nn.LayerNorm):
    """Memory-driven conditional layer normalisation (MCLN)."""

    def __init__(self, width: int, eps: float, memory: RelationalMemory):
        super().__init__(width, eps=eps)
        self.scale, self.shift = (
            nn.Sequential(nn.Linear(SLOTS * width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(2)
        )
        self._memory = (memory,)  # a module would be registered, under many names

    def forward(self, input: Tensor) -> Tensor:
        states = self._memory[0].states
        plain = F.layer_norm(input, self.normalized_shape, eps=self.eps)
        return (self.weight + self.scale(states)) * plain + self.bias + self.shift(states)
