"""Random vision-language models of two families, as a site has them in folders: a Qwen2-VL and a Gemma 3."""

import shutil
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.models.config import ModelConfig, preset
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.vlm import TINY

MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }} "
    "{% for c in m.content %}{% if c.type == 'image' %}<start_of_image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "<end_of_turn>{% endfor %}{% if add_generation_prompt %}<start_of_turn>model {% endif %}"
)


def write_qwen(folder: Path) -> Path:
    """The shipped configuration and processor, and weights."""
    from transformers import AutoConfig

    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    return _saved(AutoConfig.from_pretrained(TINY), folder)


def write_gemma(folder: Path, width: int = 32) -> Path:
    """Images of 28 pixels, four tokens each."""
    from transformers import Gemma3Config, Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

    own = ReportTokenizer.train(["There is no pleural effusion."] * 2, 300, 99)._tokenizer
    own.encode_special_tokens = False
    marks = {"extra_special_tokens": MARKS, "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}
    ends = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, **ends, **marks)
    pixels = Gemma3ImageProcessor(size={"height": 28, "width": 28})
    Gemma3Processor(pixels, tokenizer, TEMPLATE, image_seq_length=4).save_pretrained(folder)
    names = ("boi_token_index", "eoi_token_index", "image_token_index")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(MARKS.values())), strict=True))
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "head_dim": width // 4, "initializer_range": 0.1}
    parts = {"text_config": sizes | text, "vision_config": sizes | {"image_size": 28, "patch_size": 7}}
    return _saved(Gemma3Config(mm_tokens_per_image=4, image_token_id=ids[names[2]], **parts, **ids), folder)


def _saved(config: Any, folder: Path) -> Path:
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for name, value in model.named_parameters():
            if name.endswith("mm_input_projection_weight"):  # of zeros, a Gemma would see nothing
                torch.nn.init.normal_(value, std=0.1)
        model.save_pretrained(folder)
    return folder


FAMILIES = {"qwen": write_qwen, "gemma": write_gemma}


def vlm_config(folder: Path, **settings: Any) -> ModelConfig:
    """Of a model in a folder."""
    own = {"decoder_name": str(folder), "weights": None, "max_length": 24, "slice_view": "slices"}
    return preset("vlm-tiny", **(own | settings))
