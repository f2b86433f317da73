"""Random models of the published families, as a site has them in folders."""

import json
import shutil
from pathlib import Path

import timm
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer

from fedtar_flare.models.config import ASSETS


def write_llama(folder: Path, width: int = 16) -> Path:
    """Two layers as ``save_pretrained`` writes them, with the shipped tokenizer beside them."""
    config = transformers.LlamaConfig(
        vocab_size=1500, hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=96, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(ASSETS / "small" / "tokenizer.json", folder)
    return folder


def write_cvt(folder: Path) -> Path:
    """A CvT image classifier, as microsoft/cvt-* are published."""
    torch.manual_seed(1)
    sizes = {"embed_dim": [8, 16, 24], "num_heads": [1, 1, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.1]}
    transformers.CvtForImageClassification(transformers.CvtConfig(**sizes)).save_pretrained(folder)
    return folder


def write_gpt2(folder: Path, text: str = "the lungs are clear") -> Path:
    """A GPT-2 without cross-attention, with GPT-2's one special token, in float16; its tokenizer in both forms."""
    folder.mkdir(exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text] * 3, 300, special_tokens=["<|endoftext|>"])
    tokenizer.save_model(str(folder))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(2)
    sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).half().save_pretrained(folder)
    return folder


def write_timm(folder: Path, name: str, **sizes: int) -> dict[str, torch.Tensor]:
    """A model of timm as its hub has it; returns its weights."""
    model = timm.create_model(name, num_classes=0, **sizes)
    published = {**model.pretrained_cfg, "num_classes": 0, "input_size": [3, *[sizes.get("img_size", 32)] * 2]}
    folder.mkdir(exist_ok=True)
    about = {"architecture": name, "num_classes": 0, "pretrained_cfg": published}
    (folder / "config.json").write_text(json.dumps(about))
    save_file(model.state_dict(), folder / "model.safetensors")
    return model.state_dict()
