"""The decoder that a configuration asks for: GPT-2 with cross-attention, or a language model with the image as prefix.

With a prefix (R2GenGPT, FedMRG's paper) the image's tokens, mapped to the width of words, stand before the report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.r2gen import add_memory
from fedtar_flare.models.sources import NO_CODE, fetching, load_or_make
from fedtar_flare.models.tokenizer import ReportTokenizer

if TYPE_CHECKING:
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "4bit": torch.bfloat16}
"""Type of a decoder's weights, or the one that four bits are computed in."""


class CrossDecoder:
    """Decodes and generates with a GPT-2 of transformers; it has no weights of its own.

    With ``at_begin``, prompts share the begin token's position and weight; else they take the last positions.
    """

    def __init__(self, lm: Any):
        self.lm, self.at_begin = lm, False

    def states_of(self, input_ids: Tensor) -> Tensor:
        """Hidden states (B, L, E) over a text without an image, such as the report of the visit before."""
        return self.lm.transformer(input_ids, use_cache=False).last_hidden_state

    def decode(self, memory: Tensor, mask: Tensor, input_ids: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits (B, L, V) and last hidden states (B, L, E) that predict the token after each of ``input_ids``."""
        # Padding is on the right, so the causal mask alone keeps it from every token that has a label.
        attended = {"encoder_hidden_states": memory, "encoder_attention_mask": mask, "use_cache": False}
        if prompts is None:
            states = self.lm.transformer(input_ids=input_ids, **attended).last_hidden_state
        else:
            inputs, number = self._with_prompts(input_ids, prompts), prompts.shape[1]
            order = torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)
            # without a mask, positions that begin anew would be taken for another text
            positions = self._positions(order, inputs.new_ones(inputs.shape[:2]), number)
            states = self.lm.transformer(inputs_embeds=inputs, **positions, **attended).last_hidden_state[:, number:]
        return self.lm.lm_head(states), states

    def write(self, memory: Tensor, mask: Tensor, begin: Tensor, prompts: Tensor | None, settings: Any) -> Tensor:
        """Token ids (B * R, L) from the begin token (B, 1) on, by generation ``settings`` (R sequences each)."""
        from transformers import __version__
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        class BeamCache(EncoderDecoderCache):
            """One copy of an image's keys and values, which all beams of a report share."""

            def reorder_cache(self, beam_idx: Any) -> None:
                self.self_attention_cache.reorder_cache(beam_idx)

        renamed = tuple(map(int, __version__.split(".")[:2])) >= (5, 24)
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(begin)}
        if prompts is not None:
            embedded = self._with_prompts(begin, prompts)
            inputs = {"inputs_embeds": embedded, "attention_mask": begin.new_ones(embedded.shape[:2])}
        inputs["cache" if renamed else "past_key_values"] = BeamCache(DynamicCache(), DynamicCache())
        with self._positioned(0 if prompts is None else prompts.shape[1]):
            ids: Tensor = self.lm.generate(
                begin, **inputs, encoder_hidden_states=memory, encoder_attention_mask=mask, generation_config=settings
            )
        return ids

    def _positions(self, order: Tensor, mask: Tensor | None, prompts: int) -> dict[str, Tensor | None]:
        """Positions and mask of D prompts, begin token and words; D at the begin token get ``-log(D + 1)`` each."""
        first = 0 if self.at_begin else self.lm.config.n_positions - prompts + order
        positions = torch.where(order < prompts, first, order - prompts)
        if self.at_begin:
            keys = torch.arange(int(order.max()) + 1, device=order.device)
            shared = torch.where(keys <= prompts, -math.log(prompts + 1), 0.0)
            mask = torch.where(keys <= order[:, None, :, None], shared, torch.finfo(torch.float32).min)
        return {"position_ids": positions, "attention_mask": mask}

    @contextmanager
    def _positioned(self, prompts: int) -> Iterator[None]:
        """Let GPT-2 place and weigh what it generates as :meth:`decode` does."""

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | self._positions(kwargs["position_ids"], kwargs["attention_mask"], prompts)

        handle = self.lm.transformer.register_forward_pre_hook(hook, with_kwargs=True) if prompts else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    def _with_prompts(self, input_ids: Tensor, prompts: Tensor) -> Tensor:
        words = self.lm.get_input_embeddings()(input_ids)
        return torch.cat([prompts.to(words.dtype), words], dim=1)


class PrefixDecoder(nn.Module):
    """Decodes ``[image tokens (M), BOS, prompts (D), report]`` as one sequence by a causal language model ``lm``."""

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
        """As :meth:`CrossDecoder.states_of`."""
        return self.lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state

    def decode(self, memory: Tensor, mask: Tensor, input_ids: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor]:
        """As :meth:`CrossDecoder.decode`; the last prompt, not the begin token, predicts the first word."""
        inputs, attention, positions = self._prefix(memory, mask, input_ids[:, :1], prompts)
        words = self.get_input_embeddings()(input_ids[:, 1:]).to(inputs.dtype)
        more = torch.arange(1, words.shape[1] + 1, device=words.device)
        states = self.lm.base_model(
            inputs_embeds=torch.cat([inputs, words], dim=1),
            attention_mask=torch.cat([attention, attention.new_ones(words.shape[:2])], dim=1),
            position_ids=torch.cat([positions, positions[:, -1:] + more], dim=1),
            use_cache=False,
        ).last_hidden_state[:, -input_ids.shape[1] :]
        return self.lm.lm_head(states), states

    def write(self, memory: Tensor, mask: Tensor, begin: Tensor, prompts: Tensor | None, settings: Any) -> Tensor:
        """As :meth:`CrossDecoder.write`."""
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
        seen = mask.new_ones(len(mask), inputs.shape[1] - mask.shape[1])
        attention = torch.cat([mask, seen], dim=1).long()
        return inputs, attention, (attention.cumsum(1) - 1).clamp(min=0)


def build_decoder(
    config: ModelConfig, vocab_size: int, load_pretrained: bool
) -> tuple[GPT2LMHeadModel | PrefixDecoder, tuple[str, ...]]:
    """Build the decoder of a configuration; also return the names of its random parameters."""
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    settings: dict[str, Any] = {"add_cross_attention": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    name = config.decoder_name
    if name is None:
        if config.of_paper:
            settings |= {"activation_function": "relu", "n_inner": config.decoder_config["n_embd"]}
        sizes = GPT2Config(
            vocab_size=vocab_size,
            **config.decoder_config,
            initializer_range=0.05,  # as for the encoder
            bos_token_id=None,
            eos_token_id=None,
            **settings,
        )
        model, _ = load_or_make(GPT2LMHeadModel, sizes, None)
        if config.decoder == "r2gen":
            add_memory(model)
        return model, tuple(key for key, _ in model.named_parameters())
    with fetching("decoder", name):
        source = name if load_pretrained else None
        if config.decoder == "prefix":
            from transformers import AutoConfig, AutoModelForCausalLM

            published = AutoConfig.from_pretrained(name, **NO_CODE)
            _require_room(config, published, vocab_size)
            lm, untrained = load_or_make(AutoModelForCausalLM, published, source, dtype=DTYPES[config.decoder_dtype])
            return PrefixDecoder(lm), tuple(f"lm.{key}" for key in untrained)
        published = GPT2Config.from_pretrained(name, **settings)
        if published.model_type != "gpt2":
            kind = published.model_type
            raise ConfigError(f"model setting decoder_name is '{name}', a {kind} model: it must be of the GPT-2 family")
        _require_room(config, published, vocab_size)
        return load_or_make(GPT2LMHeadModel, published, source)


def _require_room(config: ModelConfig, published: Any, vocab_size: int) -> None:
    """Refuse a named decoder with too few positions for a report or too small a vocabulary."""
    name = f"decoder '{config.decoder_name}'"
    if config.max_length > (most := published.max_position_embeddings):
        raise ConfigError(f"model setting max_length is {config.max_length}: {name} has {most} positions")
    if vocab_size > (known := published.vocab_size):
        raise ConfigError(f"the tokenizer has {vocab_size} tokens: {name} knows {known}; take tokenizer='decoder'")


def decoder_tokenizer(name: str, max_length: int) -> ReportTokenizer:
    """Load the tokenizer of a named GPT-2-family decoder, with its own special tokens (one for all in GPT-2)."""
    from tokenizers import Tokenizer
    from tokenizers.implementations import ByteLevelBPETokenizer
    from transformers.utils.hub import cached_file

    with fetching("decoder", name):
        settings = json.loads(Path(str(cached_file(name, "config.json"))).read_text())
        try:
            tokenizer = Tokenizer.from_file(str(cached_file(name, "tokenizer.json")))
        except OSError:  # the decoder has no such file
            vocabulary, merges = (str(cached_file(name, file)) for file in ("vocab.json", "merges.txt"))
            tokenizer = ByteLevelBPETokenizer.from_file(vocabulary, merges)._tokenizer
    ends = end_marks(name)
    if not ends:
        raise ConfigError(f"decoder '{name}': config.json has no eos_token_id, so a report would never end")
    ids = (number if isinstance(number := settings.get(f"{key}_token_id"), int) else ends[0] for key in ("bos", "pad"))
    bos, pad = ids
    return ReportTokenizer(tokenizer, max_length, bos_id=bos, eos_id=ends[0], pad_id=pad, ends=ends)


def end_marks(name: str) -> list[int]:
    """Return the tokens that end what a named model writes, by its generation_config.json, else by its config.json."""
    from transformers import AutoConfig, GenerationConfig

    with fetching("decoder", name):
        try:
            settings = GenerationConfig.from_pretrained(name)
        except OSError:  # it has no such file
            settings = GenerationConfig.from_model_config(AutoConfig.from_pretrained(name, **NO_CODE))
    ends = settings.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
