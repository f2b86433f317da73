"""Random vision-language models of two families, as a site has them in folders: a Qwen2-VL and a Gemma 3."""

import shutil
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.models.config import ModelConfig, preset
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.vlm import TINY

MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
TURNS = ("<start_of_turn>", "<end_of_turn>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }} "
    "{% for c in m.content %}{% if c.type == 'image' %}<start_of_image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "<end_of_turn>{% endfor %}{% if add_generation_prompt %}<start_of_turn>model {% endif %}"
)


def saved(config: Any, folder: Path) -> Path:
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def write_qwen(folder: Path) -> Path:
    """The shipped configuration and processor, and weights."""
    from transformers import AutoConfig

    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    return saved(AutoConfig.from_pretrained(TINY), folder)


def write_gemma(folder: Path, width: int = 32) -> Path:
    """Images of 28 pixels, four tokens each."""
    from transformers import Gemma3Config, Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

    bytes_ = ReportTokenizer.train(["There is no pleural effusion."] * 2, 300, 99)._tokenizer
    bytes_.encode_special_tokens = False
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        extra_special_tokens=MARKS, additional_special_tokens=list(TURNS),
    )  # fmt: skip
    pixels = Gemma3ImageProcessor(size={"height": 28, "width": 28})
    Gemma3Processor(pixels, tokenizer, TEMPLATE, image_seq_length=4).save_pretrained(folder)
    boi, eoi, image = tokenizer.convert_tokens_to_ids(list(MARKS.values()))
    text = {
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4, "initializer_range": 0.1,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "sliding_window": 512,
    }  # fmt: skip
    vision = {
        "hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    marks = {"boi_token_index": boi, "eoi_token_index": eoi, "image_token_index": image, "image_token_id": image}
    return saved(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **marks), folder)


FAMILIES = {"qwen": write_qwen, "gemma": write_gemma}


def vlm_config(folder: Path, **settings: Any) -> ModelConfig:
    """Of a model in a folder."""
    own = {"decoder_name": str(folder), "weights": None, "max_length": 24, "slice_view": "slices"}
    return preset("vlm-tiny", **(own | settings))
