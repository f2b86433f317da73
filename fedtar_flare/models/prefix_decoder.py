"""A causal language model as decoder: image tokens, begin token, prompts and report are one text to it.

The form of reports by a large language model (R2GenGPT, FedMRG's paper): the image's tokens, mapped to the width of the
words, stand before the report, where cross-attention would have to be trained anew. Any model of the Llama family (or
another causal language model of transformers) in a local folder or on the hub; frozen, it is adapted by LoRA on its
query and value maps.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fedtar_flare.models.sources import NO_CODE, fetching, load_or_make, quiet_loading, require_room

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "4bit": torch.bfloat16}
"""What weights are, or what four bits are computed in."""


class PrefixDecoder(nn.Module):
    """Decodes ``[image tokens (M), BOS, prompts (D), report]`` as one sequence.

    ``lm`` is a causal language model of transformers with Llama's embeddings and positions. Masked image tokens take no
    position and are attended to by nothing.
    """

    def __init__(self, lm: Any):
        super().__init__()
        self.lm = lm

    @property
    def config(self) -> Any:
        """The language model's configuration; ``hidden_size`` is the width E of a word."""
        return self.lm.config

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm.get_output_embeddings()

    def states_of(self, input_ids: Tensor) -> Tensor:
        """Hidden states (B, L, E) over a text without an image, such as the report of the visit before."""
        return self.lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state

    def decode(self, memory: Tensor, mask: Tensor, input_ids: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits (B, L, V) and last hidden states (B, L, E) that predict the token after each of ``input_ids``.

        The last of the prompts (B, D, E) takes the begin token's place in predicting the first word.
        """
        inputs, attention, places = self._prefix(memory, mask, input_ids[:, :1], prompts)
        words = self.get_input_embeddings()(input_ids[:, 1:]).to(inputs.dtype)
        inputs = torch.cat([inputs, words], dim=1)
        more = torch.arange(1, words.shape[1] + 1, device=words.device)
        states = self.lm.base_model(
            inputs_embeds=inputs,
            attention_mask=torch.cat([attention, attention.new_ones(words.shape[:2])], dim=1),
            position_ids=torch.cat([places, places[:, -1:] + more], dim=1),
            use_cache=False,
        ).last_hidden_state[:, -input_ids.shape[1] :]
        return self.lm.lm_head(states), states

    def write(self, memory: Tensor, mask: Tensor, begin: Tensor, prompts: Tensor | None, settings: Any) -> Tensor:
        """Token ids (B * R, L) from the begin token (B, 1) on, by generation ``settings`` (R sequences each)."""
        inputs, attention, _ = self._prefix(memory, mask, begin, prompts)
        written: Tensor = self.lm.generate(inputs_embeds=inputs, attention_mask=attention, generation_config=settings)
        return torch.cat([begin.repeat_interleave(len(written) // len(begin), dim=0), written], dim=1)

    def _prefix(
        self, memory: Tensor, mask: Tensor, begin: Tensor, prompts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings (B, M + 1 + D, E) before the report, attention mask and positions; padding comes first."""
        order = mask.int().argsort(dim=1, stable=True)
        mask = mask.gather(1, order)
        memory = memory.gather(1, order[..., None].expand_as(memory))
        word = self.get_input_embeddings()(begin)
        parts = [memory.to(word.dtype), word] + ([] if prompts is None else [prompts.to(word.dtype)])
        inputs = torch.cat(parts, dim=1)
        here = mask.new_ones(len(mask), inputs.shape[1] - mask.shape[1])
        attention = torch.cat([mask, here], dim=1).long()
        return inputs, attention, (attention.cumsum(1) - 1).clamp(min=0)


def build_prefix_decoder(
    name: str, dtype: str, vocab_size: int, length: int, load_pretrained: bool
) -> tuple[PrefixDecoder, tuple[str, ...]]:
    """Load the named causal language model, or only measure it; also return the names of its random parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with fetching("decoder", name), quiet_loading():
        config = AutoConfig.from_pretrained(name, **NO_CODE)
        require_room(name, config, length, vocab_size)
        kept = name if load_pretrained else None
        lm, untrained = load_or_make(AutoModelForCausalLM, config, kept, dtype=DTYPES[dtype])
    return PrefixDecoder(lm), tuple(f"lm.{key}" for key in untrained)
