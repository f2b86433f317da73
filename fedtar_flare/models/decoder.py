"""The decoder that a configuration asks for, GPT-2 with cross-attention by default; tokenizers of named ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.prefix_decoder import PrefixDecoder, build_prefix_decoder
from fedtar_flare.models.r2gen import add_memory
from fedtar_flare.models.sources import fetching, load_or_make, quiet_loading, require_room
from fedtar_flare.models.tokenizer import ReportTokenizer

if TYPE_CHECKING:
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel


def build_decoder(
    config: ModelConfig, vocab_size: int, load_pretrained: bool
) -> tuple[GPT2LMHeadModel | PrefixDecoder, tuple[str, ...]]:
    """Build the decoder of a configuration; also return the names of its random parameters.

    ``load_pretrained=False`` is for a model whose whole checkpoint is loaded later. ConfigError where it cannot be
    fetched, is not of the GPT-2 family, or is too small for ``max_length`` or tokenizer.
    """
    if config.decoder == "prefix":
        assert config.decoder_name is not None
        return build_prefix_decoder(
            config.decoder_name, config.decoder_dtype, vocab_size, config.max_length, load_pretrained
        )
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    settings: dict[str, Any] = {"add_cross_attention": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if config.decoder_name is None:
        if config.of_paper:
            settings |= {"activation_function": "relu", "n_inner": config.decoder_config["n_embd"]}
        own = GPT2Config(
            vocab_size=vocab_size,
            **config.decoder_config,
            initializer_range=0.05,  # as for the encoder
            bos_token_id=None,
            eos_token_id=None,
            **settings,
        )
        model, _ = load_or_make(GPT2LMHeadModel, own, None)
        if config.decoder == "r2gen":
            add_memory(model)
        return model, tuple(name for name, _ in model.named_parameters())
    with fetching("decoder", config.decoder_name), quiet_loading():
        published = GPT2Config.from_pretrained(config.decoder_name, **settings)
        if published.model_type != "gpt2":
            raise ConfigError(
                f"model setting decoder_name is '{config.decoder_name}', a {published.model_type} model: it must be of "
                "the GPT-2 family"
            )
        require_room(config.decoder_name, published, config.max_length, vocab_size)
        return load_or_make(GPT2LMHeadModel, published, config.decoder_name if load_pretrained else None)


def decoder_tokenizer(name: str, max_length: int) -> ReportTokenizer:
    """Load the tokenizer of a named GPT-2-family decoder, with its own special tokens (one for all in GPT-2)."""
    from tokenizers import Tokenizer
    from tokenizers.implementations import ByteLevelBPETokenizer

    with fetching("decoder", name):
        settings = json.loads(Path(_file(name, "config.json")).read_text())
        try:
            tokenizer = Tokenizer.from_file(_file(name, "tokenizer.json"))
        except OSError:  # the decoder has no such file
            vocabulary, merges = (_file(name, file) for file in ("vocab.json", "merges.txt"))
            tokenizer = ByteLevelBPETokenizer.from_file(vocabulary, merges)._tokenizer
    eos = settings.get("eos_token_id")
    if not isinstance(eos, int):
        raise ConfigError(f"decoder '{name}': config.json has no eos_token_id, so a report would never end")
    bos, pad = settings.get("bos_token_id"), settings.get("pad_token_id")
    return ReportTokenizer(
        tokenizer,
        max_length,
        bos_id=bos if isinstance(bos, int) else eos,
        eos_id=eos,
        pad_id=pad if isinstance(pad, int) else eos,
    )


def _file(name: str, filename: str) -> str:
    """Path of a model's file, in its folder or fetched from the hub; OSError where the model has none of that name."""
    from transformers.utils.hub import cached_file

    return str(cached_file(name, filename))
