"""GPT-2 with cross-attention as decoder: it attends to the image's tokens, and has prompts before its text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class CrossDecoder:
    """Decodes and generates with a GPT-2 of transformers; it has no weights of its own.

    With ``at_begin``, prompts stand at the begin token's position and share its weight; else they take the last
    positions. Begin token and words keep the positions at which a trained decoder has learnt them.
    """

    def __init__(self, lm: Any):
        self.lm, self.at_begin = lm, False

    def states_of(self, input_ids: Tensor) -> Tensor:
        """Hidden states (B, L, E) over a text without an image, such as the report of the visit before."""
        return self.lm.transformer(input_ids, use_cache=False).last_hidden_state

    def decode(self, memory: Tensor, mask: Tensor, input_ids: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits (B, L, V) and last hidden states (B, L, E) that predict the token after each of ``input_ids``."""
        # Padding stands on the right, so the causal mask alone keeps it from every token that has a label.
        attended = {"encoder_hidden_states": memory, "encoder_attention_mask": mask, "use_cache": False}
        if prompts is None:
            states = self.lm.transformer(input_ids=input_ids, **attended).last_hidden_state
        else:
            inputs, many = self._with_prompts(input_ids, prompts), prompts.shape[1]
            order = torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)
            # without a mask, positions that begin anew would be taken for another text
            placed = self._placed(order, inputs.new_ones(inputs.shape[:2]), many)
            states = self.lm.transformer(inputs_embeds=inputs, **placed, **attended).last_hidden_state[:, many:]
        return self.lm.lm_head(states), states

    def write(self, memory: Tensor, mask: Tensor, begin: Tensor, prompts: Tensor | None, settings: Any) -> Tensor:
        """Token ids (B * R, L) from the begin token (B, 1) on, by generation ``settings`` (R sequences each)."""
        inputs: dict[str, Tensor] = {"attention_mask": torch.ones_like(begin)}
        if prompts is not None:
            embedded = self._with_prompts(begin, prompts)
            inputs = {"inputs_embeds": embedded, "attention_mask": begin.new_ones(embedded.shape[:2])}
        with self._placing(0 if prompts is None else prompts.shape[1]):
            ids: Tensor = self.lm.generate(
                begin,
                **inputs,
                encoder_hidden_states=memory,
                encoder_attention_mask=mask,
                generation_config=settings,
                **_beam_cache(),
            )
        return ids

    def _placed(self, order: Tensor, mask: Tensor | None, prompts: int) -> dict[str, Tensor | None]:
        """Positions and attention mask of D prompts, begin token and words, from their order.

        D prompts at the begin token share its weight: each of the D + 1 has ``-log(D + 1)`` added to its scores. As
        long as they are copies of it, the decoder writes as if they were not there.
        """
        first = 0 if self.at_begin else self.lm.config.n_positions - prompts + order
        places = torch.where(order < prompts, first, order - prompts)
        if self.at_begin:
            keys = torch.arange(int(order.max()) + 1, device=order.device)
            shared = torch.where(keys <= prompts, -math.log(prompts + 1), 0.0)
            mask = torch.where(keys <= order[:, None, :, None], shared, torch.finfo(torch.float32).min)
        return {"position_ids": places, "attention_mask": mask}

    @contextmanager
    def _placing(self, prompts: int) -> Iterator[None]:
        """Let GPT-2 place and weigh what it generates as :meth:`decode` does."""

        def place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | self._placed(kwargs["position_ids"], kwargs["attention_mask"], prompts)

        hook = self.lm.transformer.register_forward_pre_hook(place, with_kwargs=True) if prompts else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _with_prompts(self, input_ids: Tensor, prompts: Tensor) -> Tensor:
        words = self.lm.get_input_embeddings()(input_ids)
        return torch.cat([prompts.to(words.dtype), words], dim=1)


def _beam_cache() -> dict[str, Any]:
    """Cache for a beam search with one copy of an image's keys and values, which all beams of a report share."""
    from transformers import __version__
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    class BeamCache(EncoderDecoderCache):
        def reorder_cache(self, beam_idx: Any) -> None:
            self.self_attention_cache.reorder_cache(beam_idx)

    renamed = tuple(map(int, __version__.split(".")[:2])) >= (5, 24)
    return {"cache" if renamed else "past_key_values": BeamCache(DynamicCache(), DynamicCache())}
