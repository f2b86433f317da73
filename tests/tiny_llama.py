"""A random causal language model of the Llama family, as a site has one in a folder."""

import shutil
from pathlib import Path

import torch

from fedtar_flare.models.config import ASSETS


def write_llama(folder: Path, width: int = 16) -> Path:
    """Write two layers as ``save_pretrained`` does, with the shipped tokenizer beside them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1500, hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=96, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(ASSETS / "small" / "tokenizer.json", folder)
    return folder
